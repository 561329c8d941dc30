"""Points sorted into studies, one for each model and choice of targets, and the numbers in every
figure of a study.

A point is a pruned model with its measurements, read from a run, a sweep, a measure or a results
file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any, Literal

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, printable
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME, shown_name
from emp_llm.evaluation.comparison import Change, Value, change_of, in_percent, values_of
from emp_llm.evaluation.results import results_of_report
from emp_llm.options.flat import recipe_of
from emp_llm.options.recipe import Effective, Match, MatchBy, Recipe
from emp_llm.pruning.outcome import ALL_KEPT
from emp_llm.records.base import record_of, version_of
from emp_llm.records.bench import Bench
from emp_llm.records.evaluation import CheckRecord, Measures, PerplexityRecord
from emp_llm.records.measure import Measure
from emp_llm.records.results import Results, pruned_by
from emp_llm.records.run_report import (
    REPORT_LIMIT,
    MatrixRecord,
    RunReport,
    TargetsRecord,
)
from emp_llm.records.source import CalibrationRecord
from emp_llm.records.sweep import read_sweep
from emp_llm.reporting.run_tables import effective_share, healing_lines, split_benches

_ACCEPTED = "the output of prune, sweep, measure or bench, or a results file of evaluate"
_DENSE = Recipe()  # of points without a recipe


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite on one model.

    Attributes:
        suite: its name.
        key: text, tasks, limit, dtype and quantisation as JSON; results with equal keys are
            comparable.
        values: measure -> value, from `evaluation.comparison.values_of`.
    """

    suite: str
    key: str
    values: dict[str, Value]


@dataclass(eq=False)
class MeasuredPoint:
    """A pruned model, or a model that was only measured or evaluated.

    Attributes:
        id: the path that it was read from; unique.
        name: of its folder or file, for display.
        model: the dense model's name as the user gave it; identity: of its weights, or the name if
            that is unknown.
        recipe: how the model was pruned; `_DENSE` for the dense model.
        variant: other differences from points of the same method, in words; usually empty.
        match, baseline_of: for a uniform baseline, the total or the matrices that it matches, and
            the id of the EMP point.
        sparsity, sparsity_of_all: of the targets, and of all parameters, which may be unknown.
        pruned: whether it is a pruned model; the point of a measure is not, and has matrices too.
        matrices: of the targets by layer, each expert alone; targets: counts over all of them.
        results: one for each suite; dense: those of the dense model in the same run.
        signature: recipe and sparsity as JSON; equal in a run's report and in results of its
            checkpoint.
        masks: a hash of the masks, in sweeps; else empty.
        facts: name -> text for the head of the report.
    """

    id: str
    name: str
    model: str
    identity: str
    recipe: Recipe
    variant: str = ""
    match: MatchBy | None = None
    baseline_of: str | None = None
    sparsity: float = 0.0
    sparsity_of_all: float | None = None
    pruned: bool = True
    matrices: Mapping[str, MatrixRecord] = field(default_factory=dict)
    targets: TargetsRecord | None = None
    results: tuple[SuiteResult, ...] = ()
    dense: tuple[SuiteResult, ...] = ()
    signature: str = ""
    masks: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    def values_of(self, suite: str) -> dict[str, Value]:
        """The measures of the suite with this key; empty if it was not measured."""
        return next((result.values for result in self.results if result.key == suite), {})


def scope_of(recipe: Recipe) -> str:
    """The targets of a recipe in words: "mlp", "mlp without lm_head"."""
    scope = recipe.targets
    targets, ignored = (
        value if isinstance(value, str) else ", ".join(value)
        for value in (scope.layers, scope.ignore or "")
    )
    tower = {"language": "", "vision": " (vision tower)", "all": " (all towers)"}[scope.tower]
    return printable(targets + (f" without {ignored}" if ignored else "") + tower)


def read_inputs(paths: list[Path]) -> tuple[list[MeasuredPoint], list[Bench]]:
    """Read the points of some files and folders, in the order given, each once; and the outputs of
    `bench` among them.

    Args:
        paths: output folders of prune or sweep, their report files, outputs of measure and bench,
            results files of evaluate.

    Raises:
        UserError: there is no path, or one is none of these.
    """
    if not paths:
        raise UserError("There is nothing to report; give run folders, a sweep, or results files.")
    others, benches = split_benches([Path(path) for path in paths])
    points: dict[str, MeasuredPoint] = {}
    for path in others:
        for point in _read(path):
            points.setdefault(point.id, point)
    _identify(points.values())
    return _with_results(list(points.values())), benches


