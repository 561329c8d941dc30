"""The values that a suite measured, by the names of their rows in a table."""

import math
from dataclasses import dataclass, replace
from typing import Any

from emp_llm.records.evaluation import Measures, TaskRecord

_ACCURACIES = ("acc", "acc_norm")
# Words of metrics that are no fractions of examples, although a value may lie in [0, 1].
_NO_FRACTIONS = {"perplexity", "byte", "loss", "brier", "bleu", "chrf", "ter", "mcc", "matthews", "max", "diff"}


@dataclass(frozen=True)
class Answers:
    """The answers to the examples of a task, one bit each.

    Attributes:
        sha256: of the examples in order; examples: their number.
        correct: the bits as one number: 1 for a correct answer.
        weight: of the task's accuracy in the value.
    """

    sha256: str
    examples: int
    correct: int
    weight: float = 1.0

    @property
    def asked(self) -> tuple[str, int, float]:
        """Everything but the answers: equal for the same examples."""
        return self.sha256, self.examples, self.weight

    @property
    def accuracy(self) -> float:
        """The share of correct answers."""
        return self.correct.bit_count() / self.examples


@dataclass(frozen=True)
class Value:
    """A measured number and its standard error: an accuracy in percent, any other in the measure's own unit.

    Attributes:
        value, stderr: the number and its error.
        partial: whether a limit left out examples or text.
        answers: to the examples of each task; the value is the weighted sum of their accuracies. Empty if unknown.
        losses: of a perplexity, mean loss and number of tokens of each block of the text; empty if unknown.
    """

    value: float
    stderr: float | None = None
    partial: bool = False
    answers: tuple[Answers, ...] = ()
    losses: tuple[tuple[float, int], ...] = ()


def values_of(measures: Measures) -> dict[str, Value]:
    """Row name -> value: the perplexity, the tasks, and the mean `acc` of the tasks that have one."""
    values: dict[str, Value] = {}
    if measures.perplexity is not None:
        entry = measures.perplexity
        losses = tuple(zip(entry.block_losses, entry.block_tokens, strict=True))
        values[f"perplexity, blocks of {entry.block_length}"] = Value(entry.value, partial=entry.partial, losses=losses)
    accuracies = []
    for task, record in measures.tasks.items():
        of_task = _task_values(task, record)
        values |= of_task
        accuracies += [value for name, value in of_task.items() if name.endswith(" acc")]
    if len(accuracies) > 1:
        values[f"mean acc of {len(accuracies)}"] = _mean(accuracies)
    return values


def _mean(accuracies: list[Value]) -> Value:
    """The mean of the accuracies of tasks. Its standard error is that of tasks without common examples."""
    count = len(accuracies)
    errors = [value.stderr for value in accuracies if value.stderr is not None]
    answers = [replace(each, weight=each.weight / count) for value in accuracies for each in value.answers]
    return Value(
        value=sum(value.value for value in accuracies) / count,
        stderr=math.hypot(*errors) / count if len(errors) == count else None,
        partial=any(value.partial for value in accuracies),
        answers=tuple(answers) if all(value.answers for value in accuracies) else (),
    )


def in_percent(name: str) -> bool:
    """Whether a measure is an accuracy or another fraction ("%" in its name): shown in percent, with changes in points."""
    return name.startswith("mean acc of ") or any(word in (*_ACCURACIES, "%") for word in name.split(" ")[1:])


def formatted(value: float, digits: int = 3) -> str:
    """A number as text; "infinite" for the perplexity of a ruined model."""
    return "infinite" if math.isinf(value) else f"{value:.{digits}f}"


def value_cell(name: str, value: Value | None) -> str:
    """A measure as a cell: an accuracy with its standard error; a star marks a partial one, "-" a missing one."""
    if value is None:
        return "-"
    number = formatted(value.value, 2 if in_percent(name) else 3)
    error = f" ± {value.stderr:.2f}" if value.stderr is not None and in_percent(name) else ""
    return f"{number}{error}{' *' if value.partial else ''}"


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
            fraction = _is_fraction(metric, metrics[key], stderr)
            scale = 100 if fraction else 1
            error = scale * stderr if isinstance(stderr, float) and math.isfinite(stderr) else None
            label = f"{name} {metric}" + (" %" if fraction and metric not in _ACCURACIES else "")
            label += f" ({kind})" if kind != "none" else ""
            number = math.inf if metrics[key] is None else scale * metrics[key]
            values[label] = Value(number, error, partial, _answers(record, name, name == task, key, number / scale))
    return values


def _answers(record: TaskRecord, name: str, whole: bool, key: str, value: float) -> tuple[Answers, ...]:
    """The answers behind a metric of a task, or of the whole group: to its tasks, weighted by size or equally, as lm-eval did.

    Empty if the record has none, or if their accuracy is not the metric's value.
    """
    members = [name] if name in record.n_samples else list(record.n_samples) if whole else []
    held = [record.answers[member] for member in members if member in record.answers and key in record.answers[member].correct]
    if not held or len(held) < len(members):
        return ()
    total = sum(each.examples for each in held)
    for weights in ([each.examples / total for each in held], [1 / len(held)] * len(held)):
        answers = tuple(
            Answers(each.sha256, each.examples, each.bits(key), weight) for each, weight in zip(held, weights, strict=True)
        )
        if math.isclose(math.fsum(each.weight * each.accuracy for each in answers), value, rel_tol=1e-9, abs_tol=1e-12):
            return answers
    return ()


def _metrics(metrics: dict[str, Any]) -> list[str]:
    """The keys to show: acc and acc_norm if the task reports acc, else every number. A perplexity of None is infinite."""
    keys = [
        key
        for key, value in metrics.items()
        if "," in key
        and not key.partition(",")[0].endswith("_stderr")
        and (isinstance(value, int | float) or (value is None and "perplexity" in key))
    ]
    accuracies = [key for key in keys if key.partition(",")[0] in _ACCURACIES]
    return accuracies if any(key.startswith("acc,") for key in keys) else keys


def _is_fraction(metric: str, value: float | None, stderr: Any) -> bool:
    """Whether a metric is a fraction of the examples, such as exact_match: lm-eval gives an error, and it is in [0, 1]."""
    if metric in _ACCURACIES or value is None:
        return value is not None
    known = isinstance(stderr, float) and math.isfinite(stderr)
    return known and 0 <= value <= 1 and not _NO_FRACTIONS & set(metric.split("_"))
