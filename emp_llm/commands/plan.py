"""`emp-llm plan`: models x recipes -> plan.jsonl, the jobs of a study."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from emp_llm.cli import command, options_from
from emp_llm.cluster.jobs import PLAN_NAME, Job, read_plan, writable, write_plan
from emp_llm.common.errors import UserError, count_of
from emp_llm.options.jobs import DEFAULT_SUITE, PlanOptions


@dataclass(frozen=True)
class PlanSummary:
    """A written plan.

    Attributes:
        study: its folder.
        jobs: in the order of the plan.
    """

    study: Path
    jobs: list[Job]


@command
def plan(options: PlanOptions) -> PlanSummary:
    """Plan a study of models and methods as a file: one job per line, with its command and the jobs
    that come first.

    Each model is evaluated dense and calibrated once; each recipe is pruned and evaluated. No
    weights are read or downloaded. The file may be edited. Paths are relative to the current
    folder, or, in further options, to the study's.

    Returns the jobs.
    """
    from emp_llm.calibration.texts import calibration_corpora, check_there
    from emp_llm.cluster.planning import (
        check_further,
        model_jobs,
        named_models,
        study_recipes,
        with_table,
    )
    from emp_llm.evaluation.suites import find_suite
    from emp_llm.hub.local_model import find_config
    from emp_llm.options.calibration import TEXT

    options = with_table(options)
    recipes = study_recipes(options, options_from)
    models = named_models(options.models or [])
    # What is missing is said now, not by a job.
    texts = calibration_corpora(options.calibration or TEXT, None, options.samples, options.seqlen)
    judged = find_suite(options.suite or DEFAULT_SUITE).corpus
    for text in texts if judged is None else [*texts, judged]:
        if text.file is not None:
            check_there(text.file)
    for name in models:
        find_config(name, None, options.trust_remote_code)
    jobs = [
        job for name, slug in models.items() for job in model_jobs(options, name, slug, recipes)
    ]

    check_further(options, jobs, options_from)
    path = options.output / PLAN_NAME
    if path.exists() and not options.overwrite:
        older = {job.id: job for job in read_plan(options.output)}
        different = sum(older.get(job.id) != job for job in jobs) + len(
            older.keys() - {job.id for job in jobs}
        )
        if different:
            raise UserError(
                f"{path}: it holds another plan; {count_of(different, 'job')} would change. Name "
                "another --output, or --overwrite."
            )
    with writable(path):
        write_plan(options.output, jobs)
    return PlanSummary(options.output, jobs)


def show(summary: PlanSummary) -> None:
    """Print the jobs by kind."""
    kinds = Counter(job.kind for job in summary.jobs)
    numbers = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    print(f"{count_of(len(summary.jobs), 'job')}: {numbers}")
    study = summary.study
    print(
        f"written to {study / PLAN_NAME}; start it with emp-llm run {study}, or emp-llm submit "
        "with a site file, which says what the jobs need"
    )
