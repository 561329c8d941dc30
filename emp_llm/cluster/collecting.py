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
from emp_llm.evaluation.comparison import PublishedRow, change_notes, published_row
from emp_llm.evaluation.results import EvaluatedModel, model_of_results, models_of_report
from emp_llm.evaluation.values import (
    Change,
    Value,
    change_between,
    change_of,
    change_text,
    formatted,
    in_percent,
    signed,
    value_cell,
    values_of,
)
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
    """A recipe of a model.

    Attributes:
        label: short name.
        result: None if it is missing.
        status: of its job.
    """

    label: str
    result: EvaluatedModel | None
    status: str


@dataclass
class StudyModel:
    """A model of a study: its dense results, and those of its recipes.

    Attributes:
        name: as the plan's commands name it; prefix: of the ids of its jobs.
    """

    name: str
    prefix: str = ""
    dense: EvaluatedModel | None = None
    dense_status: str = "missing"
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
    sources: dict[str, str] = {}  # output of a prune -> its model
    runs: list[Path] = []
    outputs: list[Path] = []
    unreadable: list[str] = []
    for view in views:
        job, done = view.job, view.status == "done"
        if job.kind == "calibrate":
            continue
        name = option_of(job, "--model")
        if job.kind == "prune":
            sources[job.output] = name
            runs += [view.files.output] if done else []
            continue
        model = models.setdefault(sources.get(name, name), StudyModel(sources.get(name, name)))
        try:
            if job.kind == "sweep":
                rows = _swept(model, view.files.output) if done else [StudyRow(job.id, None, view.status)]
                model.rows += rows
                model.dense_status = view.status
            else:
                result = _measured(view.files.output) if done else None
                _take(model, job, name in sources, result, view.status)
            outputs += [view.files.output] if done else []
        except UserError as error:
            unreadable.append(str(error))
            _take(model, job, job.kind == "sweep" or name in sources, None, "unreadable")
    return StudyResults(list(models.values()), runs, outputs, unreadable)


def _take(model: StudyModel, job: Job, pruned: bool, result: EvaluatedModel | None, status: str) -> None:
    if pruned:
        label = job.id.removeprefix(model.prefix).removesuffix(f".{job.kind}")
        model.rows.append(StudyRow(label, result, status))
    else:
        model.dense, model.dense_status = result, status
        model.prefix = job.id.removesuffix(_DENSE) if job.id.endswith(_DENSE) else ""


def _measured(path: Path) -> EvaluatedModel:
    return model_of_results(read_record(path, Results, INDEX_LIMIT))


def _swept(model: StudyModel, folder: Path) -> list[StudyRow]:
    """The points of a sweep; the dense model's results are those of the first."""
    rows = []
    for point in read_record(folder / SWEEP_NAME, Sweep, REPORT_LIMIT).points:
        for found in models_of_report(read_record(folder / "points" / point.name / REPORT_NAME, RunReport, REPORT_LIMIT)):
            if found.pruned is not None:
                rows.append(StudyRow(point.name, found, "done"))
            elif model.dense is None:
                model.dense = found
    return rows


# Tables.