def _read(path: Path) -> Iterator[MeasuredPoint]:
    if path.is_dir():
        file = next(
            (path / name for name in (SWEEP_NAME, REPORT_NAME) if (path / name).is_file()), None
        )
        if file is None:
            raise UserError(
                f"{path}: it holds neither {SWEEP_NAME} nor {REPORT_NAME}; give {_ACCEPTED}."
            )
        path = file
    elif not path.is_file():
        raise UserError(f"{path}: no such file or folder; give {_ACCEPTED}.")
    if path.suffix == ".jsonl":
        points = path.parent.resolve() / "points"
        for report in read_sweep(path).points:
            point = _run(report, points / report.point.name)
            other = report.point.baseline_of
            point.baseline_of = None if other is None else str(points / other)
            yield point
        return
    values = read_json(path, strict=True, limit=REPORT_LIMIT)
    record_type = next(
        (
            record_type
            for record_type in (Measure, Results, RunReport)
            if version_of(values, record_type) is not None
        ),
        None,
    )
    if record_type is None:
        raise UserError(f"{path}: this is not {_ACCEPTED}; give one of these.")
    record = record_of(values, record_type, str(path))
    if isinstance(record, Measure):
        yield from _measures(record, path)
    elif isinstance(record, Results):
        yield _results(record, path)
    elif isinstance(record, RunReport):
        yield _run(record, path.parent if path.name == REPORT_NAME else path)


def _run(report: RunReport, path: Path) -> MeasuredPoint:
    path = path.resolve()
    masks = report.masks or ""
    models = results_of_report(report)
    results = [suite_result_of(model) for model in models if model.pruned is not None]
    dense = [suite_result_of(model) for model in models if model.pruned is None]
    if report.check is not None:
        results.append(_check_result(report.check, report.check.pruned))
        dense.append(_check_result(report.check, report.check.dense))
    return MeasuredPoint(
        id=str(path),
        name=printable(path.name),
        **_origin(report, report.recipe, report.targets),
        match=_match_of(report.recipe),
        matrices=report.matrices,
        results=tuple(results),
        dense=tuple(dense),
        signature=json.dumps(pruned_by(report).as_dict(), sort_keys=True),
        # The hash of the masks leaves out the norms, so it is valid within its sweep only.
        masks=masks if masks in ("", ALL_KEPT) else f"{path.parent} {masks}",
    )


def _match_of(recipe: Recipe) -> MatchBy | None:
    """What a baseline matches; None for another recipe."""
    return recipe.counts.by if isinstance(recipe.counts, Match) else None


def _check_result(check: CheckRecord, record: PerplexityRecord) -> SuiteResult:
    """One of a run's two measures on the held-out text, as the result of a suite. Runs whose dense
    measures are equal read the same text.
    """
    dense = check.dense
    key = {"held-out text": [dense.blocks, dense.block_length, dense.value]}
    name = f"held-out text, dense {dense.value:.4g}"  # other texts have other numbers
    return SuiteResult(name, json.dumps(key), values_of(Measures(perplexity=record)))


def _measures(measure: Measure, path: Path) -> Iterator[MeasuredPoint]:
    for number, entry in enumerate(measure.measures):
        score = measure.recipe.score
        if score.method != entry.criterion:
            score = recipe_of(entry.criterion, score=entry.score).score
        counts = Effective(order=entry.order, count_by=entry.count_by or "own")
        recipe = measure.recipe.but(score=score, counts=counts, group="row")
        yield MeasuredPoint(
            id=f"{path.resolve()}#{number}",
            name=printable(f"{path.stem} {entry.criterion} {entry.order:g}"),
            **_origin(measure, recipe, entry.targets),
            pruned=False,
            matrices=entry.matrices,
        )


def _origin(record: RunReport | Measure, recipe: Recipe, targets: TargetsRecord) -> dict[str, Any]:
    """The fields of a point that a run and a measure have in common."""
    point = {
        "model": printable(record.source.model),
        "identity": record.source.key,
        "recipe": recipe,
        "targets": targets,
    }
    point |= {
        "sparsity": targets.sparsity_of_targets,
        "sparsity_of_all": targets.sparsity_of_all_parameters,
    }
    facts = {"model": shown_name(record.source.model), "revision": record.source.revision}
    if targets.parameters is not None:
        facts["parameters"] = f"{targets.parameters:,}"
    if targets.weights is not None:
        share = targets.share_of_all_parameters
        of_all = f", {100 * share:.1f} % of all parameters" if share is not None else ""
        facts["targets"] = f"{scope_of(recipe)}: {targets.weights:,} weights{of_all}"
    texts = record.calibration.all_texts if record.calibration is not None else []
    facts["calibration"] = "; ".join(
        f"{text.name}{text.bos_note}, {text.samples} x {text.seqlen} tokens" for text in texts
    )
    if isinstance(record, RunReport) and record.healing is not None:
        facts["healed"] = healing_lines(record)[0].removeprefix("healed: ")
    known = {name: fact for name, fact in facts.items() if fact}
    trained = isinstance(record, RunReport) and record.trained
    return point | {"variant": _variant(recipe, record.calibration, trained), "facts": known}


