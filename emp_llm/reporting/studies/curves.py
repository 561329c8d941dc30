"""The numbers in every figure of a report: curves, differences from baselines, maps, boxes and masses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from emp_llm.evaluation.measured_values import Value, change_between, in_percent
from emp_llm.options.recipe import MatchBy
from emp_llm.records.run_report import Quartiles
from emp_llm.reporting.studies.measured_points import MatrixStats, MeasuredPoint, SuiteResult, by_role_and_block
from emp_llm.reporting.studies.study import Study, StudySuite, label_of

Allocation = Literal["emp", "total", "matrix"]  # EMP, or the quantity in which a uniform baseline matches an EMP point
_LOWER = ("perplexity", "bits_per_byte", "loss", "brier")


@dataclass(frozen=True)
class Dot:
    """A point of a curve: β (for a baseline, of its EMP point), sparsity of the targets, and the measured value."""

    beta: float | None
    sparsity: float
    value: float
    stderr: float | None
    name: str


@dataclass(frozen=True)
class Curve:
    """Points of one criterion and one allocation of the zeros, by ascending sparsity."""

    label: str
    criterion: str
    order: float | None
    allocation: Allocation
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Difference:
    """The difference between an EMP point and a uniform baseline that removes as many weights.

    Attributes:
        point, baseline: the EMP point and the baseline.
        match: the quantity that is equal in both.
        measure: its name; value: of the point; base: of the baseline.
        change: from base to value, in percent of base; for accuracies in points. 0 for equal masks, and for values that
            differ by rounding only.
        stderr: of the change. For a perplexity, from the paired losses of the blocks. For accuracies, from both standard
            errors, as if the models had answered different examples; this overestimates the error.
        better: whether the change is in EMP's favour; None if it is unknown whether high or low values are good.
    """

    point: MeasuredPoint
    baseline: MeasuredPoint
    match: MatchBy
    measure: str
    value: float
    base: float
    change: float
    stderr: float | None
    better: bool | None

    @property
    def clear(self) -> bool | None:
        """Whether the change exceeds two standard errors; None if these are unknown."""
        return None if self.stderr is None else abs(self.change) > 2 * self.stderr


@dataclass(frozen=True)
class Grid:
    """A quantity by role (rows) and block (columns); None for a missing matrix or number."""

    label: str
    roles: tuple[str, ...]
    blocks: tuple[int | None, ...]
    values: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Boxes:
    """Kept fractions of the rows of every matrix of one point, by role and block."""

    label: str
    roles: tuple[str, ...]
    spreads: dict[tuple[str, int | None], Quartiles]


@dataclass(frozen=True)
class Masses:
    """s_eff and its bound for every role and block of one point (order 2)."""

    label: str
    matrices: tuple[MatrixStats, ...]


def curves(study: Study, suite: StudySuite, measure: str) -> list[Curve]:
    """One measure of a suite along every method: EMP, uniform rows, and uniform rows within each matrix.

    A baseline that matches every matrix belongs to the order of its EMP point. A baseline that matches the total belongs to no
    order, because equal totals give the same baseline.
    """
    of = {point.id: point for point in study.points}
    groups: dict[tuple[str, str, float | None, Allocation], list[Dot]] = {}
    for point in study.pruned:
        result = point.result_of(suite.key)
        value = result.values.get(measure) if result else None
        if value is None or not math.isfinite(value.value) or point.sparsity is None:
            continue
        allocation: Allocation = "emp" if point.adaptive else point.match or "total"
        matched = of.get(point.baseline_of or "")
        order = point.order if point.adaptive else matched.order if matched and allocation == "matrix" else None
        dot = Dot(matched.beta if matched else point.beta, point.sparsity, value.value, value.stderr, point.name)
        label = label_of(point) + (f", order {order:g}" if not point.adaptive and order not in (None, 2.0) else "")
        groups.setdefault((label, point.criterion, order, allocation), []).append(dot)
    return [Curve(*key, tuple(sorted(dots, key=lambda dot: (dot.sparsity, dot.beta or 0.0)))) for key, dots in groups.items()]


def differences(study: Study, suite: StudySuite) -> list[Difference]:
    """The differences between every EMP point and each of its baselines, for every measure that both have."""
    of = {point.id: point for point in study.points}
    found = []
    for baseline in study.pruned:
        point = of.get(baseline.baseline_of or "")
        first, second = (p.result_of(suite.key) if p else None for p in (point, baseline))
        if point is None or first is None or second is None or baseline.match is None:
            continue
        for measure in suite.measures:
            value, base = first.values.get(measure), second.values.get(measure)
            if value is None or base is None:
                continue
            same = bool(point.masks) and point.masks == baseline.masks
            change, stderr = (0.0, 0.0) if same else change_of(measure, value, base, first, second)
            if not math.isnan(change):
                lower = lower_is_better(measure)
                better = None if lower is None else (change < 0) == lower and change != 0
                numbers = (value.value, base.value, change, stderr, better)
                found.append(Difference(point, baseline, baseline.match, measure, *numbers))
    methods = list(dict.fromkeys(label_of(point) for point in study.points))
    return sorted(
        found,
        key=lambda each: (
            suite.measures.index(each.measure),
            methods.index(label_of(each.point)),
            each.match != "total",
            each.point.beta or 0.0,
        ),
    )


def change_of(
    measure: str, value: Value, base: Value, result: SuiteResult | None = None, other: SuiteResult | None = None
) -> tuple[float, float | None]:
    """The change of a value from a base, and its standard error: for accuracies in points, else in percent of the base.

    Args:
        measure: its name.
        value, base: the two values.
        result, other: the results that hold them; a perplexity's error is that of their paired block losses.
    """
    change = change_between(measure, base.value, value.value)
    if in_percent(measure):
        errors = (value.stderr, base.stderr)
        return change, None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])
    paired = None
    if measure.startswith("perplexity") and result and other and math.isfinite(change) and math.isfinite(base.value):
        paired = paired_stderr(result.block_losses, other.block_losses)
    return change, None if paired is None else 100 * paired * value.value / base.value


def paired_stderr(first: tuple[tuple[float, int], ...], second: tuple[tuple[float, int], ...]) -> float | None:
    """Standard error of the difference of two mean losses on the same blocks of a text, each weighted by its tokens.

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


