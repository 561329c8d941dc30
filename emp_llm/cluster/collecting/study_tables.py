"""The tables of a study: each model's recipes with their changes from the dense model, beside the paper's."""

from emp_llm.cluster.collecting.study_results import StudyModel, StudyResults, StudyRow
from emp_llm.common.errors import count_of, printable
from emp_llm.common.tables import Rows, csv_table, markdown_table, percent_cell, table
from emp_llm.evaluation.comparison import PublishedRow, change_notes, published_row
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
from emp_llm.reporting.studies.study import short_model_name

_PROTOCOL = "† by another protocol than lm-eval's: compare the changes from the dense model, not the values"


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


_HEAD = ["model", "recipe", "status", "sparsity of targets", "measure", "value", "stderr", "partial"]
_HEAD += ["change", "change stderr", "change paired", "published sparsity percent", "published", "published change"]
_HEAD += ["change beyond the published"]


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
