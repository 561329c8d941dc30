"""Points sorted into studies, one for each model and choice of targets, with baselines linked to their EMP points."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePath

from emp_llm.reporting.studies.measured_points import MatrixStats, MeasuredPoint, SuiteResult

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
    def measured(self) -> list[tuple[str, tuple[MatrixStats, ...]]]:
        """(label, matrices with effective numbers) of each criterion, order and variant; once, unless the numbers differ."""
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


def studies(points: Iterable[MeasuredPoint]) -> list[Study]:
    """Sort points by model and targets, in the order given. Results of a dense model belong to all of its studies."""
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
        if not point.adaptive and point.pruned and point.baseline_of is None and point.group == "row":
            same = [e for e in adaptive if (e.criterion, e.relative) == (point.criterion, point.relative)]
            same = [e for e in same if e.sparsity == point.sparsity]
            named = [e for e in same if point.matches and Path(point.matches).resolve() == Path(e.id)]
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
