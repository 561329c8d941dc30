"""The results of several models as one table. The first is the baseline; the others show their change from it.

Accuracies are in percent with their standard errors, and their changes in points. Changes of other measures are in percent. A
change has a paired standard error if both models were judged on the same examples. A model of the paper has a column with the
published values.
"""

import math
from pathlib import PurePath
from typing import get_args

import msgspec

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.paths import data_folder
from emp_llm.common.tables import Rows, csv_table, markdown_table, table
from emp_llm.evaluation.results import EvaluatedModel
from emp_llm.evaluation.values import UNPAIRED, Value, change_of, in_percent, shown_change, value_cell, values_of
from emp_llm.options.evaluation import TableFormat
from emp_llm.options.recipe import Recipe
from emp_llm.records.base import converted
from emp_llm.records.results import MadeBy

_BLOCK = 2048
# The paper's recipes have the defaults of these fields.
_FIELDS = ("beta", "order", "sparsity", "pattern", "match", "group", "targets", "ignore", "score", "count_by", "shares")
_TEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}


class _Values(msgspec.Struct, kw_only=True):
    """A row of the published tables, as in `eval/published`."""

    sparsity_percent: float | None = None
    wikitext2_perplexity: float | None = None
    accuracy_percent: dict[str, float] = {}
    mean_accuracy_percent: float | None = None


class PublishedRow:
    """The paper's values for one model and one method.

    Attributes:
        name: the paper's model and method.
        sparsity_percent: of the MLP linears.
    """

    def __init__(self, name: str, row: _Values, same_text: bool) -> None:
        self.name = name
        self.sparsity_percent = row.sparsity_percent
        self._row = row
        self._same_text = same_text

    def value(self, measure: str) -> float | None:
        """The published value of a measure; None if the paper has none."""
        row = self._row
        if measure == f"perplexity, blocks of {_BLOCK}":
            return row.wikitext2_perplexity if self._same_text else None
        if measure == f"mean acc of {len(row.accuracy_percent)}":
            return row.mean_accuracy_percent
        return row.accuracy_percent.get(measure.removesuffix(" acc")) if measure.endswith(" acc") else None


def published_row(model: EvaluatedModel) -> PublishedRow | None:
    """The paper's values for a model and its recipe; None if the paper has no such model or recipe."""
    pruned = model.pruned
    if model.made_by.quantization is not None:
        return None
    source, method = (pruned.of, pruned.recipe.method) if pruned else (model.model, "dense")
    for file in sorted((data_folder("eval") / "published").glob("*.json")):
        results = converted(read_json(file)["results"], dict[str, dict[str, _Values]], str(file))
        for name, methods in results.items():
            if (source == name or PurePath(source).name == PurePath(name).name) and method in methods:
                default = None if pruned is None else Recipe(method=method)
                if pruned is not None and any(getattr(pruned.recipe, key) != getattr(default, key) for key in _FIELDS):
                    return None
                text = model.made_by.text
                same_text = text is not None and all(getattr(text, key) == value for key, value in _TEXT.items())
                return PublishedRow(f"{name} {method}", methods[method], same_text)
    return None


# The table.


UNPAIRED_NOTE = (
    f"{UNPAIRED} unpaired standard error, usually too large: the results do not hold both models' answers to the same examples"
)


def compare(models: list[EvaluatedModel], form: str = "terminal", labels: list[str] | None = None) -> str:
    """The results of one suite as a table, with footnotes.

    Args:
        models: the baseline first.
        form: terminal, markdown or csv. CSV has all digits, and columns in place of marks and footnotes.
        labels: column headings; default: the models' names without owner or path.

    Raises:
        UserError: the format is unknown.
    """
    check_format(form)
    labels = labels or _labels(models)
    measured = [values_of(each.measures) for each in models]
    published = [published_row(each) for each in models]
    names = list(dict.fromkeys(name for values in measured for name in values))
    if form == "csv":
        return csv_table(_csv_rows(names, labels, measured, published))
    rows = _rows(names, labels, measured, published)
    notes = _notes(models, measured, published)
    form_table, gap = (markdown_table, "\n\n") if form == "markdown" else (table, "\n")
    parts = [form_table(rows), *notes]
    return gap.join(parts)


def check_format(form: str) -> None:
    """Raise UserError for an unknown format."""
    if form not in get_args(TableFormat):
        raise UserError(f"--format {form!r} is not one of {', '.join(get_args(TableFormat))}.")


