"""Points sorted into studies, one for each model and choice of targets, and the numbers in every figure of a study."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePath
from typing import Literal

from emp_llm.evaluation.values import Change, change_of, in_percent
from emp_llm.options.recipe import MatchBy
from emp_llm.records.run_report import MatrixRecord
from emp_llm.reporting.points import MeasuredPoint, SuiteResult, by_role_and_block
from emp_llm.reporting.run_tables import effective_share

_NAMES = {"wanda": "Wanda", "magnitude": "magnitude", "ria": "RIA"}


@dataclass(frozen=True)
class StudySuite:
    """A suite that points of a study were evaluated on.

    Attributes:
        key: of its results; name: for display.
        dense: the result of the dense model; None if there is none.
        measures: the names of all its measures.
    """

    key: str
    name: str
    dense: SuiteResult | None
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """The points of one model and one choice of targets. Only points of one study may share a curve.

    Attributes:
        title: name of the model; unique in the report.
        model, scope: the model and the targets, as the runs name them.
        points: pruned and measured ones; baselines are linked to their EMP points.
        suites: the suites that they were evaluated on.
    """

    title: str
    model: str
    scope: str
    points: tuple[MeasuredPoint, ...]
    suites: tuple[StudySuite, ...]

    @property
    def pruned(self) -> list[MeasuredPoint]:
        """The points that are pruned models."""
        return [point for point in self.points if point.pruned]

    @property
    def measured(self) -> list[tuple[str, tuple[MatrixRecord, ...]]]:
        """(label, matrices with effective numbers) of each criterion, order and variant; once, unless the numbers differ."""
        found: list[tuple[str, tuple[MatrixRecord, ...]]] = []
        seen: set[tuple[str, tuple[float | None, ...]]] = set()
        for point in self.points:
            numbers = tuple(map(effective_share, point.matrices))
            label = label_of(point).removeprefix("EMP-")
            label = label[:1].upper() + label[1:]
            if not point.adaptive or all(number is None for number in numbers) or (label, numbers) in seen:
                continue
            known = any(name == label for name, _ in seen)
            seen.add((label, numbers))
            found.append((f"{label} ({point.name})" if known else label, point.matrices))
        return found


def studies(points: Iterable[MeasuredPoint]) -> list[Study]:
    """Sort points by model and targets, in the order given. Results of a dense model belong to all of its studies."""
    points = _identified(list(points))
    identities = list(dict.fromkeys(point.identity for point in points))
    titles = _titles({identity: next(p.model for p in points if p.identity == identity) for identity in identities})
    found = []
    for identity in identities:
        own = [point for point in points if point.identity == identity]
        alone = [point for point in own if point.recipe is None]
        scopes = dict.fromkeys(point.scope for point in own if point.recipe is not None)
        for scope in scopes or {"": None}:
            members = _linked([point for point in own if point.recipe is not None and point.scope == scope])
            title = titles[identity] + (f", {scope}" if len(scopes) > 1 else "")
            found.append(Study(title, own[0].model, scope, tuple(members), _suites(members, alone)))
    return found


def label_of(point: MeasuredPoint) -> str:
    """The method of a point in words, without the quantities that vary along a curve."""
    name = _NAMES.get(point.criterion, point.criterion)
    if point.adaptive:
        words = [f"EMP-{name}"] + ([f"order {point.order:g}"] if point.order not in (None, 2.0) else [])
    elif point.match == "matrix":
        words = [f"{name}, same total per matrix"]
    else:
        words = [f"{name}, uniform rows"]
    return ", ".join(words + ([point.variant] if point.variant else []))


def _identified(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Give points that have only their model's name its identity, if exactly one model of that name is given."""
    by_name: dict[str, set[str]] = {}
    for point in points:
        if point.identity != point.model:
            by_name.setdefault(point.model, set()).add(point.identity)
    return [
        replace(point, identity=next(iter(by_name[point.model])))
        if point.identity == point.model and len(by_name.get(point.model, ())) == 1
        else point
        for point in points
    ]


