"""Points sorted into studies, one for each model and choice of targets, and the numbers in every figure of a study."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Literal

from emp_llm.evaluation.comparison import Change, Value, change_of, in_percent
from emp_llm.options.recipe import MatchBy
from emp_llm.records.run_report import MatrixRecord
from emp_llm.reporting.points import MeasuredPoint, by_role_and_block, scope_of
from emp_llm.reporting.run_tables import effective_share

_NAMES = {"wanda": "Wanda", "magnitude": "magnitude", "ria": "RIA"}


@dataclass(frozen=True)
class StudySuite:
    """A suite that points of a study were evaluated on.

    Attributes:
        key: of its results; name: for display.
        dense: the measures of the dense model; empty if it was not measured.
        measures: the names of all its measures.
    """

    key: str
    name: str
    dense: dict[str, Value]
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The matrices of one point by role and block; the experts of a block are one matrix."""

    label: str
    cells: dict[tuple[str, int | None], MatrixRecord]

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(role for role, _ in self.cells))

    @property
    def blocks(self) -> list[int | None]:
        """In order; None, for matrices outside of the blocks, is last."""
        return sorted({block for _, block in self.cells}, key=lambda block: math.inf if block is None else block)


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
    def measured(self) -> list[Grid]:
        """The matrices with effective numbers of each criterion, order and variant; once, unless the numbers differ."""
        found: dict[str, Grid] = {}
        numbers: dict[str, list[list[float | None]]] = {}
        for point in self.points:
            own = [effective_share(matrix) for matrix in point.matrices.values()]
            label = label_of(point).removeprefix("EMP-")
            label = label[:1].upper() + label[1:]
            held = numbers.setdefault(label, [])
            if point.recipe.adaptive and own not in held and any(share is not None for share in own):
                name = f"{label} ({point.name})" if held else label
                found[name] = Grid(name, by_role_and_block(point.matrices))
                held.append(own)
        return list(found.values())

    @property
    def kept(self) -> list[Grid]:
        """The kept fractions of the rows: for each EMP method those of the point whose β is nearest to 1.

        Without EMP points, those of all points whose rows keep different fractions.
        """
        adaptive = [point for point in self.points if point.recipe.adaptive and point.matrices]
        chosen: dict[str, MeasuredPoint] = {}
        for point in sorted(adaptive, key=lambda point: abs((point.recipe.beta or 1) - 1)):
            chosen.setdefault(label_of(point), point)
        if not chosen:
            uneven = [p for p in self.pruned if any(m.kept_fraction.min < m.kept_fraction.max for m in p.matrices.values())]
            chosen = {point.name: point for point in uneven}
        betas = {label: "" if p.recipe.beta in (None, 1.0) else f", β = {p.recipe.beta:g}" for label, p in chosen.items()}
        return [Grid(label + betas[label], by_role_and_block(point.matrices)) for label, point in chosen.items()]


def studies(points: Iterable[MeasuredPoint]) -> list[Study]:
    """Sort points by model and targets, in the order given. Results of a dense model belong to all of its studies."""
    models: dict[str, list[MeasuredPoint]] = {}
    for point in points:
        models.setdefault(point.identity, []).append(point)
    found: list[Study] = []
    taken: set[str] = set()
    for own in models.values():
        model, dense = own[0].model, [point for point in own if point.recipe.method == "dense"]
        titles = (short_model_name(model), model, f"{model} ({len(taken) + 1})")
        title = next(each for each in titles if each not in taken)
        taken.add(title)
        scopes: dict[str, list[MeasuredPoint]] = {}
        for point in own:
            if point.recipe.method != "dense":
                scopes.setdefault(scope_of(point.recipe), []).append(point)
        for scope, members in (scopes or {"": []}).items():
            linked = _named_apart(_linked(members))
            name = f"{title}, {scope}" if len(scopes) > 1 else title
            found.append(Study(name, model, scope, tuple(linked), _suites(members, dense)))
    return found


def label_of(point: MeasuredPoint) -> str:
    """The method of a point in words, without the quantities that vary along a curve."""
    name = _NAMES.get(point.recipe.name, point.recipe.name)
    if point.recipe.adaptive:
        words = [f"EMP-{name}"] + ([f"order {point.recipe.order:g}"] if point.recipe.order != 2 else [])
    elif point.match == "matrix":
        words = [f"{name}, same total per matrix"]
    else:
        words = [f"{name}, uniform rows"]
    return ", ".join(words + ([point.variant] if point.variant else []))


