"""`emp-llm plan`: models x recipes -> plan.jsonl, the jobs of a study."""

from dataclasses import dataclass, replace
from pathlib import Path

from emp_llm.cli import command, options_from, run
from emp_llm.cluster.jobs import PLAN_NAME, Job, Needs, read_plan, write_plan
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.tables import table
from emp_llm.options.jobs import DEFAULT_GPU_GB, DEFAULT_SUITE, PlanOptions


@dataclass(frozen=True)
class PlanSummary:
    """A written plan.

    Attributes:
        study: its folder.
        jobs: of the plan.
        assumptions: of the estimated needs, as sentences.
    """

    study: Path
    jobs: list[Job]
    assumptions: list[str]


@command
def plan(options: PlanOptions) -> PlanSummary:
    """Plan a study of models x methods as a file: one job a line, with its command, the jobs that
    come first, and its needs.

    Each model is evaluated dense and calibrated once; each recipe is pruned and evaluated. The
    needs (GPUs, memory, disk, hours) are estimated from the models' configs alone; no weights are
    read or downloaded. The file may be edited. Paths in further options are relative to the study's
    folder, where the jobs run.

    Returns the jobs, and the assumptions of the estimates.
    """
    from emp_llm.calibration.texts import calibration_corpora
    from emp_llm.cluster.planning import (
        Work,
        assumptions,
        model_jobs,
        model_size,
        named_models,
        study_recipes,
        with_table,
    )
    from emp_llm.evaluation.suites import find_suite
    from emp_llm.options.calibration import CalibrationOptions

    options = with_table(options)
    suite = find_suite(options.suite or DEFAULT_SUITE)
    recipes = study_recipes(options, options_from)
    text = CalibrationOptions(
        calibration=options.calibration, samples=options.samples, seqlen=options.seqlen
    )
    moves_by = next((norms.updates for norms in recipes.values() if norms.updates), None)
    jobs: list[Job] = []
    assumed: list[str] = []
    for name, slug in named_models(options.models or []).items():
        size = model_size(name, None, options.trust_remote_code, options.targets or "mlp", moves_by)
        corpora = calibration_corpora(text, size.context)
        work = Work(
            samples=sum(corpus.samples or 0 for corpus in corpora),
            seqlen=max(corpus.seqlen or 0 for corpus in corpora),
            suite=suite,
            limit=options.limit,
            dtype=options.dtype or "auto",
            gpu_gb=DEFAULT_GPU_GB if options.gpu_gb is None else options.gpu_gb,
            processes=options.processes or 1,
        )
        jobs += model_jobs(options, name, slug, recipes, size, work)
        assumed += assumptions(replace(size, name=slug), work)

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
    try:
        write_plan(options.output, jobs)
    except OSError as error:
        raise UserError(
            f"--output {options.output}: the plan cannot be written ({error.strerror})."
        ) from error
    return PlanSummary(options.output, jobs, list(dict.fromkeys(assumed)))


def show(summary: PlanSummary) -> None:
    """Print the jobs by kind, and the assumptions."""
    classes: dict[tuple[str, str], list[Needs]] = {}
    for job in summary.jobs:
        classes.setdefault((job.kind, _place(job.needs)), []).append(job.needs)
    rows = [["jobs", "each on", "memory, GB", "disk, GB", "hours"]]
    for (kind, place), needs in classes.items():
        columns = zip(*((each.memory_gb, each.disk_gb, each.hours) for each in needs), strict=True)
        rows.append([f"{len(needs)} {kind}", place, *map(_range, columns)])
    print(table(rows))
    disk = sum(job.needs.disk_gb for job in summary.jobs)
    gpu_hours = sum(job.needs.hours * job.needs.gpus * job.needs.nodes for job in summary.jobs)
    hours = sum(job.needs.hours for job in summary.jobs)
    total = f"{count_of(len(summary.jobs), 'job')}: {hours:.3g} hours one after the other"
    total += f", {gpu_hours:.3g} GPU hours" if gpu_hours else ""
    print(f"{total}, {disk:.3g} GB of disk")
    print("assumed:", *summary.assumptions, sep="\n  ")
    file = summary.study / "plan.jsonl"
    study = summary.study
    print(f"written to {file}; start it with emp-llm run {study}, or emp-llm submit")


def _place(needs: Needs) -> str:
    """What a job computes on, in words."""
    where = f"{count_of(needs.gpus, 'GPU')} of {needs.gpu_gb:g} GB" if needs.gpus else "CPU"
    where += f", {needs.processes} processes" if needs.processes > 1 else ""
    return f"{needs.nodes} nodes with {where}" if needs.nodes > 1 else where


def _range(numbers: tuple[float, ...]) -> str:
    """The least and the greatest of some numbers, with two digits."""
    low = f"{min(numbers):.2g}"
    high = f"{max(numbers):.2g}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    run(plan, show)
