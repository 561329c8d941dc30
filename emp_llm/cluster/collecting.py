"""What has become of a study: the status of its jobs, the results of the finished ones, and
their tables beside the paper's.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.cluster.jobs import Job, JobFiles, JobState, option_of, read_plan
from emp_llm.cluster.slurm import queued_jobs
from emp_llm.common.errors import UserError, count_of, printable
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME
from emp_llm.common.tables import Rows, csv_table, markdown_table, percent_cell, table
from emp_llm.evaluation.comparison import (
    change_between,
    change_notes,
    change_of,
    change_text,
    formatted,
    in_percent,
    published_row,
    signed,
    value_cell,
    values_of,
)
from emp_llm.evaluation.results import results_of_report
from emp_llm.pruning.counts import REPORT_LIMIT
from emp_llm.records.base import read_record
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.records.sweep import Sweep
from emp_llm.reporting.studies import short_model_name

logger = logging.getLogger(__name__)
_DENSE = "dense.evaluate"  # the end of the id of a model's first job
_PROTOCOL = (
    "† by another protocol than lm-eval's: compare the changes from the dense model, not the values"
)
_HEAD = [
    "model",
    "recipe",
    "status",
    "sparsity of targets",
    "measure",
    "value",
    "stderr",
    "partial",
]
_HEAD += [
    "change",
    "change stderr",
    "change paired",
    "published sparsity percent",
    "published",
    "published change",
]
_HEAD += ["change beyond the published"]


# Status.


@dataclass(frozen=True)
class JobView:
    """A job with what has become of it.

    Attributes:
        files: of the job.
        status: of the job; "queued" if it waits in Slurm; "foreign" if its output was made by
            another command.
        state: of its last attempt.
        message: why it failed, or is foreign.
    """

    files: JobFiles
    status: str
    state: JobState | None
    message: str = ""

    @property
    def job(self) -> Job:
        return self.files.job


def job_views(study: Path) -> list[JobView]:
    """All jobs of a study, in the order of its plan; nothing is changed. UserError if the plan
    is wrong.
    """
    plan = read_plan(study)
    try:
        queued = queued_jobs(study.resolve())
    except UserError as error:
        logger.warning("warning: %s", error)
        queued = {}
    views = []
    for files in [JobFiles(study, job) for job in plan]:
        state = files.state()
        status = "foreign"
        message = ""
        try:
            status = files.status()
        except UserError as error:
            message = str(error)
        if files.job.id in queued and status in ("missing", "stopped", "failed"):
            status = "queued"
        if status == "failed" and state is not None:
            message = state.message
        views.append(JobView(files, status, state, message))
    return views


# Results.


@dataclass(frozen=True)
class StudyRow:
    """A recipe of a model, or the dense model.

    Attributes:
        label: short name.
        status: of its job.
        result: None if it is missing.
    """

    label: str
    status: str
    result: Results | None = None


@dataclass
class StudyModel:
    """A model of a study: its dense results, and those of its recipes.

    Attributes:
        name: as the plan's commands name it.
    """

    name: str
    dense: StudyRow = StudyRow("dense", "missing")
    rows: list[StudyRow] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its short name."""
        return printable(short_model_name(self.name))


@dataclass(frozen=True)
class StudyResults:
    """The results of a study.

    Attributes:
        models: in the order of the plan.
        runs: outputs of finished prunes; outputs: of finished evaluations and sweeps.
        unreadable: sentences about outputs that cannot be read.
    """

    models: list[StudyModel]
    runs: list[Path]
    outputs: list[Path]
    unreadable: list[str]


def study_results(views: list[JobView]) -> StudyResults:
    """Read the results of the finished jobs. An output that cannot be read is missing, and
    named.
    """
    models: dict[str, StudyModel] = {}
    prefixes: dict[str, str] = {}  # model -> the beginning of the ids of its jobs
    sources: dict[str, str] = {}  # output of a prune -> its model
    runs = list[Path]()
    outputs = list[Path]()
    unreadable = list[str]()
    for view in views:
        job = view.job
        status = view.status
        named = option_of(job, "--model")
        if job.kind == "prune":
            sources[job.output] = named
            runs += [view.files.output] if status == "done" else []
        if job.kind not in ("evaluate", "sweep"):
            continue
        name = sources.get(named, named)
        model = models.setdefault(name, StudyModel(name))
        measured: list[tuple[str, Results]] = []
        if status == "done":
            try:
                measured = _measured(view)
                outputs.append(view.files.output)
            except UserError as error:
                unreadable.append(str(error))
                status = "unreadable"
        if job.kind == "sweep":
            dense = next((found for _, found in measured if found.pruned is None), None)
            model.dense = StudyRow("dense", status, dense)
            points = [
                StudyRow(point, status, found)
                for point, found in measured
                if found.pruned is not None
            ]
            model.rows += points or [StudyRow(job.id, status)]
            continue
        result = measured[0][1] if measured else None
        if named in sources:
            model.rows.append(
                StudyRow(
                    job.id.removeprefix(prefixes.get(name, "")).removesuffix(".evaluate"),
                    status,
                    result,
                )
            )
        else:
            prefixes[name] = job.id.removesuffix(_DENSE) if job.id.endswith(_DENSE) else ""
            model.dense = StudyRow("dense", status, result)
    return StudyResults(list(models.values()), runs, outputs, unreadable)


