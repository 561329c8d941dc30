"""Points sorted into studies, one for each model and choice of targets, each with a baseline.

A point is a pruned model with its measurements, read from a run, a sweep or a results file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, count_of, printable, shorten_list
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME, shown_name
from emp_llm.common.tables import Rows, markdown_table, markdown_text, percent_cell, table
from emp_llm.evaluation.comparison import (
    UNPAIRED,
    Change,
    Value,
    advice,
    change_of,
    change_text,
    in_percent,
    main_measures,
    value_cell,
    values_of,
)
from emp_llm.evaluation.results import results_of_report
from emp_llm.options.recipe import Match, MatchBy, Recipe
from emp_llm.records.base import record_of, version_of
from emp_llm.records.evaluation import Bench, CheckRecord, Measures, PerplexityRecord
from emp_llm.records.run_report import (
    REPORT_LIMIT,
    PrunedBy,
    Results,
    RunReport,
    Sweep,
    pruned_by,
    read_sweep,
)
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
            words = [name if self.recipe.structure else f"{name}, uniform rows"]
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


# The table of points: a row for each model, for the terminal, as Markdown and as CSV. `evaluate`
# shows it with a column for each model.


Columns = Sequence[tuple[StudySuite, str]]
_UNPAIRED = (
    f"{UNPAIRED} unpaired standard error, usually too large: the results do not hold both models' "
    "answers to the same examples"
)
_PARTIAL = "* partial: only some of the examples or of the text"
_NOT_EVALUATED = (
    "Not evaluated. The option --evaluate of prune, or the command evaluate, measures what it cost"
)
_WITHIN = "within 1 % of the targets"
_NONE = (
    f"{_WITHIN}, so there are no differences; prune --match RUN, sweep --matched-baselines or "
    "--emp-sparsities adds some"
)


def all_columns(study: Study) -> Columns:
    """Every measure of every suite of a study."""
    return [(suite, measure) for suite in study.suites for measure in suite.measures]


def main_columns(study: Study) -> Columns:
    """The measures to show of many points."""
    return [(suite, measure) for suite in study.suites for measure in main_measures(suite.measures)]


@dataclass(frozen=True)
class Cell:
    """A measure of a point; None for what is not known.

    Attributes:
        value: of the point.
        change: from the dense model.
        difference: from the baseline with as many zeros.
    """

    measure: str
    value: Value | None
    change: Change | None
    difference: Change | None


def cells_of(study: Study, point: Point, columns: Columns) -> list[Cell]:
    """A cell for each column."""
    base = study.base_of(point)
    cells = []
    for suite, measure in columns:
        value = point.values_of(suite.key).get(measure)
        dense = point.dense_values_of(suite.key) or suite.dense
        other = {} if base is None else base.values_of(suite.key)
        change, difference = (
            None
            if value is None or measure not in values or values[measure] is value
            else change_of(measure, value, values[measure])
            for values in (dense, other)
        )
        cells.append(Cell(measure, value, change, difference))
    return cells


def _change_cell(measure: str, change: Change | None, unknown: str = "") -> str:
    return unknown if change is None else change_text(measure, change)


def point_rows(study: Study, columns: Columns, methods: bool = True) -> tuple[Rows, list[str]]:
    """A row for each point, by its zeros: value, change from the dense model, and difference from
    the baseline of each measure; and the notes of the table. Columns without content are left out.

    Args:
        columns: the measures.
        methods: whether to name the methods; the names of a sweep's points do.
    """
    rows = [["point", "method", "β", "removed %", "of all %"]]
    one = study.suites[0].name if len(study.suites) == 1 else ""
    for suite, measure in columns:
        of = "" if one else f" ({suite.name})"
        rows[0] += [f"{measure}{of}", "change", f"against {study.against}"]
    every: list[Cell] = []
    dense = [study.dense] if any(suite.dense for suite in study.suites) else []
    for point in [*dense, *study.points]:
        about = methods and not point.zeros and point.id != "dense"
        beta = point.recipe.counts.in_force if about else None
        row = [point.name, point.label if about else "", "" if beta is None else f"{beta:g}"]
        row.append(point.zeros or percent_cell(point.sparsity))
        row.append("" if point.sparsity_of_all is None else percent_cell(point.sparsity_of_all))
        cells = cells_of(study, point, columns)
        every += cells
        for cell in cells:
            row.append(value_cell(cell.measure, cell.value))
            row += [_change_cell(cell.measure, each) for each in (cell.change, cell.difference)]
        rows.append(row)
    shown = [place for place, cells in enumerate(zip(*rows[1:], strict=True)) if any(cells)]
    notes = [] if study.suites else [_NOT_EVALUATED]
    suite_of = f"suite {one}; " if one else ""
    of_all = ", and of all parameters" * (rows[0].index("of all %") in shown)
    notes.append(f"{suite_of}removed: percent of the targets{of_all}")
    notes += _cell_notes(every)
    labels = {point.label for point in study.points if not point.zeros}
    if any(cell.difference for cell in every):
        whose = f"against {study.against}: the difference from its point with the nearest zeros"
        notes.append(f"{whose}, {_WITHIN}")
    elif len(labels) > 1 and every:
        whose = f"no other method has as many zeros as {study.against}"
        notes.append(f"{whose if study.against else 'no two methods have as many zeros'}, {_NONE}")
    return [[row[place] for place in shown] for row in rows], notes


def _cell_notes(cells: Sequence[Cell]) -> list[str]:
    """What the numbers of a table mean, and their marks and errors: of those that it holds."""
    notes = []
    known = [(cell.measure, cell.value) for cell in cells if cell.value is not None]
    both = [change for cell in cells for change in (cell.change, cell.difference)]
    changes = [change for change in both if change is not None]
    if any(value.partial for _, value in known):
        notes.append(_PARTIAL)
    if any(in_percent(name) for name, _ in known):
        notes.append("accuracies in percent ± standard error; their changes in points")
    if any(change.stderr is not None and change.paired for change in changes):
        notes.append(
            "changes ± paired standard error: both models judged on the same examples and "
            "blocks of text"
        )
    if not all(change.paired for change in changes):
        notes.append(_UNPAIRED)
    return notes


def points_text(study: Study, notes: Sequence[str] = (), methods: bool = True) -> str:
    """The table of a study for a terminal, its main measures only."""
    rows, own = point_rows(study, main_columns(study), methods)
    return "\n".join([table(rows), *own, *notes])


def points_markdown(rows: Rows, notes: Sequence[str]) -> list[str]:
    """A table and its notes as paragraphs of Markdown."""
    return [markdown_table(rows), *map(markdown_text, notes)]


# points.csv, with all digits.
CsvRow = list[object]
CSV_HEAD: CsvRow = [
    *("study", "suite", "point", "method", "beta", "order", "match"),
    *("sparsity_of_targets", "sparsity_of_all_parameters", "measure", "value", "stderr", "partial"),
    *("change", "change_stderr", "change_paired"),
    *("against", "difference", "difference_stderr", "difference_paired"),
]


def csv_rows(study: Study) -> Iterator[CsvRow]:
    """A line for each measure of every point and of the dense model. Changes of accuracies are in
    points, all others in percent.
    """
    columns = all_columns(study)
    for point in [study.dense, *study.points]:
        counts = point.recipe.counts
        about: CsvRow = [point.recipe.method, counts.in_force, counts.order, point.match]
        if point.id == "dense":
            about = ["dense", None, None, None]
        base = study.base_of(point)
        for (suite, _), cell in zip(columns, cells_of(study, point, columns), strict=True):
            value = cell.value
            if value is None:
                continue
            line: CsvRow = [study.title, suite.name, point.name, *about]
            line += [point.sparsity, point.sparsity_of_all, cell.measure]
            line += [value.value, value.stderr, value.partial]
            line += _numbers(cell.change)
            line.append(base.name if base is not None and cell.difference else None)
            yield line + _numbers(cell.difference)


def _numbers(change: Change | None) -> CsvRow:
    if change is None or math.isnan(change.value):
        return [None, None, None]
    return [change.value, change.stderr, None if change.stderr is None else change.paired]


# The tables of commands.


def sweep_table(record: Sweep, against: str | None = None) -> str:
    """The dense model, then all points by their zeros; `against` names the baseline, default the
    first.
    """
    points = [run_point(report, Path(report.point.name)) for report in record.points]
    same = [
        f"{each.point.name}: the same masks as {each.measures.same_masks_as}, so the same values"
        for each in record.points
        if each.measures.same_masks_as is not None
    ]
    found = studies(points, against)
    return "\n".join(points_text(study, same, methods=False) for study in found)


def evaluation_table(report: RunReport, form: str = "terminal") -> str:
    """The dense and the pruned model side by side; empty if they were not evaluated."""
    models = results_of_report(report)
    return compare(models, form, ["dense", "pruned"]) if len(models) == 2 else ""


def compare(models: list[Results], form: str = "terminal", labels: list[str] | None = None) -> str:
    """The results of one suite as a table with a column for each model, and footnotes. The first is
    the baseline; the others show their change from it.

    Args:
        models: the baseline first.
        form: terminal or markdown.
        labels: column headings; default: the models' names without owner or path.
    """
    labels = labels or _labels(models)
    measured = [values_of(model.measures) for model in models]
    names = dict.fromkeys(name for values in measured for name in values)
    suite = StudySuite("", "", measured[0], tuple(names))
    points = [
        Point(label, label, results=(SuiteResult("", "", values),))
        for label, values in zip(labels, measured, strict=True)
    ]
    study = Study("", "", points, [suite])
    columns = all_columns(study)
    by_model = [cells_of(study, point, columns) for point in points]
    rows = [["", labels[0]]]
    for label in labels[1:]:
        rows[0] += [label, "change"]
    for first, *others in zip(*by_model, strict=True):
        row = [first.measure, value_cell(first.measure, first.value)]
        for cell in others:
            row.append(value_cell(cell.measure, cell.value))
            row.append(_change_cell(cell.measure, cell.change, "-"))
        rows.append(row)
    noted = [cell for cells in by_model for cell in cells]
    notes = _model_notes(models, labels, _cell_notes(noted))
    form_table, gap = (markdown_table, "\n\n") if form == "markdown" else (table, "\n")
    return gap.join([form_table(rows), *notes])


def _model_notes(models: list[Results], labels: list[str], of_cells: list[str]) -> list[str]:
    """The zeros of models that differ in them, the suite, and what would cost less."""
    notes = []
    removed = {
        label: model.pruned.sparsity_of_targets
        for label, model in zip(labels, models, strict=True)
        if model.pruned
    }
    if removed and max(removed.values()) - min(removed.values()) > 0.01:
        shares = ", ".join(f"{label} {percent_cell(share)} %" for label, share in removed.items())
        notes.append(f"the models differ in their zeros: {shares} of the targets")
    first = models[0].measures
    text = models[0].made_by.text
    bos = "" if text is None else text.bos_note
    extent = (
        [f"{count_of(first.perplexity.tokens, 'token')}{bos}"]
        if first.perplexity is not None
        else []
    )
    if first.tasks:
        counts = [count for record in first.tasks.values() for count in record.n_samples.values()]
        extent.append(f"{count_of(sum(count.effective for count in counts), 'example')} by lm-eval")
    notes += [f"suite {models[0].suite}: {', '.join(extent)}", *of_cells]
    dense, *others = (
        None if model.perplexity is None else model.perplexity.perplexity for model in models
    )
    for model, label, after in zip(models[1:], labels[1:], others, strict=True):
        if dense and after and models[0].pruned is None and model.pruned is not None:
            notes += [f"{label}: {line}" for line in advice(model.pruned.recipe, dense, after)]
    return notes


def _labels(models: list[Results]) -> list[str]:
    """The models' names with their quantisation: the shortest ends of their paths that differ; else
    with the revision on the Hub.
    """
    bits = [
        f" {model.made_by.quantization.bits}" if model.made_by.quantization else ""
        for model in models
    ]
    at = [f"@{model.revision[:8]}" if model.revision else "" for model in models]

    def ends(parts: int) -> list[str]:
        return [str(PurePath(*PurePath(model.model).parts[-parts:])) for model in models]

    for parts in range(1, max(len(PurePath(model.model).parts) for model in models) + 1):
        labels = [end + suffix for end, suffix in zip(ends(parts), bits, strict=True)]
        if len(set(labels)) == len(labels):
            return labels
    return [end + mark + suffix for end, mark, suffix in zip(ends(2), at, bits, strict=True)]
