"""Measured values, and changes between models with their errors.

Accuracies are in percent with their standard errors, and their changes in points. Changes of other
measures are in percent. A change has a paired standard error if both models were judged on the same
examples.

Two models that were judged on the same examples, or on the same blocks of a text, agree on most of
them. The paired standard error counts only where they differ, and is smaller than that of two
independent samples.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emp_llm.options.recipe import Match, Pattern, Recipe
from emp_llm.records.evaluation import Measures, PerplexityRecord, TaskRecord

_ACCURACIES = ("acc", "acc_norm")  # shares in any file, whose names need no "%"


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


@dataclass(frozen=True)
class Value:
    """A measured number and its standard error: an accuracy in percent, any other in the measure's
    own unit.

    Attributes:
        value, stderr: the number and its error.
        partial: whether a limit left out examples or text.
        answers: to the examples of each task; the value is the weighted sum of their accuracies.
            Empty if unknown.
        losses: of a perplexity, mean loss and number of tokens of each block of the text; empty if
            unknown.
    """

    value: float
    stderr: float | None = None
    partial: bool = False
    answers: tuple[Answers, ...] = ()
    losses: tuple[tuple[float, int], ...] = ()


def values_of(measures: Measures) -> dict[str, Value]:
    """Row name -> value: the perplexity, the tasks, and the mean `acc` of the tasks that have
    one.
    """
    values: dict[str, Value] = {}
    if measures.perplexity is not None:
        entry = measures.perplexity
        value = Value(entry.value, partial=entry.partial, losses=losses_of(entry))
        values[f"perplexity, blocks of {entry.block_length}"] = value
    accuracies = []
    for task, record in measures.tasks.items():
        of_task = _task_values(task, record)
        values |= of_task
        accuracies += [value for name, value in of_task.items() if name.endswith(" acc")]
    if len(accuracies) > 1:
        values[f"mean acc of {len(accuracies)}"] = _mean(accuracies)
    return values


def losses_of(entry: PerplexityRecord) -> tuple[tuple[float, int], ...]:
    """Mean loss and number of tokens of each block of a perplexity's text."""
    return tuple(zip(entry.block_losses, entry.block_tokens, strict=True))


def _mean(accuracies: list[Value]) -> Value:
    """The mean of the accuracies of tasks. Its standard error is that of tasks without common
    examples.
    """
    count = len(accuracies)
    errors = [value.stderr for value in accuracies if value.stderr is not None]
    answers = [
        replace(answer, weight=answer.weight / count)
        for value in accuracies
        for answer in value.answers
    ]
    return Value(
        value=sum(value.value for value in accuracies) / count,
        stderr=math.hypot(*errors) / count if len(errors) == count else None,
        partial=any(value.partial for value in accuracies),
        answers=tuple(answers) if all(value.answers for value in accuracies) else (),
    )


def in_percent(name: str) -> bool:
    """Whether a measure is an accuracy or another share of the examples: shown in percent, with
    changes in points.
    """
    return name.startswith("mean acc of ") or any(
        word in (*_ACCURACIES, "%") for word in name.split(" ")[1:]
    )


def main_measures(names: Iterable[str]) -> list[str]:
    """The measures to show of many points: the perplexity, and the mean accuracy or, without
    one, every task.
    """
    perplexities = [name for name in names if name.startswith("perplexity")]
    others = [name for name in names if name not in perplexities]
    return perplexities + ([name for name in others if name.startswith("mean acc of ")] or others)


def format_value(value: float, digits: int = 3) -> str:
    """A number as text; "infinite" for the perplexity of a ruined model."""
    return "infinite" if math.isinf(value) else f"{value:.{digits}f}"


def value_cell(name: str, value: Value | None) -> str:
    """A measure as a cell: an accuracy with its standard error; a star marks a partial one, "-"
    a missing one.
    """
    if value is None:
        return "-"
    number = format_value(value.value, 2 if in_percent(name) else 3)
    error = f" ± {value.stderr:.2f}" if value.stderr is not None and in_percent(name) else ""
    return f"{number}{error}{' *' if value.partial else ''}"


def _task_values(task: str, record: TaskRecord) -> dict[str, Value]:
    """The rows of one task of a suite; a group has its own row if it reports one, else the rows of
    its members.

    A metric of which more is better, with a standard error and a value between 0 and 1, is a share
    of the examples, such as exact_match, f1 or pass@1: its name ends with "%".
    """
    shown = (
        {task: record.results[task]} if _metrics(record.results.get(task, {})) else record.results
    )
    values = {}
    for name, metrics in shown.items():
        counts = record.n_samples.get(name)
        partial = any(
            c.effective < c.original for c in ([counts] if counts else record.n_samples.values())
        )
        for key in _metrics(metrics):
            metric, _, filter_name = key.partition(",")
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            stderr = stderr if isinstance(stderr, float) and math.isfinite(stderr) else None
            better = record.higher_is_better.get(name, {}).get(metric)
            of_examples = better is True and stderr is not None and 0 <= (metrics[key] or 0) <= 1
            scale = 100 if of_examples or metric in _ACCURACIES else 1
            error = None if stderr is None else scale * stderr
            label = f"{name} {metric}{' %' if of_examples and metric not in _ACCURACIES else ''}"
            label += f" ({filter_name})" if filter_name != "none" else ""
            number = math.inf if metrics[key] is None else scale * metrics[key]
            values[label] = Value(
                number, error, partial, _answers(record, name, name == task, key, number / scale)
            )
    return values


