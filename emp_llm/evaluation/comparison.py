"""The results of several models as one table. The first is the baseline; the others show their change from it.

Accuracies are in percent with their standard errors, and their changes in points. Changes of other measures are in percent. A
change has a paired standard error if both models were judged on the same examples. A model of the paper has a column with the
published values.
"""

from dataclasses import dataclass
from pathlib import PurePath

import msgspec

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import count_of
from emp_llm.common.paths import data_folder
from emp_llm.common.tables import markdown_table, percent_cell, table
from emp_llm.evaluation.results import EvaluatedModel
from emp_llm.evaluation.values import UNPAIRED, Value, change_of, in_percent, shown_change, value_cell, values_of
from emp_llm.options.recipe import Recipe
from emp_llm.records.base import converted

_BLOCK = 2048
_RUINED = 2  # times the perplexity of the dense model, from which a table says what to try
# The paper's recipes have the defaults of these fields.
_FIELDS = ("beta", "order", "sparsity", "pattern", "match", "group", "targets", "ignore", "score", "count_by", "shares")
_TEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}


class _Values(msgspec.Struct, kw_only=True):
    """A row of the published tables, as in `eval/published`."""

    sparsity_percent: float | None = None
    wikitext2_perplexity: float | None = None
    accuracy_percent: dict[str, float] = {}
    mean_accuracy_percent: float | None = None


@dataclass(frozen=True)
class PublishedRow:
    """The paper's values for one model and one method.

    Attributes:
        name: the paper's model and method.
        sparsity_percent: of the MLP linears.
        values: by measure.
    """

    name: str
    sparsity_percent: float | None
    values: dict[str, float | None]

    def value(self, measure: str) -> float | None:
        """The published value of a measure; None if the paper has none."""
        return self.values.get(measure)


def published_row(model: EvaluatedModel) -> PublishedRow | None:
    """The paper's values for a model and its recipe; None if the paper has no such model or recipe."""
    pruned = model.pruned
    if model.made_by.quantization is not None:
        return None
    source, method = (pruned.of, pruned.recipe.method) if pruned else (model.model, "dense")
    path = data_folder("eval") / "published" / "llama.json"
    results = converted(read_json(path)["results"], dict[str, dict[str, _Values]], str(path))
    name = next((name for name in results if PurePath(source).name == PurePath(name).name), None)
    row = None if name is None else results[name].get(method)
    if row is None:
        return None
    if pruned is not None and any(getattr(pruned.recipe, key) != getattr(Recipe(method=method), key) for key in _FIELDS):
        return None
    values: dict[str, float | None] = {f"{task} acc": value for task, value in row.accuracy_percent.items()}
    values[f"mean acc of {len(row.accuracy_percent)}"] = row.mean_accuracy_percent
    text = model.made_by.text
    if text is not None and all(getattr(text, key) == value for key, value in _TEXT.items()):
        values[f"perplexity, blocks of {_BLOCK}"] = row.wikitext2_perplexity
    return PublishedRow(f"{name} {method}", row.sparsity_percent, values)


# The table.


UNPAIRED_NOTE = (
    f"{UNPAIRED} unpaired standard error, usually too large: the results do not hold both models' answers to the same examples"
)


def compare(models: list[EvaluatedModel], form: str = "terminal", labels: list[str] | None = None) -> str:
    """The results of one suite as a table, with footnotes.

    Args:
        models: the baseline first.
        form: terminal or markdown.
        labels: column headings; default: the models' names without owner or path.
    """
    labels = labels or _labels(models)
    measured = [values_of(each.measures) for each in models]
    published = [published_row(each) for each in models]
    notes = _notes(models, labels, measured, [known for known in published if known])
    head = ["", labels[0]]
    for label in labels[1:]:
        head += [label, "change"]
    rows = [head + [f"{label}, paper" for label, known in zip(labels, published, strict=True) if known]]
    for name in dict.fromkeys(name for values in measured for name in values):
        base = measured[0].get(name)
        row = [name, value_cell(name, base)]
        for values in measured[1:]:
            row += [value_cell(name, values.get(name)), shown_change(name, base, values.get(name))]
        for known in filter(None, published):
            value = known.value(name)
            row.append("-" if value is None else f"{value:.2f} †" if in_percent(name) else f"{value:.3f}")
        rows.append(row)
    form_table, gap = (markdown_table, "\n\n") if form == "markdown" else (table, "\n")
    return gap.join([form_table(rows), *notes])


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


def _notes(
    models: list[EvaluatedModel], labels: list[str], measured: list[dict[str, Value]], published: list[PublishedRow]
) -> list[str]:
    notes = []
    dense, *others = (None if each.measures.perplexity is None else each.measures.perplexity.perplexity for each in models)
    for model, label, after in zip(models[1:], labels[1:], others, strict=True):
        if dense and after and models[0].pruned is None and model.pruned is not None and after > _RUINED * dense:
            notes.append(
                f"{label}: its perplexity is {after / dense:.1f} times that of {labels[0]}. Remove less (a lower --sparsity, a "
                "larger --beta), use a method that calibrates, or add --refit"
            )
    removed = {label: each.pruned.sparsity_of_targets for label, each in zip(labels, models, strict=True) if each.pruned}
    if removed and max(removed.values()) - min(removed.values()) > 0.01:
        shares = ", ".join(f"{label} {percent_cell(share)} %" for label, share in removed.items())
        notes.append(f"the models differ in their zeros: {shares} of the targets")
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
        zeros = f" ({known.sparsity_percent:g} % of the MLP linears removed)" if known.sparsity_percent else ""
        notes.append(f"paper: {known.name}{zeros}")
    if published and any(each.measures.tasks for each in models):
        notes.append("† measured by another protocol than lm-eval's: compare the changes from the dense model, not the values")
    return notes


def _labels(models: list[EvaluatedModel]) -> list[str]:
    """The models' names with their quantisation; short names where these are distinct."""
    bits = [f" {each.made_by.quantization.bits}" if each.made_by.quantization else "" for each in models]
    short = [f"{PurePath(each.model).name or each.model}{suffix}" for each, suffix in zip(models, bits, strict=True)]
    long = [f"{each.model}{suffix}" for each, suffix in zip(models, bits, strict=True)]
    return short if len(set(short)) == len(short) else long
