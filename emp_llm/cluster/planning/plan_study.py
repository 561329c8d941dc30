"""`emp-llm plan`: writes the plan of a study, and sums up its needs."""

from dataclasses import dataclass, replace
from pathlib import Path

from emp_llm.cluster.plan_file import PLAN_NAME, Job, Needs, read_plan, write_plan
from emp_llm.cluster.planning.job_maker import JobMaker, ParseWords, planned_models
from emp_llm.cluster.planning.needs import assumptions
from emp_llm.cluster.planning.study_table import planned
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.tables import table
from emp_llm.options.jobs.planning import PlanOptions


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


def plan_study(options: PlanOptions, parse_words: ParseWords) -> PlanSummary:
    """Write the plan of a study; `parse_words` as for `JobMaker`.

    Raises:
        UserError: options are wrong, a model's config cannot be read, or the folder holds another plan.
    """
    definition = planned(options)
    maker = JobMaker(definition, parse_words)
    models = planned_models(definition)
    jobs = [job for model in models for job in maker.jobs(model)]
    _check_replaces(options, jobs)
    try:
        write_plan(options.output, jobs)
    except OSError as error:
        raise UserError(f"--output {options.output}: the plan cannot be written ({error.strerror}).") from error
    sentences = [each for model in models for each in assumptions(replace(model.size, name=model.slug), model.work)]
    return PlanSummary(options.output, jobs, list(dict.fromkeys(sentences)))


def _check_replaces(options: PlanOptions, jobs: list[Job]) -> None:
    """Raise UserError if the folder holds another plan, which may not be replaced."""
    path = options.output / PLAN_NAME
    if not path.exists() or options.overwrite:
        return
    older = {job.id: job for job in read_plan(options.output)}
    different = sum(older.get(job.id) != job for job in jobs) + len(older.keys() - {job.id for job in jobs})
    if different:
        raise UserError(
            f"{path}: it holds another plan; {count_of(different, 'job')} would change. Name another --output, or --overwrite."
        )


def plan_words(summary: PlanSummary) -> str:
    """The jobs by their kind and needs, their sums, and the assumptions."""
    classes: dict[tuple[str, str], list[Job]] = {}
    for job in summary.jobs:
        classes.setdefault((job.kind, _place(job.needs)), []).append(job)
    rows = [["jobs", "each on", "memory, GB", "disk, GB", "hours"]]
    for (kind, place), jobs in classes.items():
        rows.append(
            [
                f"{len(jobs)} {kind}",
                place,
                _range([job.needs.memory_gb for job in jobs]),
                _range([job.needs.disk_gb for job in jobs]),
                _range([job.needs.hours for job in jobs]),
            ]
        )
    disk = sum(job.needs.disk_gb for job in summary.jobs)
    gpu_hours = sum(job.needs.hours * job.needs.gpus * job.needs.nodes for job in summary.jobs)
    hours = sum(job.needs.hours for job in summary.jobs)
    total = f"{count_of(len(summary.jobs), 'job')}: {hours:.3g} hours one after the other"
    total += f", {gpu_hours:.3g} GPU hours" if gpu_hours else ""
    lines = [table(rows), f"{total}, {disk:.3g} GB of disk", "assumed:", *(f"  {each}" for each in summary.assumptions)]
    lines.append(f"written to {summary.study / PLAN_NAME}; start it with emp-llm run {summary.study}, or emp-llm submit")
    return "\n".join(lines)


def _place(needs: Needs) -> str:
    """What a job computes on, in words."""
    where = f"{count_of(needs.gpus, 'GPU')} of {needs.gpu_gb:g} GB" if needs.gpus else "CPU"
    where += f", {needs.processes} processes" if needs.processes > 1 else ""
    return f"{needs.nodes} nodes with {where}" if needs.nodes > 1 else where


def _range(numbers: list[float]) -> str:
    """The least and the greatest of some numbers, with two digits."""
    low, high = f"{min(numbers):.2g}", f"{max(numbers):.2g}"
    return low if low == high else f"{low} to {high}"