def _titles(models: dict[str, str]) -> dict[str, str]:
    """identity -> a short, unique name."""
    short = {identity: short_model_name(name) for identity, name in models.items()}
    if len(set(short.values())) < len(short):
        short = dict(models)
    ordered = sorted(short, key=lambda identity: short[identity])
    for _, group in groupby(ordered, key=lambda identity: short[identity]):
        same = list(group)
        if len(same) > 1:
            short |= {identity: f"{short[identity]} ({number})" for number, identity in enumerate(same, 1)}
    return short


def short_model_name(model: str) -> str:
    """The last part of a path or Hub id; the last two if the last is just "model"."""
    parts = [part for part in PurePath(model).parts if part not in ("/", "..")]
    return "/".join(parts[-2:] if parts[-1:] == ["model"] else parts[-1:]) or model


def _linked(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Link uniform points, as baselines, to an EMP point of the same criterion that removes exactly as many weights."""
    adaptive = [point for point in points if point.adaptive and point.pruned]
    linked = []
    for point in points:
        recipe = point.recipe
        if recipe is not None and not recipe.adaptive and point.baseline_of is None and recipe.group == "row":
            same = [
                e
                for e in adaptive
                if e.recipe is not None and (e.recipe.name, e.recipe.relative) == (recipe.name, recipe.relative)
            ]
            same = [e for e in same if e.sparsity == point.sparsity]
            named = [e for e in same if recipe.match and Path(recipe.match).resolve() == Path(e.id)]
            if same:
                point = replace(point, baseline_of=(named or same)[0].id, match=point.match or "total")
        linked.append(point)
    return _named_apart(linked)


def _named_apart(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Number the points whose name occurred before."""
    count: dict[str, int] = {}
    named = []
    for point in points:
        count[point.name] = count.get(point.name, 0) + 1
        named.append(point if count[point.name] == 1 else replace(point, name=f"{point.name} ({count[point.name]})"))
    return named


def _suites(points: list[MeasuredPoint], alone: list[MeasuredPoint]) -> tuple[StudySuite, ...]:
    pruned = [result for point in points for result in point.results]
    dense = [result for point in points for result in point.dense] + [each for point in alone for each in point.results]
    found = []
    for key in dict.fromkeys(result.key for result in pruned + dense):
        first = next((result for result in dense if result.key == key), None)
        members = [result for result in [*dense, *pruned] if result.key == key]
        names = dict.fromkeys(name for result in members for name in result.values)
        found.append(StudySuite(key, members[0].suite, first, tuple(names)))
    return tuple(found)


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
    """The matrices of one point by role and block; the experts of a block are pooled."""

    label: str
    cells: dict[tuple[str, int | None], MatrixRecord]

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(role for role, _ in self.cells))

    @property
    def blocks(self) -> list[int | None]:
        return ordered_blocks(self.cells)


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
    """Matrices with N_eff / N, one grid for each criterion, order and variant."""
    found = [Grid(label, by_role_and_block(matrices)) for label, matrices in study.measured]
    return [grid for grid in found if any(effective_share(cell) is not None for cell in grid.cells.values())]


def boxes(study: Study) -> list[Grid]:
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
    labels = {name: name if p.beta in (None, 1.0) else f"{name}, β = {p.beta:g}" for name, p in chosen.items()}
    return [Grid(labels[name], by_role_and_block(point.matrices)) for name, point in chosen.items()]


def masses(study: Study) -> list[Grid]:
    """Matrices with s_eff and its bound (order 2), one grid for each criterion and variant."""
    found = []
    for label, matrices in study.measured:
        if known := [each for each in matrices if each.s_eff_bound_mean is not None and each.s_eff is not None]:
            found.append(Grid(label, by_role_and_block(known)))
    return found


def ordered_blocks(cells: Iterable[tuple[str, int | None]]) -> list[int | None]:
    """The blocks of these cells in order; None, for matrices outside of the blocks, is last."""
    blocks = {block for _, block in cells}
    return [*sorted(block for block in blocks if block is not None), *([None] if None in blocks else [])]