def short_model_name(model: str) -> str:
    """The last part of a path or Hub id; the last two if the last is just "model"."""
    parts = [part for part in PurePath(model).parts if part not in ("/", "..")]
    return "/".join(parts[-2:] if parts[-1:] == ["model"] else parts[-1:]) or model


def _linked(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Link uniform points, as baselines, to an EMP point of the same criterion that removes exactly as many weights."""
    adaptive: dict[tuple[str, bool, float | None], list[MeasuredPoint]] = {}
    for point in points:
        if point.recipe.adaptive and point.pruned:
            adaptive.setdefault((point.recipe.name, point.recipe.relative, point.sparsity), []).append(point)
    linked = []
    for point in points:
        recipe = point.recipe
        same = adaptive.get((recipe.name, recipe.relative, point.sparsity), [])
        if same and not recipe.adaptive and recipe.group == "row" and point.baseline_of is None:
            named = [other for other in same if recipe.match and Path(recipe.match).resolve() == Path(other.id)]
            point = replace(point, baseline_of=(named or same)[0].id, match=point.match or "total")
        linked.append(point)
    return linked


def _named_apart(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Number the points whose name occurred before."""
    count: dict[str, int] = {}
    named = []
    for point in points:
        count[point.name] = count.get(point.name, 0) + 1
        named.append(point if count[point.name] == 1 else replace(point, name=f"{point.name} ({count[point.name]})"))
    return named


def _suites(points: list[MeasuredPoint], alone: list[MeasuredPoint]) -> tuple[StudySuite, ...]:
    dense = [result for point in [*points, *alone] for result in point.dense]
    results = [result for point in points for result in point.results] + dense
    found = []
    for key in dict.fromkeys(result.key for result in results):
        first = next((result for result in dense if result.key == key), None)
        members = [result for result in [*dense, *results] if result.key == key]
        names = dict.fromkeys(name for result in members for name in result.values)
        found.append(StudySuite(key, members[0].suite, first.values if first else {}, tuple(names)))
    return tuple(found)


Allocation = Literal["emp", "total", "matrix"]  # EMP, or the quantity in which a uniform baseline matches an EMP point


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

    @property
    def verdict(self) -> str:
        """The better of the two. A difference below two standard errors, if they are known, is not clear."""
        if self.better is None:
            return "-"
        if not self.change.value:
            return "equal"
        if self.clear is False:
            return "no clear difference"
        return "EMP" if self.better else "baseline"


def curves(study: Study, suite: StudySuite, measure: str) -> list[Curve]:
    """One measure of a suite along every method: EMP, uniform rows, and uniform rows within each matrix.

    A baseline that matches every matrix belongs to the order of its EMP point. A baseline that matches the total belongs to no
    order, because equal totals give the same baseline.
    """
    of = {point.id: point for point in study.points}
    groups: dict[tuple[str, str, float | None, Allocation], list[Dot]] = {}
    for point in study.pruned:
        value = point.values_of(suite.key).get(measure)
        if value is None or not math.isfinite(value.value) or point.sparsity is None:
            continue
        allocation: Allocation = "emp" if point.recipe.adaptive else point.match or "total"
        matched = of.get(point.baseline_of or "", point)
        order = None if allocation == "total" else matched.recipe.order
        dot = Dot(matched.recipe.beta, point.sparsity, value.value, point.name)
        label = label_of(point) + (f", order {order:g}" if allocation == "matrix" and order not in (None, 2.0) else "")
        groups.setdefault((label, point.recipe.name, order, allocation), []).append(dot)
    return [Curve(*key, tuple(sorted(dots, key=lambda dot: (dot.sparsity, dot.beta or 0.0)))) for key, dots in groups.items()]


def differences(study: Study, suite: StudySuite) -> list[Difference]:
    """The differences between every EMP point and each of its baselines, for every measure that both have."""
    of = {point.id: point for point in study.points}
    found = []
    for baseline in study.pruned:
        point = of.get(baseline.baseline_of or "")
        if point is None or baseline.match is None:
            continue
        values, bases = point.values_of(suite.key), baseline.values_of(suite.key)
        for measure in [name for name in suite.measures if name in values and name in bases]:
            value, base = values[measure], bases[measure]
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
            each.point.recipe.beta or 0.0,
        ),
    )


def lower_is_better(measure: str) -> bool | None:
    """True for perplexities and losses, False for accuracies, None for unknown measures."""
    if in_percent(measure):
        return False
    return True if any(word in measure for word in ("perplexity", "bits_per_byte", "loss", "brier")) else None