def change_notes(names: list[str], base: dict[str, Value], others: list[dict[str, Value]]) -> list[str]:
    """Footnotes on the standard errors of the changes in a table."""
    changes = [
        change_of(name, values[name], base[name]) for values in others for name in names if name in base and name in values
    ]
    notes = []
    if any(each.stderr is not None and each.paired for each in changes):
        notes.append("changes ± paired standard error: both models judged on the same examples and blocks of text")
    if any(each.unpaired for each in changes):
        notes.append(UNPAIRED_NOTE)
    return notes


def _rows(names: list[str], labels: list[str], measured: list[dict[str, Value]], published: list[PublishedRow | None]) -> Rows:
    head = ["", labels[0]]
    for label in labels[1:]:
        head += [label, "change"]
    head += [f"{label}, paper" for label, known in zip(labels, published, strict=True) if known]
    rows = [head]
    for name in names:
        base = measured[0].get(name)
        row = [name, value_cell(name, base)]
        for values in measured[1:]:
            row += [value_cell(name, values.get(name)), shown_change(name, base, values.get(name))]
        row += [_published_cell(name, known) for known in published if known]
        rows.append(row)
    return rows


def _published_cell(name: str, published: PublishedRow) -> str:
    value = published.value(name)
    if value is None:
        return "-"
    return f"{value:.2f} †" if in_percent(name) else f"{value:.3f}"


def _csv_rows(
    names: list[str], labels: list[str], measured: list[dict[str, Value]], published: list[PublishedRow | None]
) -> Rows:
    head = ["measure"]
    for number, label in enumerate(labels):
        head += [label, f"{label} stderr", f"{label} partial", f"{label} published"]
        head += [f"{label} change", f"{label} change stderr", f"{label} change paired"] if number else []
    rows = [head]
    for name in names:
        row, base = [name], measured[0].get(name)
        for number, (values, known) in enumerate(zip(measured, published, strict=True)):
            value, paper = values.get(name), known.value(name) if known else None
            row += ["", "", ""] if value is None else [repr(value.value), _all_digits(value.stderr), str(value.partial).lower()]
            row += [_all_digits(paper), *(_csv_change(name, base, value) if number else [])]
        rows.append(row)
    return rows


def _csv_change(name: str, base: Value | None, value: Value | None) -> list[str]:
    if base is None or value is None:
        return ["", "", ""]
    change = change_of(name, value, base)
    paired = "" if change.stderr is None else str(change.paired).lower()
    return ["" if math.isnan(change.value) else repr(change.value), _all_digits(change.stderr), paired]


def _notes(models: list[EvaluatedModel], measured: list[dict[str, Value]], published: list[PublishedRow | None]) -> list[str]:
    notes = []
    if any(value.partial for values in measured for value in values.values()):
        notes.append("* partial: only some of the examples or of the text")
    first = models[0].measures
    extent = [count_of(first.perplexity.tokens, "token")] if first.perplexity is not None else []
    if first.tasks:
        counts = [count for record in first.tasks.values() for count in record.n_samples.values()]
        extent.append(f"{count_of(sum(count.effective for count in counts), 'example')} by lm-eval")
    notes.append(f"suite {models[0].suite}: {', '.join(extent)}")
    names = list(dict.fromkeys(name for values in measured for name in values))
    if any(in_percent(name) for name in names):
        notes.append("accuracies in percent ± standard error; their changes in points")
    notes += change_notes(names, measured[0], measured[1:])
    for known in published:
        if known:
            zeros = f" ({known.sparsity_percent:g} % of the MLP linears removed)" if known.sparsity_percent else ""
            notes.append(f"paper: {known.name}{zeros}")
    if any(published) and any(each.measures.tasks for each in models):
        notes.append("† measured by another protocol than lm-eval's: compare the changes from the dense model, not the values")
    return notes


def _all_digits(value: float | None) -> str:
    return "" if value is None else repr(value)


def _suffix(made_by: MadeBy) -> str:
    return f" {made_by.quantization.bits}" if made_by.quantization else ""


def _labels(models: list[EvaluatedModel]) -> list[str]:
    """The models' names with their quantisation; short names where these are distinct."""
    suffixes = [_suffix(each.made_by) for each in models]
    short = [f"{PurePath(each.model).name or each.model}{suffix}" for each, suffix in zip(models, suffixes, strict=True)]
    long = [f"{each.model}{suffix}" for each, suffix in zip(models, suffixes, strict=True)]
    return short if len(set(short)) == len(short) else long
