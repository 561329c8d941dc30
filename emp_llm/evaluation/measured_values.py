"""The values that a suite measured, by the names of their rows in a table, and their differences as text."""

import math
from dataclasses import dataclass
from typing import Any

from emp_llm.records.evaluation import Measures, TaskRecord

_ROUNDING = 1e-9  # differences below this share of a value are rounding errors of its sums


@dataclass(frozen=True)
class Value:
    """A measured number and its standard error: an accuracy in percent, any other in the measure's own unit."""

    value: float
    stderr: float | None = None
    partial: bool = False


def values_of(measures: Measures) -> dict[str, Value]:
    """Row name -> value: the perplexity, the tasks, and the mean `acc` of the tasks that have one."""
    values: dict[str, Value] = {}
    if measures.perplexity is not None:
        entry = measures.perplexity
        values[f"perplexity, blocks of {entry.block_length}"] = Value(entry.value, partial=entry.partial)
    accuracies = []
    for task, record in measures.tasks.items():
        of_task = _task_values(task, record)
        values |= of_task
        accuracies += [value for name, value in of_task.items() if name.endswith(" acc")]
    if len(accuracies) > 1:
        mean = sum(value.value for value in accuracies) / len(accuracies)
        values[f"mean acc of {len(accuracies)}"] = Value(mean, partial=any(value.partial for value in accuracies))
    return values


def in_percent(name: str) -> bool:
    """Whether a measure is an accuracy: shown in percent, with changes in points."""
    return name.startswith("mean acc of ") or any(_is_accuracy(word) for word in name.split(" ")[1:])


def change_between(name: str, base: float, value: float) -> float:
    """A measure's change from a base: an accuracy's in points, any other's in percent.

    Values that differ by rounding only, by less than 1e-9 of themselves, have no difference: 0. A change from an infinite base
    is -100 %, and one to an infinite value is infinite. NaN: the base is zero, or both are infinite.
    """
    if math.isclose(value, base, rel_tol=_ROUNDING):
        return math.nan if math.isinf(base) else 0.0
    if in_percent(name):
        return value - base
    return 100 * (value / base - 1) if base else math.nan


def signed(number: float, digits: int = 2) -> str:
    """A change as text with its sign, or without one if it rounds to zero; "-" for NaN."""
    if math.isnan(number):
        return "-"
    text = f"{number:+.{digits}f}"
    return text if float(text) else f"{0:.{digits}f}"


def change_text(name: str, change: float, stderr: float | None = None) -> str:
    """A measure's change as a cell: "+1.25 ± 0.30" points of an accuracy, "-3.10 %" of any other; "-" for NaN."""
    if math.isnan(change):
        return "-"
    error = f" ± {stderr:.2f}" if stderr is not None else ""
    return f"{signed(change)}{error}{'' if in_percent(name) else ' %'}"


def formatted(value: float, digits: int = 3) -> str:
    """A number as text; "infinite" for the perplexity of a ruined model."""
    return "infinite" if math.isinf(value) else f"{value:.{digits}f}"


def _task_values(task: str, record: TaskRecord) -> dict[str, Value]:
    """The rows of one task of a suite; a group has its own row if it reports one, else the rows of its members."""
    shown = {task: record.results[task]} if _metrics(record.results.get(task, {})) else record.results
    values = {}
    for name, metrics in shown.items():
        counts = record.n_samples.get(name)
        partial = any(c.effective < c.original for c in ([counts] if counts else record.n_samples.values()))
        for key in _metrics(metrics):
            metric, _, kind = key.partition(",")
            stderr = metrics.get(f"{metric}_stderr,{kind}")
            scale = 100 if _is_accuracy(metric) else 1
            error = scale * stderr if isinstance(stderr, float) and math.isfinite(stderr) else None
            label = f"{name} {metric}" + (f" ({kind})" if kind != "none" else "")
            values[label] = Value(math.inf if metrics[key] is None else scale * metrics[key], error, partial)
    return values


def _metrics(metrics: dict[str, Any]) -> list[str]:
    """The keys to show: acc and acc_norm if the task reports acc, else every number. A perplexity of None is infinite."""
    keys = [
        key
        for key, value in metrics.items()
        if "," in key
        and not key.partition(",")[0].endswith("_stderr")
        and (isinstance(value, int | float) or (value is None and "perplexity" in key))
    ]
    accuracies = [key for key in keys if _is_accuracy(key.partition(",")[0])]
    return accuracies if any(key.startswith("acc,") for key in keys) else keys


def _is_accuracy(metric: str) -> bool:
    return metric in ("acc", "acc_norm")