def _variant(recipe: Recipe, calibration: CalibrationRecord | None, trained: bool) -> str:
    """Everything that sets a recipe apart from others of the same method."""
    words = recipe.variant
    if calibration is not None and calibration.propagate == "pruned":
        words.append("propagate pruned")
    words += ["trained since"] * trained
    return printable(", ".join(words))


def _results(results: Results, path: Path) -> MeasuredPoint:
    place = str(path.resolve())
    name = printable(path.stem)
    result = suite_result_of(results)
    pruned = results.pruned
    if pruned is None:
        identity = results.made_by.model.identity or results.model
        return MeasuredPoint(
            place, name, printable(results.model), identity, _DENSE, dense=(result,)
        )
    return MeasuredPoint(
        place,
        name,
        model=printable(pruned.of),
        identity=pruned.of,
        recipe=pruned.recipe,
        variant=_variant(pruned.recipe, None, pruned.trained),
        match=_match_of(pruned.recipe),
        sparsity=pruned.sparsity_of_targets,
        results=(result,),
        signature=json.dumps(pruned.as_dict(), sort_keys=True),
    )


def suite_result_of(model: Results) -> SuiteResult:
    """The result of a suite on a model."""
    made_by = model.made_by.as_dict()
    key = {name: made_by.get(name) for name in ("text", "tasks", "limit", "quantization")}
    key["dtype"] = model.made_by.dtype or "auto"
    base, *changes = model.suite.split(",")
    marks = [PurePath(base).stem or base, *changes]
    marks += [model.made_by.quantization.bits] if model.made_by.quantization else []
    return SuiteResult(
        printable(", ".join(marks)), json.dumps(key, sort_keys=True), values_of(model.measures)
    )


def _identify(points: Iterable[MeasuredPoint]) -> None:
    """Give points that have only their model's name its identity, if exactly one model of that
    name is given.
    """
    known: dict[str, set[str]] = {}
    for point in points:
        known.setdefault(point.model, set()).update({point.identity} - {point.model})
    for point in points:
        if point.identity == point.model and len(known[point.model]) == 1:
            (point.identity,) = known[point.model]


def _with_results(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Join results files with the run of the same checkpoint, if that is given too: they add a
    suite to the run.

    Runs with equal signatures may differ in their calibration, which results do not record. Their
    point then stays alone.
    """
    left = list(points)
    for point in points:
        runs = [
            run
            for run in points
            if run.matrices and run.pruned and run.signature == point.signature
        ]
        if (
            point.matrices
            or point.recipe is _DENSE
            or not runs
            or any(run.matrices != runs[0].matrices for run in runs)
        ):
            continue
        runs[-1].results += tuple(
            result for result in point.results if not runs[-1].values_of(result.key)
        )
        left.remove(point)
    return left


_NAMES = {"wanda": "Wanda", "magnitude": "magnitude", "ria": "RIA"}


@dataclass(frozen=True)
class StudySuite:
    """A suite that points of a study were evaluated on.

    Attributes:
        key: `SuiteResult.key` of its results.
        name: for display.
        dense: the measures of the dense model; empty if it was not measured.
        measures: the names of all its measures.
    """

    key: str
    name: str
    dense: dict[str, Value]
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The effective numbers of one point by role and block.

    Attributes:
        label: its criterion, order and variant.
        matrices: of its targets; experts of a block share role and block.
        shares: (role, block) -> N_eff / N, the mean over the matrices that share both.
    """

    label: str
    matrices: tuple[MatrixRecord, ...]
    shares: dict[tuple[str, int | None], float]

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(role for role, _ in self.shares))

    @property
    def blocks(self) -> list[int | None]:
        """In order; None, for matrices outside of the blocks, is last."""
        return sorted(
            {block for _, block in self.shares},
            key=lambda block: math.inf if block is None else block,
        )


def _grid(label: str, matrices: Iterable[MatrixRecord]) -> Grid:
    groups: dict[tuple[str, int | None], list[float]] = {}
    measured = []
    for matrix in matrices:
        share = effective_share(matrix)
        if share is not None:
            measured.append(matrix)
            groups.setdefault((matrix.role, matrix.block), []).append(share)
    return Grid(label, tuple(measured), {key: fmean(group) for key, group in groups.items()})