def _answers(
    record: TaskRecord, name: str, whole: bool, key: str, value: float
) -> tuple[Answers, ...]:
    """The answers behind a metric of a task, or of the whole group: to its tasks, weighted by size
    or equally, as lm-eval did.

    Empty if the record has none, or if their accuracy is not the metric's value.
    """
    members = list(record.n_samples) if whole else []
    if name in record.n_samples:
        members = [name]
    held = [
        record.answers[member]
        for member in members
        if member in record.answers and key in record.answers[member].correct
    ]
    if not held or len(held) < len(members):
        return ()
    total = sum(task.examples for task in held)
    for weights in ([task.examples / total for task in held], [1 / len(held)] * len(held)):
        answers = tuple(
            Answers(task.sha256, task.examples, task.bits(key), weight)
            for task, weight in zip(held, weights, strict=True)
        )
        accuracy = math.fsum(
            task.weight * task.correct.bit_count() / task.examples for task in answers
        )
        if math.isclose(accuracy, value, rel_tol=1e-9, abs_tol=1e-12):
            return answers
    return ()


def _metrics(metrics: dict[str, Any]) -> list[str]:
    """The keys to show: acc and acc_norm if the task reports acc, else every number. A
    perplexity of None is infinite.
    """
    keys = [
        key
        for key, value in metrics.items()
        if "," in key
        and not key.partition(",")[0].endswith("_stderr")
        and (isinstance(value, int | float) or (value is None and "perplexity" in key))
    ]
    accuracies = [key for key in keys if key.partition(",")[0] in _ACCURACIES]
    return accuracies if any(key.startswith("acc,") for key in keys) else keys


# Changes.


_ROUNDING = 1e-9  # differences below this share of a value are rounding errors of its sums
UNPAIRED = "‡"  # marks an unpaired standard error


@dataclass(frozen=True)
class Change:
    """A change and its standard error: of an accuracy in points, of any other measure in percent of
    the base.

    Attributes:
        value: NaN if it is unknown.
        stderr: None if it is unknown.
        paired: False for the error of two independent samples, True for that of the same examples
            or blocks, and without one.
    """

    value: float
    stderr: float | None = None
    paired: bool = True


def change_of(name: str, value: Value, base: Value) -> Change:
    """The change of a measure from a base, with the paired standard error if both were judged on
    the same examples.

    Without it, the error of a difference of accuracies is the root of the sum of both squared
    errors, sqrt(a^2 + b^2); that of any other measure is unknown.

    Args:
        name: the measure.
        value: after the change.
        base: before it.
    """
    change = change_between(name, base.value, value.value)
    unit = 100.0
    if not in_percent(name):
        unit = 100.0 / base.value if base.value else math.nan
    if math.isfinite(change) and math.isfinite(base.value):
        paired = paired_error_of_losses(value.losses, base.losses)
        if paired is not None:
            # The perplexity is exp of the loss, so its error is that of the loss times the
            # perplexity, to first order.
            return Change(change, 100 * paired * value.value / base.value)
        paired = paired_error_of_answers(value.answers, base.answers)
        if paired is not None:
            return Change(change, unit * paired)
    if in_percent(name) and value.stderr is not None and base.stderr is not None:
        return Change(change, math.hypot(value.stderr, base.stderr), paired=False)
    return Change(change)


def paired_error_of_answers(first: Sequence[Answers], second: Sequence[Answers]) -> float | None:
    """Paired standard error of the difference of two accuracies, as a fraction.

    With d_i = a_i - b_i in {-1, 0, 1} for the two answers to example i of n, the error of the mean
    of d is sd(d) / sqrt(n), and sd(d)^2 = (sum d_i^2 - (sum d_i)^2 / n) / (n - 1). Of several
    tasks, the difference is a weighted sum of the tasks' differences. Its error is sqrt(sum w_t^2
    error_t^2), for tasks without common examples.

    Args:
        first, second: the answers to each task.

    Returns:
        The error; None if there are no answers, they are not to the same examples, or a task has a
        single example.
    """
    asked, others = ([replace(task, correct=0) for task in answers] for answers in (first, second))
    if not first or asked != others:
        return None
    squares = 0.0
    for a, b in zip(first, second, strict=True):
        if a.examples < 2:
            return None
        gained = (a.correct & ~b.correct).bit_count()
        lost = (b.correct & ~a.correct).bit_count()
        variance = (gained + lost - (gained - lost) ** 2 / a.examples) / (a.examples - 1)
        squares += a.weight**2 * variance / a.examples
    return math.sqrt(squares)


