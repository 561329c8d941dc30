"""Points sorted into studies, one for each model and choice of targets, each with a baseline.

A point is a pruned model with its measurements, read from a run, a sweep or a results file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, printable, shorten_list
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME, shown_name
from emp_llm.evaluation.comparison import Value, change_of, in_percent, values_of
from emp_llm.evaluation.results import results_of_report
from emp_llm.options.recipe import Match, MatchBy, Recipe
from emp_llm.records.base import record_of, version_of
from emp_llm.records.bench import Bench
from emp_llm.records.evaluation import CheckRecord, Measures, PerplexityRecord
from emp_llm.records.results import PrunedBy, Results, pruned_by
from emp_llm.records.run_report import REPORT_LIMIT, RunReport
from emp_llm.records.sweep import read_sweep
from emp_llm.reporting.run_tables import healing_lines, split_benches

_ACCEPTED = "the output of prune, sweep or bench, or a results file of evaluate"
_DENSE = Recipe()  # of points without a recipe
_NEAR = 0.01  # of the targets: zeros that differ by no more agree
_NAMES = {"wanda": "Wanda", "magnitude": "magnitude", "ria": "RIA"}


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
class Point:
    """A model of a table: pruned, or dense.

    Attributes:
        id: the path that it was read from; unique.
        name: of its folder or file, for display.
        model: the dense model's name as the user gave it; identity: of its weights, or the name if
            that is unknown.
        recipe: how the model was pruned; `_DENSE` for the dense model.
        variant: other differences from points of the same method, in words; usually empty.
        sparsity, sparsity_of_all: of the targets, and of all parameters, which may be unknown.
        zeros: of a row that is no measurement of ours, what stands in place of its sparsity.
        results: one for each suite; dense: those of the dense model in the same run.
        signature: recipe and sparsity as JSON; equal in a run's report and in results of its
            checkpoint.
        facts: name -> text for the head of the report; a results file has none.
    """

    id: str
    name: str
    model: str = ""
    identity: str = ""
    recipe: Recipe = _DENSE
    variant: str = ""
    sparsity: float = 0.0
    sparsity_of_all: float | None = None
    zeros: str = ""
    results: tuple[SuiteResult, ...] = ()
    dense: tuple[SuiteResult, ...] = ()
    signature: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def match(self) -> MatchBy | None:
        """What a uniform baseline has in common with an EMP point; None for others."""
        return self.recipe.counts.by if isinstance(self.recipe.counts, Match) else None

    @property
    def label(self) -> str:
        """The method in words, without the quantities that vary along a curve."""
        name = _NAMES.get(self.recipe.name, self.recipe.name)
        if self.recipe.adaptive:
            order = self.recipe.counts.order
            words = [f"EMP-{name}", *([] if order in (None, 2) else [f"order {order:g}"])]
        elif self.match == "matrix":
            words = [f"{name}, same total per matrix"]
        else:
            words = [f"{name}, uniform rows"]
        return ", ".join(words + ([self.variant] if self.variant else []))

    def agrees_with(self, other: "Point") -> bool:
        """Whether both have as many zeros, within a percentage point of the targets."""
        return abs(self.sparsity - other.sparsity) <= _NEAR + 1e-9

    def values_of(self, suite: str) -> dict[str, Value]:
        """The measures of the suite with this key; empty if it was not measured."""
        return _values(self.results, suite)

    def dense_values_of(self, suite: str) -> dict[str, Value]:
        """Those of the dense model, if the point holds them."""
        return _values(self.dense, suite)


def _values(results: Iterable[SuiteResult], suite: str) -> dict[str, Value]:
    return next((result.values for result in results if result.key == suite), {})


def scope_of(recipe: Recipe) -> str:
    """The targets of a recipe in words: "mlp", "mlp without lm_head"."""
    scope = recipe.targets
    targets, ignored = (
        value if isinstance(value, str) else ", ".join(value)
        for value in (scope.layers, scope.ignore or "")
    )
    tower = {"language": "", "vision": " (vision tower)", "all": " (all towers)"}[scope.tower]
    return printable(targets + (f" without {ignored}" if ignored else "") + tower)


def read_inputs(paths: list[Path]) -> tuple[list[Point], list[Bench]]:
    """Read the points of some files and folders, in the order given, each once; and the outputs of
    `bench` among them.

    Args:
        paths: output folders of prune or sweep, their report files, outputs of bench, results files
            of evaluate.

    Raises:
        UserError: there is no path, or one is none of these.
    """
    if not paths:
        raise UserError("There is nothing to report; give run folders, a sweep, or results files.")
    others, benches = split_benches([Path(path) for path in paths])
    points: dict[str, Point] = {}
    for path in others:
        for point in _read(path):
            points.setdefault(point.id, point)
    _identify(points.values())
    return _with_results(list(points.values())), benches


def _read(path: Path) -> Iterator[Point]:
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
        for report in read_sweep(path).points:
            yield run_point(report, path.parent / "points" / report.point.name)
        return
    values = read_json(path, strict=True, limit=REPORT_LIMIT)
    record_type = next(
        (
            record_type
            for record_type in (Results, RunReport)
            if version_of(values, record_type) is not None
        ),
        None,
    )
    if record_type is None:
        raise UserError(f"{path}: this is not {_ACCEPTED}; give one of these.")
    record = record_of(values, record_type, str(path))
    if isinstance(record, Results):
        yield results_point(record, path)
    elif isinstance(record, RunReport):
        yield run_point(record, path.parent if path.name == REPORT_NAME else path)


def run_point(report: RunReport, path: Path) -> Point:
    """The point of a run or of a sweep, at its path."""
    models = results_of_report(report)
    results = [suite_result_of(model) for model in models if model.pruned is not None]
    dense = [suite_result_of(model) for model in models if model.pruned is None]
    if report.check is not None:
        results.append(_check_result(report.check, report.check.pruned))
        dense.append(_check_result(report.check, report.check.dense))
    calibration = report.calibration
    propagated = calibration is not None and calibration.propagate == "pruned"
    return replace(
        _point(path, path.name, pruned_by(report), propagated),
        identity=report.source.key,
        sparsity_of_all=report.targets.sparsity_of_all_parameters,
        results=tuple(results),
        dense=tuple(dense),
        facts=_facts(report),
    )


def results_point(results: Results, path: Path) -> Point:
    """The point of a results file, at its path."""
    result = suite_result_of(results)
    if results.pruned is not None:
        return replace(_point(path, path.stem, results.pruned), results=(result,))
    model = printable(results.model)
    identity = results.made_by.model.identity or results.model
    return Point(str(path.resolve()), printable(path.stem), model, identity, dense=(result,))


def _point(path: Path, name: str, pruned: PrunedBy, propagated: bool = False) -> Point:
    """A pruned model at its path, without results."""
    variant = pruned.recipe.variant
    variant += ["propagate pruned"] * propagated + ["trained since"] * pruned.trained
    return Point(
        id=str(path.resolve()),
        name=printable(name),
        model=printable(pruned.of),
        identity=pruned.of,
        recipe=pruned.recipe,
        variant=printable(", ".join(variant)),
        sparsity=pruned.sparsity_of_targets,
        signature=json.dumps(pruned.as_dict(), sort_keys=True),
    )


def _check_result(check: CheckRecord, record: PerplexityRecord) -> SuiteResult:
    """One of a run's two measures on the held-out text, as the result of a suite. Runs whose dense
    measures are equal read the same text.
    """
    dense = check.dense
    key = {"held-out text": [dense.blocks, dense.block_length, dense.value]}
    name = f"held-out text, dense {dense.value:.4g}"  # other texts have other numbers
    return SuiteResult(name, json.dumps(key), values_of(Measures(perplexity=record)))


def _facts(report: RunReport) -> dict[str, str]:
    """The head of a report: the model, the targets and the texts."""
    targets = report.targets
    facts = {"model": shown_name(report.source.model), "revision": report.source.revision}
    if targets.parameters is not None:
        facts["parameters"] = f"{targets.parameters:,}"
    if targets.weights is not None:
        share = targets.share_of_all_parameters
        of_all = f", {100 * share:.1f} % of all parameters" if share is not None else ""
        facts["targets"] = f"{scope_of(report.recipe)}: {targets.weights:,} weights{of_all}"
    texts = report.calibration.all_texts if report.calibration is not None else []
    facts["calibration"] = "; ".join(
        f"{text.name}{text.bos_note}, {text.samples} x {text.seqlen} tokens" for text in texts
    )
    if report.healing is not None:
        facts["healed"] = healing_lines(report)[0].removeprefix("healed: ")
    return {name: fact for name, fact in facts.items() if fact}


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


def _identify(points: Iterable[Point]) -> None:
    """Give points that have only their model's name its identity, if exactly one model of that
    name is given.
    """
    known: dict[str, set[str]] = {}
    for point in points:
        known.setdefault(point.model, set()).update({point.identity} - {point.model})
    for point in points:
        if point.identity == point.model and len(known[point.model]) == 1:
            (point.identity,) = known[point.model]


def _with_results(points: list[Point]) -> list[Point]:
    """Join results files with the run of the same checkpoint, if that is given too: they add a
    suite to the run.

    Runs with equal signatures may differ in their calibration, which results do not record. Their
    point then stays alone.
    """
    left = list(points)
    for point in points:
        runs = [run for run in points if run.facts and run.signature == point.signature]
        if point.facts or point.recipe is _DENSE or len(runs) != 1:
            continue
        runs[0].results += tuple(
            result for result in point.results if not runs[0].values_of(result.key)
        )
        left.remove(point)
    return left


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
class Study:
    """The points of one model and one choice of targets. Only points of one study may share a
    table or a curve.

    Attributes:
        title: name of the model; unique in the report.
        model: as the runs name it.
        points: by their zeros.
        suites: the suites that they were evaluated on.
        against: the label of the points that the others are compared with; empty: there are none.
    """

    title: str
    model: str
    points: list[Point]
    suites: list[StudySuite]
    against: str = ""

    @classmethod
    def of(
        cls, title: str, model: str, points: list[Point], dense: list[Point], against: str | None
    ) -> "Study":
        """The study of some points.

        Args:
            points: the first method is the baseline, if another has as many zeros.
            dense: results of the dense model.
            against: method or name of the baseline; of no point: as None.
        """
        ours = [point for point in points if not point.zeros]
        bases = [point for point in ours if against == point.recipe.method]
        bases += [point for point in ours if against == point.name]
        bases += [p for p in ours if any(q.label != p.label and q.agrees_with(p) for q in ours)]
        label = bases[0].label if bases else ""
        by_zeros = sorted(points, key=lambda point: point.sparsity)
        return cls(title, model, by_zeros, _suites(points, dense), label)

    def base_of(self, point: Point) -> Point | None:
        """The point of the baseline whose zeros are next to those of a point; None if none agree
        with them, and of the baseline itself.
        """
        bases = [
            base
            for base in self.points
            if base.label == self.against and not base.zeros and base.agrees_with(point)
        ]
        if point.zeros or point.label == self.against:
            return None
        return min(bases, key=lambda base: abs(base.sparsity - point.sparsity), default=None)

    @property
    def dense(self) -> Point:
        """The dense model."""
        results = tuple(SuiteResult(suite.name, suite.key, suite.dense) for suite in self.suites)
        of_all = None if all(each.sparsity_of_all is None for each in self.points) else 0.0
        return Point("dense", "dense", self.model, sparsity_of_all=of_all, results=results)


def studies(points: Iterable[Point], against: str | None = None) -> list[Study]:
    """Sort points by model and targets, in the order given. Results of a dense model belong to
    all of its studies.

    Args:
        against: method or name of the points that the others are compared with; None: the first.

    Raises:
        UserError: no point is of this method or name.
    """
    points = list(points)
    pruned = [point for point in points if point.recipe is not _DENSE]
    names = dict.fromkeys(name for each in pruned for name in (each.recipe.method, each.name))
    if against is not None and against not in names:
        raise UserError(
            f"--against {against}: no point is of this method or name; there are "
            f"{shorten_list(list(names), 6)}."
        )
    models: dict[str, list[Point]] = {}
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
        scopes: dict[str, list[Point]] = {}
        for point in points_of_model:
            if point.recipe is not _DENSE:
                scopes.setdefault(scope_of(point.recipe), []).append(point)
        for scope, members in (scopes or {"": []}).items():
            name = f"{title}, {scope}" if len(scopes) > 1 else title
            all_studies.append(Study.of(name, model, _named_apart(members), dense, against))
    return all_studies


def short_model_name(model: str) -> str:
    """The last part of a path or Hub id; the last two if the last is just "model"."""
    names = [name for name in PurePath(model).parts if name not in ("/", "..")]
    return "/".join(names[-2:] if names[-1:] == ["model"] else names[-1:]) or model


def _named_apart(points: list[Point]) -> list[Point]:
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


def _suites(points: list[Point], alone: list[Point]) -> list[StudySuite]:
    dense = [result for point in [*points, *alone] for result in point.dense]
    results = [result for point in points for result in point.results] + dense
    suites = []
    for key in dict.fromkeys(result.key for result in results):
        first = next((result for result in dense if result.key == key), None)
        members = [result for result in [*dense, *results] if result.key == key]
        names = dict.fromkeys(name for result in members for name in result.values)
        of_dense = first.values if first else {}
        suites.append(StudySuite(key, members[0].suite, of_dense, tuple(names)))
    return suites


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
    """Points of one method, by ascending sparsity.

    Attributes:
        point: the first of them.
        dots: of all.
    """

    point: Point
    dots: tuple[Dot, ...]


def curves(study: Study, suite: StudySuite, measure: str) -> list[Curve]:
    """One measure of a suite along every method: EMP, uniform rows, and uniform rows within each
    matrix.
    """
    methods: dict[str, list[tuple[Point, Dot]]] = {}
    for point in study.points:
        value = point.values_of(suite.key).get(measure)
        if value is not None and math.isfinite(value.value):
            error = _error_of(measure, value, suite.dense.get(measure))
            dot = Dot(point.sparsity, value.value, error)
            methods.setdefault(point.label, []).append((point, dot))
    return [Curve(members[0][0], tuple(dot for _, dot in members)) for members in methods.values()]


def _error_of(measure: str, value: Value, dense: Value | None) -> float | None:
    """The standard error of a point of a curve, in the measure's unit; None if it is unknown."""
    if in_percent(measure) or dense is None:
        return value.stderr
    change = change_of(measure, value, dense)
    return None if change.stderr is None else change.stderr * dense.value / 100