def _measured(view: JobView) -> list[tuple[str, Results]]:
    """(name, results) of an evaluation, or of each point of a sweep and of its dense model.
    UserError for a damaged output.
    """
    output = view.files.output
    if view.job.kind == "evaluate":
        return [("", read_record(output, Results, INDEX_LIMIT))]
    return [
        (point.name, found)
        for point in read_record(output / SWEEP_NAME, Sweep, REPORT_LIMIT).points
        for found in results_of_report(
            read_record(output / "points" / point.name / REPORT_NAME, RunReport, REPORT_LIMIT)
        )
    ]


# Tables.


def _model_tables(model: StudyModel) -> tuple[Rows, list[list[Any]], list[str]]:
    """The table of a model with its footnotes, and its lines of the CSV file, one for each recipe
    and measure.

    Below a recipe of the paper stand its values, and by how much the change from the dense model is
    beyond the paper's.

    Returns:
        The table, the lines, and the footnotes.
    """
    rows = [model.dense, *model.rows]
    papers = [None if row.result is None else published_row(row.result) for row in rows]
    values = [{} if row.result is None else values_of(row.result.measures) for row in rows]
    names = list(dict.fromkeys(name for each in values for name in each))
    shown: Rows = [["", "zeros, %", *names]]
    lines: list[list[Any]] = []
    for row, known, measured in zip(rows, papers, values, strict=True):
        dense = row is model.dense
        zeros = _zeros(row)
        published = None if known is None else known.sparsity_percent
        start = [printable(model.name), printable(row.label), row.status, zeros]
        ours = []
        theirs = []
        gaps = []
        for name in names:
            value = measured.get(name)
            base = values[0].get(name)
            change = (
                None if dense or value is None or base is None else change_of(name, value, base)
            )
            paper, paper_base = (
                None if each is None else each.values.get(name) for each in (known, papers[0])
            )
            paper_change = (
                None
                if paper is None or paper_base is None
                else change_between(name, paper_base, paper)
            )
            gap = (
                None
                if change is None or paper_change is None
                else replace(change, value=change.value - paper_change)
            )
            ours.append(
                value_cell(name, value)
                + ("" if change is None else f" ({change_text(name, change)})")
            )
            digits, mark, unit = (2, " †", "") if in_percent(name) else (3, "", " %")
            beside = "" if dense or paper_change is None else f" ({signed(paper_change)}{unit})"
            theirs.append("-" if paper is None else f"{formatted(paper, digits)}{mark}{beside}")
            gaps.append("-" if gap is None else change_text(name, gap))
            line = [
                *start,
                name,
                *(getattr(value, field, None) for field in ("value", "stderr", "partial")),
            ]
            line += [getattr(change, field, None) for field in ("value", "stderr")]
            line.append(None if change is None or change.stderr is None else change.paired)
            lines.append([*line, published, paper, paper_change, getattr(gap, "value", None)])
        if not names:
            lines.append(start + [None] * (len(_HEAD) - len(start)))
        shown.append(
            [printable(row.label), row.status if row.result is None else percent_cell(zeros), *ours]
        )
        if known is not None:
            shown.append(
                ["paper", "-" if dense or published is None else f"{published:.2f}", *theirs]
            )
        if known is not None and papers[0] is not None and not dense:
            shown.append(["change beyond the paper's", "", *gaps])

    notes = [
        "in brackets the changes from the dense model: of perplexities in percent, of "
        "accuracies in points"
    ]
    if model.dense.result is None:
        notes.append("no changes: the dense model is missing")
    notes += change_notes(names, values[0], values[1:])
    shares = [share for share in map(_zeros, rows) if share is not None]
    if len({f"{share:.2f}" for share in shares}) > 1:
        notes.append(
            "the rows differ in their zeros too; plan --emp-sparsities compares methods "
            "at the same share"
        )
    if any(value.partial for each in values for value in each.values()):
        notes.append("* partial: only some of the examples or of the text")
    if papers[0] is not None and any(map(in_percent, names)):
        notes.append(_PROTOCOL)
    return shown, lines, notes


def study_markdown(results: StudyResults, done: int, jobs: int, missing: list[str]) -> str:
    """All tables of a study as a page of Markdown, which says what is missing."""
    parts = ["# Results of the study"]
    if done == jobs:
        parts.append(f"All {count_of(jobs, 'job')} are done.")
    else:
        parts.append(f"Partial: {done:,} of {count_of(jobs, 'job')} are done. Missing:")
        parts.append("\n".join(f"- {line}" for line in missing))
    parts += [f"Unreadable: {printable(line, 400)}" for line in results.unreadable]
    for model in results.models:
        rows, _, notes = _model_tables(model)
        parts += [f"## {model.title}", markdown_table(rows), *notes]
    return "\n\n".join(parts) + "\n"


def study_text(results: StudyResults) -> str:
    """All tables of a study for a terminal."""
    parts = []
    footnotes = dict[str, None]()
    for model in results.models:
        rows, _, notes = _model_tables(model)
        parts.append(f"{model.title}\n{table(rows)}\n")
        footnotes |= dict.fromkeys(notes)
    return "\n".join([*parts, *footnotes])


def study_csv(results: StudyResults) -> str:
    """All values of a study, one a line."""
    return (
        csv_table([_HEAD, *(line for model in results.models for line in _model_tables(model)[1])])
        + "\n"
    )


def _zeros(row: StudyRow) -> float | None:
    """The sparsity of the targets; None for the dense model, and for a missing result."""
    return (
        None
        if row.result is None or row.result.pruned is None
        else row.result.pruned.sparsity_of_targets
    )