def paired_error_of_losses(
    first: Sequence[tuple[float, int]], second: Sequence[tuple[float, int]]
) -> float | None:
    """Paired standard error of the difference of two mean losses on the same blocks of a text, each
    weighted by its tokens.

    With the differences d_i of the n blocks' losses, their weighted mean d and the tokens w_i of
    each block, it is sqrt(n / (n - 1) * sum (w_i (d_i - d))^2) / sum w_i; for equal blocks sd(d_i)
    / sqrt(n). In nats: also the error of the difference of the logarithms of the perplexities.

    Args:
        first, second: mean loss and number of tokens of each block.

    Returns:
        The error; None if there are fewer than two blocks, or they are not the same.
    """
    if len(first) < 2 or [tokens for _, tokens in first] != [tokens for _, tokens in second]:
        return None
    weights = [tokens for _, tokens in first]
    gaps = [a - b for (a, _), (b, _) in zip(first, second, strict=True)]
    total = sum(weights)
    mean = math.fsum(w * gap for w, gap in zip(weights, gaps, strict=True)) / total
    squares = math.fsum((w * (gap - mean)) ** 2 for w, gap in zip(weights, gaps, strict=True))
    return math.sqrt(squares * len(gaps) / (len(gaps) - 1)) / total


def change_between(name: str, base: float, value: float) -> float:
    """A measure's change from a base: an accuracy's in points, any other's in percent.

    Values that differ by rounding only, by less than 1e-9 of themselves, have no difference: 0. A
    change from an infinite base is -100 %, and one to an infinite value is infinite. NaN: the base
    is zero, or both are infinite.
    """
    if math.isclose(value, base, rel_tol=_ROUNDING):
        return math.nan if math.isinf(base) else 0.0
    if in_percent(name):
        return value - base
    return 100 * (value / base - 1) if base else math.nan


def sign_change(number: float) -> str:
    """A change as text with its sign, or without one if it rounds to zero; "-" for NaN."""
    if math.isnan(number):
        return "-"
    text = f"{number:+.2f}"
    return text if float(text) else "0.00"


def change_text(name: str, change: Change) -> str:
    """A change as a cell: "+1.25 ± 0.30" points of an accuracy, "-3.10 ± 0.20 %" of any other; "-"
    for NaN.

    A mark shows that the standard error is unpaired.
    """
    if math.isnan(change.value):
        return "-"
    error = "" if change.stderr is None else f" ± {change.stderr:.2f}"
    mark = "" if change.paired else f" {UNPAIRED}"
    return f"{sign_change(change.value)}{error}{'' if in_percent(name) else ' %'}{mark}"


def shown_change(name: str, base: Value | None, value: Value | None) -> str:
    """A measure's change from a base as a cell; "-" if one of the two is missing."""
    return "-" if base is None or value is None else change_text(name, change_of(name, value, base))


_LARGE = 1.5  # times the perplexity of the dense model


def cheaper(recipe: Recipe) -> list[str]:
    """The options by which a run loses less at the same number of weights."""
    counts = recipe.counts
    structure = recipe.structure
    by_rule = recipe.adaptive and counts.sparsity is None
    better = ""
    if structure is not None and by_rule and "taylor" in structure.criteria:
        better = "--method emp-taylor" * (recipe.name != "taylor")  # its rule removes fewer
    if recipe.update is None or recipe.update.refit is None:
        if structure is None:
            fixed = isinstance(counts, Pattern | Match) or getattr(counts, "shares", None)
            better = f"--method {'admm' if fixed else 'emp-admm'}"
        better += " --refit"
    flags = [better.strip()] if better else []
    if not flags and recipe.heal is None:
        flags.append("--heal")
    # Of an order above 1, the effective number is smaller than that of order 1.
    if counts.sparsity is None and (counts.order or 0) > 1:
        flags.append("--order 1")
    return flags


def advice(recipe: Recipe, dense: float, pruned: float) -> list[str]:
    """A sentence with what would cost less, if the perplexity rises by more than a half; else
    none.
    """
    if pruned <= _LARGE * dense:
        return []
    flags = cheaper(recipe)
    if recipe.counts.sparsity is not None:
        flags.append("removing less")
    if getattr(recipe.counts, "shares", None) is None:
        flags.append("--loss 2%")
    listed = f"{', '.join(flags[:-1])} or {flags[-1]}" if len(flags) > 1 else flags[0]
    return [f"The perplexity rises by more than a half. This would cost less: {listed}"]