@dataclass(frozen=True)
class Study:
    """The points of one model and one choice of targets. Only points of one study may share a
    curve.

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
        """The effective numbers of each criterion, order and variant; those with the same numbers
        once, with all their labels.
        """
        grids: list[Grid] = []
        for point in self.points:
            if not point.recipe.adaptive:
                continue
            label = label_of(point).removeprefix("EMP-")
            label = label[:1].upper() + label[1:]
            grid = _grid(label, point.matrices.values())
            if not grid.shares:
                continue
            equal = [place for place, other in enumerate(grids) if _same_shares(grid, other)]
            if equal:
                labels = grids[equal[0]].label.split(" and ")
                if label not in labels:
                    both = " and ".join([*labels, label])
                    grids[equal[0]] = replace(grids[equal[0]], label=both)
                continue
            if any(label in other.label.split(" and ") for other in grids):
                grid = replace(grid, label=f"{label} ({point.name})")
            grids.append(grid)
        return grids


def _same_shares(one: Grid, other: Grid) -> bool:
    """Whether two grids show the same numbers, in a table or as colours."""
    return one.shares.keys() == other.shares.keys() and all(
        math.isclose(share, other.shares[key], abs_tol=5e-5) for key, share in one.shares.items()
    )


def studies(points: Iterable[MeasuredPoint]) -> list[Study]:
    """Sort points by model and targets, in the order given. Results of a dense model belong to
    all of its studies.
    """
    models: dict[str, list[MeasuredPoint]] = {}
    for point in points:
        models.setdefault(point.identity, []).append(point)
    all_studies: list[Study] = []
    taken: set[str] = set()
    for points_of_model in models.values():
        model = points_of_model[0].model
        dense = [point for point in points_of_model if point.recipe is _DENSE]
        titles = (short_model_name(model), model, f"{model} ({len(taken) + 1})")
        title = next(name for name in titles if name not in taken)
        taken.add(title)
        scopes: dict[str, list[MeasuredPoint]] = {}
        for point in points_of_model:
            if point.recipe is not _DENSE:
                scopes.setdefault(scope_of(point.recipe), []).append(point)
        for scope, members in (scopes or {"": []}).items():
            linked = _named_apart(_linked(members))
            name = f"{title}, {scope}" if len(scopes) > 1 else title
            all_studies.append(Study(name, model, scope, tuple(linked), _suites(members, dense)))
    return all_studies


def label_of(point: MeasuredPoint) -> str:
    """The method of a point in words, without the quantities that vary along a curve."""
    name = _NAMES.get(point.recipe.name, point.recipe.name)
    if point.recipe.adaptive:
        order = point.recipe.counts.order
        words = [f"EMP-{name}", *([] if order in (None, 2) else [f"order {order:g}"])]
    elif point.match == "matrix":
        words = [f"{name}, same total per matrix"]
    else:
        words = [f"{name}, uniform rows"]
    return ", ".join(words + ([point.variant] if point.variant else []))


def short_model_name(model: str) -> str:
    """The last part of a path or Hub id; the last two if the last is just "model"."""
    names = [name for name in PurePath(model).parts if name not in ("/", "..")]
    return "/".join(names[-2:] if names[-1:] == ["model"] else names[-1:]) or model


def _linked(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Link uniform points, as baselines, to an EMP point of the same criterion that removes
    exactly as many weights.
    """
    adaptive: dict[tuple[str, bool, float], list[MeasuredPoint]] = {}
    for point in points:
        if point.recipe.adaptive and point.pruned:
            adaptive.setdefault(
                (point.recipe.name, point.recipe.score.relative, point.sparsity), []
            ).append(point)
    linked = []
    for point in points:
        recipe = point.recipe
        same = adaptive.get((recipe.name, recipe.score.relative, point.sparsity), [])
        if same and not recipe.adaptive and recipe.group == "row" and point.baseline_of is None:
            run = recipe.counts.run if isinstance(recipe.counts, Match) else None
            named = [other for other in same if run and Path(run).resolve() == Path(other.id)]
            point = replace(point, baseline_of=(named or same)[0].id, match=point.match or "total")
        linked.append(point)
    return linked


