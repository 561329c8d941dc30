"""What has become of a study: the status of its jobs, the results of the finished ones, and their tables beside the paper's."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.cluster.jobs import JobFiles, JobState
from emp_llm.cluster.plan_file import Job, option_of, read_plan
from emp_llm.cluster.slurm import queued_jobs
from emp_llm.common.errors import UserError, count_of, printable
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME
from emp_llm.common.tables import Rows, csv_table, markdown_table, percent_cell, table
from emp_llm.evaluation.comparison import (
    Change,
    PublishedRow,
    Value,
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
_PROTOCOL = "† by another protocol than lm-eval's: compare the changes from the dense model, not the values"
_HEAD = ["model", "recipe", "status", "sparsity of targets", "measure", "value", "stderr", "partial"]
_HEAD += ["change", "change stderr", "change paired", "published sparsity percent", "published", "published change"]
_HEAD += ["change beyond the published"]


# Status.


@dataclass(frozen=True)
class JobView:
    """A job with what has become of it.

    Attributes:
        files: of the job.
        status: of the job; "queued" if it waits in Slurm; "foreign" if its output was made by another command.
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
    """All jobs of a study, in the order of its plan; nothing is changed. UserError if the plan is wrong."""
    plan = read_plan(study)
    try:
        queued = queued_jobs(study.resolve())
    except UserError as error:
        logger.warning("warning: %s", error)
        queued = {}
    views = []
    for files in [JobFiles(study, job) for job in plan]:
        state, status, message = files.state(), "foreign", ""
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
    """Read the results of the finished jobs. An output that cannot be read is missing, and named."""
    models: dict[str, StudyModel] = {}
    prefixes: dict[str, str] = {}  # model -> the beginning of the ids of its jobs
    sources: dict[str, str] = {}  # output of a prune -> its model
    runs, outputs, unreadable = list[Path](), list[Path](), list[str]()
    for view in views:
        job, status = view.job, view.status
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
            points = [StudyRow(point, status, found) for point, found in measured if found.pruned is not None]
            model.rows += points or [StudyRow(job.id, status)]
            continue
        result = measured[0][1] if measured else None
        if named in sources:
            model.rows.append(StudyRow(job.id.removeprefix(prefixes.get(name, "")).removesuffix(".evaluate"), status, result))
        else:
            prefixes[name] = job.id.removesuffix(_DENSE) if job.id.endswith(_DENSE) else ""
            model.dense = StudyRow("dense", status, result)
    return StudyResults(list(models.values()), runs, outputs, unreadable)


def _measured(view: JobView) -> list[tuple[str, Results]]:
    """(name, results) of an evaluation, or of each point of a sweep and of its dense model. UserError for a damaged output."""
    output = view.files.output
    if view.job.kind == "evaluate":
        return [("", read_record(output, Results, INDEX_LIMIT))]
    return [
        (point.name, found)
        for point in read_record(output / SWEEP_NAME, Sweep, REPORT_LIMIT).points
        for found in results_of_report(read_record(output / "points" / point.name / REPORT_NAME, RunReport, REPORT_LIMIT))
    ]


# Tables.


@dataclass(frozen=True)
class _Cell:
    """A measure, and the paper's value of it, with the changes of both from the dense model; None if it is unknown."""

    value: Value | None = None
    change: Change | None = None
    paper: float | None = None
    paper_change: float | None = None

    @property
    def gap(self) -> Change | None:
        """By how much the change is beyond the paper's."""
        if self.change is None or self.paper_change is None:
            return None
        return Change(self.change.value - self.paper_change, self.change.stderr, self.change.paired)


