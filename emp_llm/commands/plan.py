"""`emp-llm plan`: models x recipes -> a folder for Snakemake."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.cli import command, options_from
from emp_llm.common.errors import UserError, count_of, reason
from emp_llm.options.sweep import PlanOptions

if TYPE_CHECKING:
    from emp_llm.study.plan import Study


@dataclass(frozen=True)
class PlanSummary:
    """A written plan.

    Attributes:
        folder: of the study.
        study: the content of study.yaml.
    """

    folder: Path
    study: "Study"


@command
def plan(options: PlanOptions) -> PlanSummary:
    """Plan a study of models and methods as a folder for Snakemake: study.yaml names the models and
    the points, and a Snakefile has the jobs.

    Each model is evaluated dense and calibrated once; each recipe is pruned and evaluated. No
    weights are read or downloaded. The files may be edited. Paths are relative to the current
    folder.

    Returns the study.
    """
    from emp_llm.checkpoint.files import write_text
    from emp_llm.study.plan import STUDY_NAME, named_models, study_of, study_text, with_table

    options = with_table(options)
    study = study_of(options, named_models(options.models or []), options_from)
    folder = options.output
    for model in study.models:
        if folder.resolve() == Path(model.model).resolve():
            raise UserError(f"--output {folder}: it holds a model. Name another folder.")
    text = study_text(study)
    files = {STUDY_NAME: text}
    room = Path(__file__).parents[1] / "study"
    try:
        path = folder / STUDY_NAME
        if not options.overwrite and path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(
                f"{path}: it holds another plan. Name another --output, or --overwrite."
            )
        for name in ("Snakefile", "profiles/default/config.yaml"):
            if options.overwrite or not (folder / name).exists():  # else it may have been edited
                files[name] = (room / name).read_text(encoding="utf-8")
        for name, content in files.items():
            inside = (folder / name).parent
            if inside.resolve() != folder.resolve() / Path(name).parent:
                raise UserError(
                    f"{inside} lies behind a link, and a plan is written through none. Delete it."
                )
            inside.mkdir(parents=True, exist_ok=True)
            write_text(folder / name, content)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written ({reason(error)}).") from error
    return PlanSummary(folder, study)


def show(summary: PlanSummary) -> None:
    """Print what was planned, and the commands to type next."""
    models = len(summary.study.models)
    points = len(summary.study.points)
    jobs = models * (1 + 2 * points)
    calibrated = any(point.after for point in summary.study.points)
    jobs += models if calibrated else 0
    print(
        f"{count_of(models, 'model')}, {count_of(points, 'point')}: {count_of(jobs, 'job')} in "
        f"{summary.folder}"
    )
    if shutil.which("snakemake") is None:
        print("Snakemake is not installed: pip install 'emp-llm[cluster]'")
    print(f"next: cd {summary.folder}")
    print("      snakemake --cores 4")
