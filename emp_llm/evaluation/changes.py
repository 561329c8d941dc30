"""Changes from one model to another on the same suite, with their standard errors.

Two models that were judged on the same examples, or on the same blocks of a text, agree on most of them. The paired standard
error counts only where they differ, and is smaller than that of two independent samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from emp_llm.evaluation.measured_values import Answers, Value, in_percent

_ROUNDING = 1e-9  # differences below this share of a value are rounding errors of its sums
UNPAIRED = "‡"  # marks an unpaired standard error


@dataclass(frozen=True)
class Change:
    """A change and its standard error: of an accuracy in points, of any other measure in percent of the base.

    Attributes:
        value: NaN if it is unknown.
        stderr: None if it is unknown.
        paired: whether the error is that of the same examples or blocks, else of two independent samples.
    """

    value: float
    stderr: float | None = None
    paired: bool = True

    @property
    def unpaired(self) -> bool:
        """Whether it has an unpaired standard error."""
        return self.stderr is not None and not self.paired


def change_of(name: str, value: Value, base: Value) -> Change:
    """The change of a measure from a base, with the paired standard error if both were judged on the same examples.

    Without it, the error of a difference of accuracies is the root of the sum of both squared errors, sqrt(a^2 + b^2); that of
    any other measure is unknown.

    Args:
        name: of the measure.
        value, base: the two values.
    """
    change = change_between(name, base.value, value.value)
    unit = 100.0 if in_percent(name) else 100.0 / base.value if base.value else math.nan
    if math.isfinite(change) and math.isfinite(base.value):
        paired = paired_error_of_losses(value.losses, base.losses)
        if paired is not None:
            # The perplexity is exp of the loss, so its error is that of the loss times the perplexity, to first order.
            return Change(change, 100 * paired * value.value / base.value)
        paired = paired_error_of_answers(value.answers, base.answers)
        if paired is not None:
            return Change(change, unit * paired)
    if in_percent(name) and value.stderr is not None and base.stderr is not None:
        return Change(change, math.hypot(value.stderr, base.stderr), paired=False)
    return Change(change)


def paired_error_of_answers(first: Sequence[Answers], second: Sequence[Answers]) -> float | None:
    """Paired standard error of the difference of two accuracies, as a fraction.

    With d_i = a_i - b_i in {-1, 0, 1} for the two answers to example i of n, the error of the mean of d is sd(d) / sqrt(n), and
    sd(d)^2 = (sum d_i^2 - (sum d_i)^2 / n) / (n - 1). Of several tasks, the difference is a weighted sum of the tasks'
    differences. Its error is sqrt(sum w_t^2 error_t^2), for tasks without common examples.

    Args:
        first, second: the answers to each task.

    Returns:
        The error; None if there are no answers, they are not to the same examples, or a task has a single example.
    """
    if not first or [each.asked for each in first] != [each.asked for each in second]:
        return None
    squares = 0.0
    for a, b in zip(first, second, strict=True):
        if a.examples < 2:
            return None
        gained, lost = (a.correct & ~b.correct).bit_count(), (b.correct & ~a.correct).bit_count()
        variance = (gained + lost - (gained - lost) ** 2 / a.examples) / (a.examples - 1)
        squares += a.weight**2 * variance / a.examples
    return math.sqrt(squares)


def paired_error_of_losses(first: Sequence[tuple[float, int]], second: Sequence[tuple[float, int]]) -> float | None:
    """Paired standard error of the difference of two mean losses on the same blocks of a text, each weighted by its tokens.

    With the differences d_i of the n blocks' losses, their weighted mean d and the tokens w_i of each block, it is
    sqrt(n / (n - 1) * sum (w_i (d_i - d))^2) / sum w_i; for equal blocks sd(d_i) / sqrt(n). In nats: also the error of the
    difference of the logarithms of the perplexities.

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


def change_text(name: str, change: Change) -> str:
    """A change as a cell: "+1.25 ± 0.30" points of an accuracy, "-3.10 ± 0.20 %" of any other; "-" for NaN.

    A mark shows that the standard error is unpaired.
    """
    if math.isnan(change.value):
        return "-"
    error = "" if change.stderr is None else f" ± {change.stderr:.2f}"
    mark = f" {UNPAIRED}" if change.unpaired else ""
    return f"{signed(change.value)}{error}{'' if in_percent(name) else ' %'}{mark}"


def shown_change(name: str, base: Value | None, value: Value | None) -> str:
    """A measure's change from a base as a cell; "-" if one of the two is missing."""
    return "-" if base is None or value is None else change_text(name, change_of(name, value, base))