class ModelTable:
    """The tables of one model.

    Args:
        model: with its results.
    """

    def __init__(self, model: StudyModel) -> None:
        self.model = model
        self._base = {} if model.dense is None else values_of(model.dense.measures)
        self._published_base = None if model.dense is None else published_row(model.dense)
        self._values = [{} if row.result is None else values_of(row.result.measures) for row in model.rows]
        self.measures = list(dict.fromkeys(name for values in (self._base, *self._values) for name in values))

    @property
    def title(self) -> str:
        """Short name of the model."""
        return printable(short_model_name(self.model.name))

    def rows(self) -> Rows:
        """A row for each recipe. Below a recipe of the paper stand its values, and the difference of the changes."""
        rows = [["", "zeros, %", *self.measures], self._dense_row()]
        rows += self._published_rows(self._published_base, None, {}) if self._published_base else []
        for row, values in zip(self.model.rows, self._values, strict=True):
            known = None if row.result is None else published_row(row.result)
            rows.append(self._row(row, values))
            rows += self._published_rows(known, self._published_base, values) if known else []
        return rows

    def notes(self) -> list[str]:
        """Footnotes of the table."""
        notes = ["in brackets the changes from the dense model: of perplexities in percent, of accuracies in points"]
        if self._base:
            notes += change_notes(self.measures, self._base, self._values)
        else:
            notes.append("no changes: the dense model is missing")
        if any(value.partial for values in (self._base, *self._values) for value in values.values()):
            notes.append("* partial: only some of the examples or of the text")
        notes += [_PROTOCOL] if self._published_base and any(map(in_percent, self.measures)) else []
        return notes

    def csv_rows(self) -> Rows:
        """A row for each recipe and measure, with all digits."""
        rows = []
        dense = StudyRow("dense", self.model.dense, self.model.dense_status)
        for row, values in zip([dense, *self.model.rows], [self._base, *self._values], strict=True):
            known = None if row.result is None else published_row(row.result)
            zeros = _digits(row.result.pruned.sparsity_of_targets if row.result is not None and row.result.pruned else None)
            start = [printable(self.model.name), printable(row.label), row.status, zeros]
            for name in self.measures or [""]:
                value = values.get(name)
                change = None if row is dense else _change(name, value, self._base.get(name))
                cells = [*_value_cells(value), *_change_cells(change), *self._paper_cells(known, name, change)]
                rows.append([*start, name, *cells])
        return rows

    def _dense_row(self) -> list[str]:
        if self.model.dense is None:
            return ["dense", self.model.dense_status, *("-" for _ in self.measures)]
        return ["dense", "-", *(value_cell(name, self._base.get(name)) for name in self.measures)]

    def _row(self, row: StudyRow, values: dict[str, Value]) -> list[str]:
        if row.result is None:
            return [printable(row.label), row.status, *("-" for _ in self.measures)]
        zeros = None if row.result.pruned is None else row.result.pruned.sparsity_of_targets
        cells = []
        for name in self.measures:
            change = _change(name, values.get(name), self._base.get(name))
            text = "" if change is None else f" ({change_text(name, change)})"
            cells.append(value_cell(name, values.get(name)) + text)
        return [printable(row.label), percent_cell(zeros), *cells]

    def _published_rows(self, known: PublishedRow, base: PublishedRow | None, values: dict[str, Value]) -> Rows:
        """The paper's values; for a pruned model also the difference of the changes."""
        zeros = "-" if known.sparsity_percent is None else f"{known.sparsity_percent:.2f}"
        paper, gaps = [], []
        for name in self.measures:
            value, change = known.value(name), self._published_change(known, name)
            mark = " †" if in_percent(name) else ""
            text = "-" if value is None else f"{formatted(value, 2 if in_percent(name) else 3)}{mark}"
            percent = "" if in_percent(name) else " %"
            paper.append(text if change is None or base is None else f"{text} ({signed(change)}{percent})")
            gaps.append(self._gap(name, _change(name, values.get(name), self._base.get(name)), change))
        rows = [["paper", zeros if base is not None else "-", *paper]]
        return rows if base is None else [*rows, ["change beyond the paper's", "", *gaps]]

    def _gap(self, name: str, change: Change | None, published: float | None) -> str:
        if change is None or published is None:
            return "-"
        return change_text(name, Change(change.value - published, change.stderr, change.paired))

    def _published_change(self, known: PublishedRow, name: str) -> float | None:
        base = None if self._published_base is None else self._published_base.value(name)
        value = known.value(name)
        return None if base is None or value is None else change_between(name, base, value)

    def _paper_cells(self, known: PublishedRow | None, name: str, change: Change | None) -> list[str]:
        if known is None:
            return ["", "", "", ""]
        published = self._published_change(known, name)
        gap = None if change is None or published is None else change.value - published
        return [_digits(known.sparsity_percent), _digits(known.value(name)), _digits(published), _digits(gap)]


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
        parts += [f"## {model.title}", markdown_table(model.rows()), *model.notes()]
    return "\n\n".join(parts) + "\n"


def study_text(results: StudyResults) -> str:
    """All tables of a study for a terminal."""
    tables = [ModelTable(model) for model in results.models]
    notes = dict.fromkeys(note for each in tables for note in each.notes())
    return "\n".join([*(f"{each.title}\n{table(each.rows())}\n" for each in tables), *notes])


def study_csv(results: StudyResults) -> str:
    """All values of a study, one a line."""
    return csv_table([_HEAD, *(row for model in results.models for row in ModelTable(model).csv_rows())]) + "\n"


def _change(name: str, value: Value | None, base: Value | None) -> Change | None:
    return None if value is None or base is None else change_of(name, value, base)


def _value_cells(value: Value | None) -> list[str]:
    return ["", "", ""] if value is None else [repr(value.value), _digits(value.stderr), str(value.partial).lower()]


def _change_cells(change: Change | None) -> list[str]:
    if change is None:
        return ["", "", ""]
    return [_digits(change.value), _digits(change.stderr), "" if change.stderr is None else str(change.paired).lower()]


def _digits(value: float | None) -> str:
    return "" if value is None else repr(value)
