"""Results of several models as one table: the first is the baseline, the others stand beside their difference to it.

Accuracies are in percent with their standard error, differences of them in points; perplexities differ by percent. What the
paper published stands beside a model that is one of its own.
"""

import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, get_args

from emp_llm.models.corpora import data_folder
from emp_llm.models.errors import UserError
from emp_llm.models.headers import read_json
from emp_llm.services.tables import Rows, csv_table, markdown_table, table

Record = dict[str, Any]
Format = Literal["terminal", "markdown", "csv"]

_PUBLISHED_BLOCK = 2048
_PUBLISHED_RECIPE = {
    **{"beta": 1.0, "order": 2.0, "sparsity": 0.5, "pattern": None, "match": None},
    **{"group": "row", "targets": "mlp", "ignore": None},
}
_PUBLISHED_TEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}


@dataclass(frozen=True)
class Value:
    """A measured number: an accuracy in percent, or in the measure's own unit; `stderr` likewise."""

    value: float
    stderr: float | None = None
    partial: bool = False


def compare(records: list[Record], form: str = "terminal", labels: list[str] | None = None) -> str:
    """The table of results of one suite, with footnotes.

    Args:
        records: as of results.json, the baseline first; of each "model", "pruned", "made_by" and what was measured.
        form: terminal, markdown or csv; CSV has all digits, and columns in place of marks and footnotes.
        labels: headings; default: the models' names without owner or path.

    Raises:
        UserError: no such format.
    """
    check_format(form)
    labels = labels or _labels(records)
    measured = [values_of(record) for record in records]
    published = [published_of(record) for record in records]
    names = list(dict.fromkeys(name for values in measured for name in values))
    if form == "csv":
        return csv_table(_csv_rows(names, labels, measured, published))
    rows = _rows(names, labels, measured, published)
    notes = _notes(records, measured, published)
    if form == "markdown":
        return "\n\n".join([markdown_table(rows), *notes])
    return "\n".join([table(rows), *notes])


def check_format(form: str) -> None:
    """Raise UserError for a format there is none of."""
    if form not in get_args(Format):
        raise UserError(f"--format {form!r} is none of {', '.join(get_args(Format))}.")


def values_of(record: Record) -> dict[str, Value]:
    """What was measured, by the name of its row: the perplexity, the tasks, and the mean of the tasks that have `acc`."""
    values: dict[str, Value] = {}
    if "perplexity" in record:
        entry = record["perplexity"]
        name = f"perplexity, blocks of {entry['block_length']}"
        values[name] = Value(entry["perplexity"], partial=entry["partial"])
    accuracies = []
    for task, entry in record.get("tasks", {}).items():
        found = _task_values(task, entry)
        values |= found
        accuracies += [value for name, value in found.items() if name.endswith(" acc")]
    if len(accuracies) > 1:
        mean = sum(value.value for value in accuracies) / len(accuracies)
        values[f"mean acc of {len(accuracies)}"] = Value(mean, partial=any(value.partial for value in accuracies))
    return values


def published_of(record: Record) -> dict[str, Any] | None:
    """The paper's values for a record's model and recipe: its row of eval/published with "name" added, or None."""
    pruned = record.get("pruned")
    if record.get("made_by", {}).get("quantization"):
        return None
    if pruned and any(pruned.get(key, value) != value for key, value in _PUBLISHED_RECIPE.items()):
        return None
    source, method = (pruned["of"], pruned["method"]) if pruned else (record["model"], "dense")
    for file in sorted((data_folder("eval") / "published").glob("*.json")):
        for name, methods in read_json(file)["results"].items():
            if (source == name or PurePath(source).name == PurePath(name).name) and method in methods:
                return {"name": f"{name} {method}", **methods[method], "takes_perplexity": _is_published_text(record)}
    return None


def _is_published_text(record: Record) -> bool:
    text = record.get("made_by", {}).get("text") or {}
    return all(text.get(key) == value for key, value in _PUBLISHED_TEXT.items())


def _task_values(task: str, entry: dict[str, Any]) -> dict[str, Value]:
    """Rows of one task of a suite; of a group its own line where it has one, else its members."""
    results: dict[str, dict[str, Any]] = entry["results"]
    shown = {task: results[task]} if _metrics(results.get(task, {})) else results
    values = {}
    for name, metrics in shown.items():
        samples = entry["n-samples"].values()
        counts = entry["n-samples"].get(name)
        partial = any(c["effective"] < c["original"] for c in ([counts] if counts else samples))
        for key in _metrics(metrics):
            metric, _, kind = key.partition(",")
            stderr = metrics.get(f"{metric}_stderr,{kind}")
            scale = 100 if _is_accuracy(metric) else 1
            error = scale * stderr if isinstance(stderr, float) and math.isfinite(stderr) else None
            label = f"{name} {metric}" + (f" ({kind})" if kind != "none" else "")
            values[label] = Value(scale * metrics[key], error, partial)
    return values