def _named_apart(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Number the points whose name occurred before."""
    count: dict[str, int] = {}
    named = []
    for point in points:
        count[point.name] = count.get(point.name, 0) + 1
        named.append(
            point
            if count[point.name] == 1
            else replace(point, name=f"{point.name} ({count[point.name]})")
        )
    return named


def _suites(points: list[MeasuredPoint], alone: list[MeasuredPoint]) -> tuple[StudySuite, ...]:
    dense = [result for point in [*points, *alone] for result in point.dense]
    results = [result for point in points for result in point.results] + dense
    suites = []
    for key in dict.fromkeys(result.key for result in results):
        first = next((result for result in dense if result.key == key), None)
        members = [result for result in [*dense, *results] if result.key == key]
        names = dict.fromkeys(name for result in members for name in result.values)
        of_dense = first.values if first else {}
        suites.append(StudySuite(key, members[0].suite, of_dense, tuple(names)))
    return tuple(suites)


# EMP, or the quantity in which a uniform baseline matches an EMP point.
Allocation = Literal["emp", "total", "matrix"]


@dataclass(frozen=True)
class Dot:
    """A point of a curve: sparsity of the targets, and the measured value with its standard error:
    of an accuracy its own, of any other measure that of the change from the dense model.
    """

    sparsity: float
    value: float
    stderr: float | None = None


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
        better: whether the change is in EMP's favour; None if it is unknown whether high or low
            values are good.
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
    def verdict(self) -> str:
        """The better of the two. A difference below two standard errors, if they are known, is
        not clear.
        """
        if self.better is None:
            return "-"
        if not self.change.value:
            return "equal"
        stderr = self.change.stderr
        if stderr is not None and abs(self.change.value) <= 2 * stderr:
            return "no clear difference"
        return "EMP" if self.better else "baseline"


def curves(study: Study, suite: StudySuite, measure: str) -> list[Curve]:
    """One measure of a suite along every method: EMP, uniform rows, and uniform rows within each
    matrix.

    A baseline that matches every matrix belongs to the order of its EMP point. A baseline that
    matches the total belongs to no order, because equal totals give the same baseline.
    """
    of = {point.id: point for point in study.points}
    groups: dict[tuple[str, str, float | None, Allocation], list[Dot]] = {}
    for point in study.pruned:
        value = point.values_of(suite.key).get(measure)
        if value is None or not math.isfinite(value.value):
            continue
        allocation: Allocation = "emp" if point.recipe.adaptive else point.match or "total"
        matched = of.get(point.baseline_of or "", point)
        order = None if allocation == "total" else matched.recipe.counts.order
        dot = Dot(point.sparsity, value.value, _error_of(measure, value, suite.dense.get(measure)))
        label = label_of(point) + (
            f", order {order:g}" if allocation == "matrix" and order not in (None, 2.0) else ""
        )
        groups.setdefault((label, point.recipe.name, order, allocation), []).append(dot)
    return [
        Curve(*key, tuple(sorted(dots, key=lambda dot: dot.sparsity)))
        for key, dots in groups.items()
    ]


def _error_of(measure: str, value: Value, dense: Value | None) -> float | None:
    """The standard error of a point of a curve, in the measure's unit; None if it is unknown."""
    if in_percent(measure) or dense is None:
        return value.stderr
    change = change_of(measure, value, dense)
    return None if change.stderr is None else change.stderr * dense.value / 100


def differences(study: Study, suite: StudySuite) -> list[Difference]:
    """The differences between every EMP point and each of its baselines, for every measure that
    both have.
    """
    of = {point.id: point for point in study.points}
    pairs = []
    for baseline in study.pruned:
        point = of.get(baseline.baseline_of or "")
        if point is None or baseline.match is None:
            continue
        values = point.values_of(suite.key)
        bases = baseline.values_of(suite.key)
        for measure in [name for name in suite.measures if name in values and name in bases]:
            value = values[measure]
            base = bases[measure]
            same = bool(point.masks) and point.masks == baseline.masks
            change = Change(0.0, 0.0) if same else change_of(measure, value, base)
            if not math.isnan(change.value):
                lower = lower_is_better(measure)
                better = (
                    None if lower is None else (change.value < 0) == lower and change.value != 0
                )
                pairs.append(
                    Difference(
                        point,
                        baseline,
                        baseline.match,
                        measure,
                        value.value,
                        base.value,
                        change,
                        better,
                    )
                )
    methods = list(dict.fromkeys(label_of(point) for point in study.points))
    return sorted(
        pairs,
        key=lambda pair: (
            suite.measures.index(pair.measure),
            methods.index(label_of(pair.point)),
            pair.match != "total",
            pair.point.recipe.counts.in_force or 0.0,
        ),
    )


def lower_is_better(measure: str) -> bool | None:
    """True for perplexities and losses, False for accuracies, None for unknown measures."""
    if in_percent(measure):
        return False
    return (
        True
        if any(word in measure for word in ("perplexity", "bits_per_byte", "loss", "brier"))
        else None
    )
