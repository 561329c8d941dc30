"""The numbers in every figure of a report: curves, differences from baselines, maps, boxes and masses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from emp_llm.evaluation.values import Change, change_of, in_percent
from emp_llm.options.recipe import MatchBy
from emp_llm.records.run_report import Quartiles
from emp_llm.reporting.studies.measured_points import MatrixStats, MeasuredPoint, by_role_and_block
from emp_llm.reporting.studies.study import Study, StudySuite, label_of

Allocation = Literal["emp", "total", "matrix"]  # EMP, or the quantity in which a uniform baseline matches an EMP point
_LOWER = ("perplexity", "bits_per_byte", "loss", "brier")


@dataclass(frozen=True)
class Dot:
    """A point of a curve: β (for a baseline, of its EMP point), sparsity of the targets, and the measured value."""

    beta: float | None
    sparsity: float
    value: float
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
        change: from base to value, in percent of base; for accuracies in points. 0 for equal masks.
            It has the paired standard error if both models were judged on the same examples.
        better: whether the change is in EMP's favour; None if it is unknown whether high or low values are good.
    """

    point: MeasuredPoint
    baseline: MeasuredPoint
    match: MatchBy
    measure: str
    value: float
    base: float
    change: Change
    better: bool | None

    @property
    def clear(self) -> bool | None:
        """Whether the change exceeds two standard errors; None if these are unknown."""
        return None if self.change.stderr is None else abs(self.change.value) > 2 * self.change.stderr


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
        dot = Dot(matched.beta if matched else point.beta, point.sparsity, value.value, point.name)
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
            change = Change(0.0, 0.0) if same else change_of(measure, value, base)
            if not math.isnan(change.value):
                lower = lower_is_better(measure)
                better = None if lower is None else (change.value < 0) == lower and change.value != 0
                found.append(Difference(point, baseline, baseline.match, measure, value.value, base.value, change, better))
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
