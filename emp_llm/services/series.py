"""The numbers behind every figure and table of a report: points sorted into studies, and each study into series."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePath

from emp_llm.services.comparison import Value, in_percent
from emp_llm.services.records import Judgement, Match, MatrixStats, Point, Spread, by_role_and_block

Allocation = str  # "emp", or how a uniform baseline was given its share: "total", "matrix"
_NAMES = {"wanda": "Wanda", "magnitude": "magnitude"}
_LOWER = ("perplexity", "bits_per_byte", "loss", "brier")


@dataclass(frozen=True)
class Suite:
    """A suite that points of a study were judged by.

    Attributes:
        key: of the judgements; `name` is shown.
        dense: what it measured of the dense model, if anything did.
        measures: the names of all that it measured.
    """

    key: str
    name: str
    dense: Judgement | None
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """All that was given of one model and one choice of targets: what may stand in one curve.

    Attributes:
        title: of the model, told apart from others in the report.
        model, scope: as the runs name them.
        points: pruned and measured ones, baselines linked with what they are the baselines of.
        suites: what they were judged by.
    """

    title: str
    model: str
    scope: str
    points: tuple[Point, ...]
    suites: tuple[Suite, ...]

    @property
    def pruned(self) -> list[Point]:
        return [point for point in self.points if point.pruned]

    @property
    def measured(self) -> list[tuple[str, tuple[MatrixStats, ...]]]:
        """Matrices with an effective number, under what it was measured by: every criterion, order and variant once, unless
        the numbers differ."""
        found: list[tuple[str, tuple[MatrixStats, ...]]] = []
        seen: set[tuple[str, tuple[float | None, ...]]] = set()
        for point in self.points:
            numbers = tuple(matrix.effective_share for matrix in point.matrices)
            label = label_of(point).removeprefix("EMP-")
            label = label[:1].upper() + label[1:]
            if not point.adaptive or all(number is None for number in numbers) or (label, numbers) in seen:
                continue
            known = any(name == label for name, _ in seen)
            seen.add((label, numbers))
            found.append((f"{label} ({point.name})" if known else label, point.matrices))
        return found


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
        point, baseline: their names.
        match: what they have in common.
        value, base: what was measured of the two.
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


def studies(points: Iterable[Point]) -> list[Study]:
    """Points by model and targets, in the order given; results of a dense model belong to all of its studies."""
    points = _identified(list(points))
    identities = list(dict.fromkeys(point.identity for point in points))
    titles = _titles({identity: next(p.model for p in points if p.identity == identity) for identity in identities})
    found = []
    for identity in identities:
        own = [point for point in points if point.identity == identity]
        alone = [point for point in own if point.method is None]
        scopes = dict.fromkeys(point.scope for point in own if point.method is not None)
        for scope in scopes or {"": None}:
            members = _linked([point for point in own if point.method is not None and point.scope == scope])
            title = titles[identity] + (f", {scope}" if len(scopes) > 1 else "")
            found.append(Study(title, own[0].model, scope, tuple(members), _suites(members, alone)))
    return found


def label_of(point: Point) -> str:
    """The method of a point in words, without what varies along a curve."""
    name = _NAMES.get(point.criterion, point.criterion)
    if point.adaptive:
        words = [f"EMP-{name}"] + ([f"order {point.order:g}"] if point.order not in (None, 2.0) else [])
    elif point.match == "matrix":
        words = [f"{name}, same total per matrix"]
    else:
        words = [f"{name}, uniform rows"]
    return ", ".join(words + ([point.variant] if point.variant else []))


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


def _identified(points: list[Point]) -> list[Point]:
    """Points that know their model by name only, under its fingerprint where just one model of that name is given."""
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
    """A short name for each identity that no other has."""
    short = {identity: _short_name(name) for identity, name in models.items()}
    if len(set(short.values())) < len(short):
        short = dict(models)
    ordered = sorted(short, key=lambda identity: short[identity])
    for _, group in groupby(ordered, key=lambda identity: short[identity]):
        same = list(group)
        if len(same) > 1:
            short |= {identity: f"{short[identity]} ({number})" for number, identity in enumerate(same, 1)}
    return short


def _short_name(model: str) -> str:
    """The last part of a path or Hub id; with the one before, where it says only that it is a model."""
    parts = [part for part in PurePath(model).parts if part not in ("/", "..")]
    return "/".join(parts[-2:] if parts[-1:] == ["model"] else parts[-1:]) or model


def _linked(points: list[Point]) -> list[Point]:
    """Uniform points that remove exactly as many weights as an EMP point by the same criterion, as its baselines."""
    adaptive = [point for point in points if point.adaptive and point.pruned]
    linked = []
    for point in points:
        if not point.adaptive and point.pruned and point.baseline_of is None and point.group == "row":
            same = [e for e in adaptive if e.criterion == point.criterion and e.sparsity == point.sparsity]
            named = [e for e in same if point.matches and Path(point.matches).resolve() == Path(e.id)]
            if same:
                point = replace(point, baseline_of=(named or same)[0].id, match=point.match or "total")
        linked.append(point)
    return _named_apart(linked)


def _named_apart(points: list[Point]) -> list[Point]:
    count: dict[str, int] = {}
    named = []
    for point in points:
        count[point.name] = count.get(point.name, 0) + 1
        named.append(point if count[point.name] == 1 else replace(point, name=f"{point.name} ({count[point.name]})"))
    return named


def _suites(points: list[Point], alone: list[Point]) -> tuple[Suite, ...]:
    judged = [judgement for point in points for judgement in point.judgements]
    dense = [judgement for point in points for judgement in point.dense] + [j for point in alone for j in point.judgements]
    found = []
    for key in dict.fromkeys(judgement.key for judgement in judged + dense):
        first = next((judgement for judgement in dense if judgement.key == key), None)
        members = [judgement for judgement in [*dense, *judged] if judgement.key == key]
        names = dict.fromkeys(name for judgement in members for name in judgement.values)
        found.append(Suite(key, members[0].suite, first, tuple(names)))
    return tuple(found)