class ModelTable:
    """The tables of one model.

    Args:
        model: with its results.

    Attributes:
        title: short name of the model.
        notes: footnotes of the table.
    """

    def __init__(self, model: StudyModel) -> None:
        self.title = printable(short_model_name(model.name))
        self._name = printable(model.name)
        rows = [model.dense, *model.rows]
        papers = [None if row.result is None else published_row(row.result) for row in rows]
        values = [{} if row.result is None else values_of(row.result.measures) for row in rows]
        self._measures = list(dict.fromkeys(name for each in values for name in each))
        self._lines: list[tuple[StudyRow, PublishedRow | None, dict[str, _Cell]]] = []
        for row, known, measured in zip(rows, papers, values, strict=True):
            cells = {}
            for name in self._measures:
                value, base = measured.get(name), values[0].get(name)
                change = None if row is model.dense or value is None or base is None else change_of(name, value, base)
                paper, paper_base = (None if each is None else each.values.get(name) for each in (known, papers[0]))
                paper_change = None if paper is None or paper_base is None else change_between(name, paper_base, paper)
                cells[name] = _Cell(value, change, paper, paper_change)
            self._lines.append((row, known, cells))

        self.notes = ["in brackets the changes from the dense model: of perplexities in percent, of accuracies in points"]
        if model.dense.result is None:
            self.notes.append("no changes: the dense model is missing")
        self.notes += change_notes(self._measures, values[0], values[1:])
        if len({f"{share:.2f}" for row in rows if (share := _zeros(row)) is not None}) > 1:
            self.notes.append("the rows differ in their zeros too; plan --emp-sparsities compares methods at the same share")
        if any(value.partial for each in values for value in each.values()):
            self.notes.append("* partial: only some of the examples or of the text")
        if papers[0] is not None and any(map(in_percent, self._measures)):
            self.notes.append(_PROTOCOL)

    def rows(self) -> Rows:
        """A row for each recipe. Below a recipe of the paper stand its values, and the difference of the changes."""
        table = [["", "zeros, %", *self._measures]]
        _, dense_known, _ = self._lines[0]
        for number, (row, known, cells) in enumerate(self._lines):
            ours, papers, gaps = [], [], []
            for name, cell in cells.items():
                change = f" ({change_text(name, cell.change)})" if cell.change is not None else ""
                ours.append(value_cell(name, cell.value) + change)
                digits, mark, unit = (2, " †", "") if in_percent(name) else (3, "", " %")
                paper = "-" if cell.paper is None else f"{formatted(cell.paper, digits)}{mark}"
                papers.append(
                    paper + (f" ({signed(cell.paper_change)}{unit})" if number and cell.paper_change is not None else "")
                )
                gaps.append("-" if cell.gap is None else change_text(name, cell.gap))
            table.append([printable(row.label), row.status if row.result is None else percent_cell(_zeros(row)), *ours])
            if known is not None:
                zeros = known.sparsity_percent if number else None
                table.append(["paper", "-" if zeros is None else f"{zeros:.2f}", *papers])
            if known is not None and dense_known is not None and number:
                table.append(["change beyond the paper's", "", *gaps])
        return table

    def csv_rows(self) -> Rows:
        """A row for each recipe and measure, with all digits."""
        table = []
        for row, known, cells in self._lines:
            for name, cell in (cells or {"": _Cell()}).items():
                value, change, gap = cell.value, cell.change, cell.gap
                line = [self._name, printable(row.label), row.status, _digits(_zeros(row)), name]
                line += (
                    ["", "", ""] if value is None else [repr(value.value), _digits(value.stderr), str(value.partial).lower()]
                )
                paired = "" if change is None or change.stderr is None else str(change.paired).lower()
                line += ["", "", ""] if change is None else [_digits(change.value), _digits(change.stderr), paired]
                line += [_digits(None if known is None else known.sparsity_percent), _digits(cell.paper)]
                table.append([*line, _digits(cell.paper_change), _digits(None if gap is None else gap.value)])
        return table


def study_markdown(results: StudyResults, done: int, jobs: int, missing: list[str]) -> str:
    """All tables of a study as a page of Markdown, which says what is missing."""
    parts = ["# Results of the study"]
    if done == jobs:
        parts.append(f"All {count_of(jobs, 'job')} are done.")
    else:
        parts.append(f"Partial: {done:,} of {count_of(jobs, 'job')} are done. Missing:")
        parts.append("\n".join(f"- {line}" for line in missing))
    parts += [f"Unreadable: {printable(line, 400)}" for line in results.unreadable]
    for model in map(ModelTable, results.models):
        parts += [f"## {model.title}", markdown_table(model.rows()), *model.notes]
    return "\n\n".join(parts) + "\n"


def study_text(results: StudyResults) -> str:
    """All tables of a study for a terminal."""
    tables = [ModelTable(model) for model in results.models]
    notes = dict.fromkeys(note for each in tables for note in each.notes)
    return "\n".join([*(f"{each.title}\n{table(each.rows())}\n" for each in tables), *notes])


def study_csv(results: StudyResults) -> str:
    """All values of a study, one a line."""
    return csv_table([_HEAD, *(row for model in results.models for row in ModelTable(model).csv_rows())]) + "\n"


def _zeros(row: StudyRow) -> float | None:
    """The sparsity of the targets; None for the dense model, and for a missing result."""
    return None if row.result is None or row.result.pruned is None else row.result.pruned.sparsity_of_targets


def _digits(value: float | None) -> str:
    return "" if value is None else repr(value)