def _metrics(metrics: dict[str, Any]) -> list[str]:
    """The keys to show: acc and acc_norm where the task has acc, else all that are numbers."""
    keys = [
        key
        for key, value in metrics.items()
        if "," in key and not key.partition(",")[0].endswith("_stderr") and isinstance(value, int | float)
    ]
    accuracies = [key for key in keys if _is_accuracy(key.partition(",")[0])]
    return accuracies if any(key.startswith("acc,") for key in keys) else keys


def _is_accuracy(metric: str) -> bool:
    return metric in ("acc", "acc_norm")


def _published_value(name: str, published: dict[str, Any] | None) -> float | None:
    if published is None:
        return None
    accuracies: dict[str, float] = published["accuracy_percent"]
    found: float | None = None
    if name == f"perplexity, blocks of {_PUBLISHED_BLOCK}" and published["takes_perplexity"]:
        found = published["wikitext2_perplexity"]
    elif name == f"mean acc of {len(accuracies)}":
        found = published["mean_accuracy_percent"]
    elif name.endswith(" acc"):
        found = accuracies.get(name.removesuffix(" acc"))
    return found


def _rows(
    names: list[str], labels: list[str], measured: list[dict[str, Value]], published: list[dict[str, Any] | None]
) -> Rows:
    head = ["", labels[0]]
    for label in labels[1:]:
        head += [label, "change"]
    head += [f"{label}, paper" for label, known in zip(labels, published, strict=True) if known]
    rows = [head]
    for name in names:
        base = measured[0].get(name)
        row = [name, _cell(name, base)]
        for values in measured[1:]:
            row += [_cell(name, values.get(name)), shown_change(name, base, values.get(name))]
        for known in published:
            if known:
                value = _published_value(name, known)
                mark = " †" if in_percent(name) else ""
                row.append("-" if value is None else f"{value:.3f}" if not mark else f"{value:.2f}{mark}")
        rows.append(row)
    return rows


def _csv_rows(
    names: list[str], labels: list[str], measured: list[dict[str, Value]], published: list[dict[str, Any] | None]
) -> Rows:
    head = ["measure"]
    for label in labels:
        head += [label, f"{label} stderr", f"{label} partial", f"{label} published"]
    rows = [head]
    for name in names:
        row = [name]
        for values, known in zip(measured, published, strict=True):
            value, paper = values.get(name), _published_value(name, known)
            row += ["", "", ""] if value is None else [repr(value.value), _repr(value.stderr), str(value.partial).lower()]
            row.append(_repr(paper))
        rows.append(row)
    return rows


def _notes(records: list[Record], measured: list[dict[str, Value]], published: list[dict[str, Any] | None]) -> list[str]:
    notes = []
    if any(value.partial for values in measured for value in values.values()):
        notes.append("* partial: not all examples, or not all of the text, were taken")
    first = records[0]
    what = [f"{first['perplexity']['tokens']:,} tokens"] if "perplexity" in first else []
    if first.get("tasks"):
        counts = [count for entry in first["tasks"].values() for count in entry["n-samples"].values()]
        what.append(f"{sum(count['effective'] for count in counts):,} examples by lm-eval")
    notes.append(f"suite {first['suite']}: {', '.join(what)}")
    if any(in_percent(name) for values in measured for name in values):
        notes.append("accuracies in percent ± standard error, their changes in points")
    for known in published:
        if known:
            zeros = f" ({known['sparsity_percent']} % of the MLP linears removed)" if known["sparsity_percent"] else ""
            notes.append(f"paper: {known['name']}{zeros}")
    if any(published) and any(record.get("tasks") for record in records):
        notes.append("† another protocol than lm-eval's: compare the differences to the dense model, not the values")
    return notes


def in_percent(name: str) -> bool:
    """Whether a measure is an accuracy, shown in percent, whose changes are points."""
    return name.startswith("mean acc of ") or any(_is_accuracy(word) for word in name.split(" ")[1:])


def _cell(name: str, value: Value | None) -> str:
    if value is None:
        return "-"
    number = f"{value.value:.2f}" if in_percent(name) else f"{value.value:.3f}"
    error = f" ±{value.stderr:.2f}" if value.stderr is not None and in_percent(name) else ""
    return f"{number}{error}{' *' if value.partial else ''}"


def shown_change(name: str, base: Value | None, value: Value | None) -> str:
    """A measure's change from a base as a cell: of an accuracy in points, else in percent."""
    if base is None or value is None:
        return "-"
    if in_percent(name):
        return f"{value.value - base.value:+.2f}"
    return f"{100 * (value.value / base.value - 1):+.2f} %" if base.value else "-"


def _repr(value: float | None) -> str:
    return "" if value is None else repr(value)


def _labels(records: list[Record]) -> list[str]:
    """The models' names, short where that tells them apart, and how they were quantised."""
    names = [record["model"] for record in records]
    quantized = [record.get("made_by", {}).get("quantization") for record in records]
    suffixes = [f" {how['bits']}" if how else "" for how in quantized]
    short = [f"{PurePath(name).name or name}{suffix}" for name, suffix in zip(names, suffixes, strict=True)]
    long = [f"{name}{suffix}" for name, suffix in zip(names, suffixes, strict=True)]
    return short if len(set(short)) == len(short) else long