def lower_is_better(measure: str) -> bool | None:
    """True for perplexities and losses, False for accuracies, None for unknown measures."""
    if in_percent(measure):
        return False
    return True if any(word in measure for word in _LOWER) else None


def main_measures(suite: StudySuite) -> list[str]:
    """The measures that have a figure: the perplexity, and the mean accuracy or the first one."""
    perplexities = [name for name in suite.measures if lower_is_better(name)]
    means = [name for name in suite.measures if name.startswith("mean acc of ")]
    accuracies = [name for name in suite.measures if in_percent(name)]
    others = [name for name in suite.measures if lower_is_better(name) is None]
    return perplexities[:1] + (means or accuracies[:1]) or others[:1]


def grids(study: Study) -> list[Grid]:
    """N_eff / N by role and block, one grid for each criterion, order and variant."""
    found: list[Grid] = []
    for label, matrices in study.measured:
        cells = by_role_and_block(matrices)
        roles = tuple(dict.fromkeys(role for role, _ in cells))
        blocks = ordered_blocks(cells)
        values = tuple(
            tuple(cell.effective_share if (cell := cells.get((role, block))) else None for block in blocks) for role in roles
        )
        if any(value is not None for row in values for value in row):
            found.append(Grid(label, roles, blocks, values))
    return found


def boxes(study: Study) -> list[Boxes]:
    """Kept fractions of the rows: for each EMP method those of the point whose β is nearest to 1.

    Without EMP points, those of all points whose rows keep different fractions.
    """
    chosen: dict[str, MeasuredPoint] = {}
    for point in study.points:
        if point.adaptive and point.matrices:
            name = label_of(point)
            held = chosen.get(name)
            if held is None or abs((point.beta or 1) - 1) < abs((held.beta or 1) - 1):
                chosen[name] = point
    if not chosen:
        chosen = {p.name: p for p in study.pruned if any(m.kept_fraction.min < m.kept_fraction.max for m in p.matrices)}
    found = []
    for name, point in chosen.items():
        cells = by_role_and_block(point.matrices)
        label = name if point.beta in (None, 1.0) else f"{name}, β = {point.beta:g}"
        roles = tuple(dict.fromkeys(role for role, _ in cells))
        found.append(Boxes(label, roles, {key: cell.kept_fraction for key, cell in cells.items()}))
    return found


def masses(study: Study) -> list[Masses]:
    """s_eff and its bound for every role and block, one for each criterion and variant."""
    found = []
    for label, matrices in study.measured:
        cells = tuple(by_role_and_block([m for m in matrices if m.bound is not None and m.s_eff is not None]).values())
        if cells:
            found.append(Masses(label, cells))
    return found


def ordered_blocks(cells: Iterable[tuple[str, int | None]]) -> tuple[int | None, ...]:
    """The blocks of these cells in order; None, for matrices outside of the blocks, is last."""
    blocks = {block for _, block in cells}
    return (*sorted(block for block in blocks if block is not None), *((None,) if None in blocks else ()))
