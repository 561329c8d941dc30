"""The numbers behind every figure of a report: what of a study stands in one curve, map or row of boxes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from emp_llm.services.comparison import Value, in_percent
from emp_llm.services.records import Judgement, Match, MatrixStats, Point, Spread, by_role_and_block
from emp_llm.services.studies import Study, Suite, label_of

Allocation = str  # "emp", or how a uniform baseline was given its share: "total", "matrix"
_LOWER = ("perplexity", "bits_per_byte", "loss", "brier")


@dataclass(frozen=True)
class Dot:
    """A point of a curve: β (of a baseline, that of its EMP point), sparsity of the targets, what was measured."""

    beta: float | None
    sparsity: float
    value: float
    stderr: float | None
    name: str


@dataclass(frozen=True)
class Curve:
    """Points of one criterion and one way to share out the zeros, by ascending sparsity."""

    label: str
    criterion: str
    order: float | None
    allocation: Allocation
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Difference:
    """An EMP point beside a uniform baseline that removes as many weights.

    Attributes:
        point, baseline: the two.
        match: what they have in common.
        measure: what was measured of them; `value` of the point, `base` of the baseline.
        change: of value from base, in percent of it; of accuracies in points.
        stderr: of the change. Of a perplexity from the paired losses of the blocks; of accuracies from both standard errors as
            if the examples were not the same, which is on the safe side.
        better: whether the change is in EMP's favour; None for a measure of unknown sense.
    """

    point: Point
    baseline: Point
    match: Match
    measure: str
    value: float
    base: float
    change: float
    stderr: float | None
    better: bool | None

    @property
    def clear(self) -> bool | None:
        """Whether it is more than two standard errors; None where these are not known."""
        return None if self.stderr is None else abs(self.change) > 2 * self.stderr


@dataclass(frozen=True)
class Grid:
    """A quantity by role (rows) and block (columns); None where there is no such matrix, or no such number."""

    label: str
    roles: tuple[str, ...]
    blocks: tuple[int | None, ...]
    values: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Boxes:
    """Kept fractions of the rows of every matrix of one point, by role and block."""

    label: str
    roles: tuple[str, ...]
    spreads: dict[tuple[str, int | None], Spread]


@dataclass(frozen=True)
class Masses:
    """s_eff and its bound for every role and block of one point (order 2)."""

    label: str
    matrices: tuple[MatrixStats, ...]


def curves(study: Study, suite: Suite, measure: str) -> list[Curve]:
    """One measure of a suite along every method: EMP, uniform rows, and uniform rows within each matrix.

    A baseline belongs to the order of the EMP point it was matched to where each matrix has its own share, and to no order
    where only the total counts: the same total is the same baseline.
    """
    of = {point.id: point for point in study.points}
    groups: dict[tuple[str, str, float | None, str], list[Dot]] = {}
    for point in study.pruned:
        judged = point.judged(suite.key)
        value = judged.values.get(measure) if judged else None
        if value is None or not math.isfinite(value.value) or point.sparsity is None:
            continue
        allocation = "emp" if point.adaptive else point.match or "total"
        matched = of.get(point.baseline_of or "")
        order = point.order if point.adaptive else matched.order if matched and allocation == "matrix" else None
        dot = Dot(matched.beta if matched else point.beta, point.sparsity, value.value, value.stderr, point.name)
        label = label_of(point) + (f", order {order:g}" if not point.adaptive and order not in (None, 2.0) else "")
        groups.setdefault((label, point.criterion, order, allocation), []).append(dot)
    return [Curve(*key, tuple(sorted(dots, key=lambda dot: (dot.sparsity, dot.beta or 0.0)))) for key, dots in groups.items()]


def differences(study: Study, suite: Suite) -> list[Difference]:
    """Every EMP point beside each of its baselines, for every measure both have."""
    of = {point.id: point for point in study.points}
    found = []
    for baseline in study.pruned:
        point = of.get(baseline.baseline_of or "")
        first, second = (p.judged(suite.key) if p else None for p in (point, baseline))
        if point is None or first is None or second is None or baseline.match is None:
            continue
        for measure in suite.measures:
            value, base = first.values.get(measure), second.values.get(measure)
            if value is not None and base is not None and math.isfinite(value.value) and math.isfinite(base.value):
                change, stderr = change_of(measure, value, base, first, second)
                better = None if lower_is_better(measure) is None else (change < 0) == lower_is_better(measure) and change != 0
                found.append(
                    Difference(point, baseline, baseline.match, measure, value.value, base.value, change, stderr, better)
                )
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
    measure: str, value: Value, base: Value, judged: Judgement | None = None, other: Judgement | None = None
) -> tuple[float, float | None]:
    """By how much a value differs from a base, and the standard error of that: in points for accuracies, else in percent."""
    if in_percent(measure):
        errors = (value.stderr, base.stderr)
        known = None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])
        return value.value - base.value, known
    if not base.value:
        return math.nan, None
    ratio = value.value / base.value
    paired = None
    if measure.startswith("perplexity") and judged and other:
        paired = paired_stderr(judged.block_losses, other.block_losses)
    return 100 * (ratio - 1), None if paired is None else 100 * ratio * paired


def paired_stderr(first: tuple[tuple[float, int], ...], second: tuple[tuple[float, int], ...]) -> float | None:
    """Standard error of the difference of two mean losses on the same blocks of a text, each weighted by its tokens.

    None where the blocks are fewer than two, or not the same.
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
    """True for perplexities and losses, False for accuracies, None for what is not known."""
    if in_percent(measure):
        return False
    return True if any(word in measure for word in _LOWER) else None


def main_measures(suite: Suite) -> list[str]:
    """What a figure is drawn of: the perplexity, and the mean of the accuracies or the only one."""
    perplexities = [name for name in suite.measures if lower_is_better(name)]
    means = [name for name in suite.measures if name.startswith("mean acc of ")]
    accuracies = [name for name in suite.measures if in_percent(name)]
    others = [name for name in suite.measures if lower_is_better(name) is None]
    return perplexities[:1] + (means or accuracies[:1]) or others[:1]


def grids(study: Study) -> list[Grid]:
    """N_eff / N by role and block, one for each criterion, order and variant that differs."""
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
    """Kept fractions of the rows, of the point of each EMP method whose β is nearest to 1.

    Where there is no EMP point, of all points whose rows differ.
    """
    chosen: dict[str, Point] = {}
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
    """s_eff of every role and block beside its bound, one for each criterion and variant that differs."""
    found = []
    for label, matrices in study.measured:
        cells = tuple(by_role_and_block([m for m in matrices if m.bound is not None and m.s_eff is not None]).values())
        if cells:
            found.append(Masses(label, cells))
    return found


def ordered_blocks(cells: Iterable[tuple[str, int | None]]) -> tuple[int | None, ...]:
    """The blocks of some cells in order; what lies outside of them last."""
    blocks = {block for _, block in cells}
    return (*sorted(block for block in blocks if block is not None), *((None,) if None in blocks else ()))
