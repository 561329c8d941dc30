"""Points of a report: pruned models with their measurements, read from runs, sweeps, measures and results files."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, get_args

import msgspec
import numpy as np

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, printable
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME
from emp_llm.evaluation.results import EvaluatedModel, model_of_results, models_of_report
from emp_llm.evaluation.values import Value, values_of
from emp_llm.options.recipe import MatchBy, Recipe
from emp_llm.pruning.counts import REPORT_LIMIT
from emp_llm.pruning.outcome import ALL_KEPT
from emp_llm.records.base import record_of, version_of
from emp_llm.records.measure import Measure
from emp_llm.records.results import Results, pruned_by
from emp_llm.records.run_report import FitRecord, MatrixRecord, Quartiles, RunReport, StructureRecord, TargetsRecord
from emp_llm.records.source import CalibrationRecord, ModelSource
from emp_llm.records.sweep import Sweep

_GRID = np.linspace(0, 1, 201)
_QUARTERS = np.array([0, 0.25, 0.5, 0.75, 1])


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite on one model.

    Attributes:
        suite: its name.
        key: text, tasks, limit, dtype and quantisation as JSON; results with equal keys are comparable.
        values: measure -> value, from `evaluation.values.values_of`.
    """

    suite: str
    key: str
    values: dict[str, Value]


@dataclass(frozen=True)
class LayerFit:
    """The fit of a layer to the calibration text; `role` as in `MatrixRecord`."""

    name: str
    role: str
    fit: FitRecord


@dataclass(frozen=True)
class MeasuredPoint:
    """A pruned model, or a model that was only measured or evaluated.

    Attributes:
        id: the path that it was read from; unique.
        name: of its folder or file, for display.
        model: the dense model's name as the user gave it; identity: of its weights, or the name if that is unknown.
        recipe: of the pruned model; None for the dense model itself.
        variant: other differences from points of the same method, in words; usually empty.
        match, baseline_of: for a uniform baseline, the total or the matrices that it matches, and the id of the EMP point.
        sparsity, sparsity_of_all: of the targets, and of all parameters; None if unknown.
        pruned: whether it is a pruned model; the point of a measure is not, and has matrices too.
        matrices: of the targets, each expert alone; targets: counts over all of them.
        fits: of the layers, by a refit, SparseGPT or ADMM.
        structure: the removed heads and neurons; None if weights were pruned.
        results: one for each suite; dense: those of the dense model in the same run.
        signature: recipe and sparsity as JSON; equal in a run's report and in results of its checkpoint.
        masks: a hash of the masks, in sweeps; else empty.
        facts: name -> text for the head of the report.
    """

    id: str
    name: str
    model: str
    identity: str
    recipe: Recipe | None
    variant: str = ""
    match: MatchBy | None = None
    baseline_of: str | None = None
    sparsity: float | None = None
    sparsity_of_all: float | None = None
    pruned: bool = True
    matrices: tuple[MatrixRecord, ...] = ()
    targets: TargetsRecord | None = None
    fits: tuple[LayerFit, ...] = ()
    structure: StructureRecord | None = None
    results: tuple[SuiteResult, ...] = ()
    dense: tuple[SuiteResult, ...] = ()
    signature: str = ""
    masks: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def adaptive(self) -> bool:
        return self.recipe is not None and self.recipe.adaptive

    @property
    def method(self) -> str | None:
        return None if self.recipe is None else printable(self.recipe.method)

    @property
    def criterion(self) -> str:
        return (self.method or "").removeprefix("emp-")

    @property
    def beta(self) -> float | None:
        """Of the effective number; None for uniform methods."""
        return self.recipe.beta if self.recipe is not None and self.adaptive else None

    @property
    def order(self) -> float | None:
        """Of the effective number; None for uniform methods."""
        return self.recipe.order if self.recipe is not None and self.adaptive else None

    @property
    def scope(self) -> str:
        """The targets in words: "mlp", "mlp without lm_head"."""
        return "" if self.recipe is None else _scope(self.recipe)

    def result_of(self, key: str) -> SuiteResult | None:
        """The result of the suite with this key; None if it was not measured."""
        return next((result for result in self.results if result.key == key), None)


def pooled(spreads: Sequence[Quartiles], weights: Sequence[float]) -> Quartiles:
    """The spread of several populations together, from the spread of each.

    min and max are exact. Quartiles are those of the mixture if each population is uniform between its own quartiles.

    Args:
        spreads: of the populations, one or more.
        weights: sizes of the populations.
    """
    if len(spreads) == 1:
        return spreads[0]
    values = np.concatenate([np.interp(_GRID, _QUARTERS, spread.values) for spread in spreads])
    share = np.repeat(np.asarray(weights, dtype=float), len(_GRID))
    order = np.argsort(values, kind="stable")
    values, share = values[order], share[order]
    position = (np.cumsum(share) - share / 2) / share.sum()
    q1, median, q3 = (float(value) for value in np.interp([0.25, 0.5, 0.75], position, values))
    return Quartiles(min=float(values[0]), q1=q1, median=median, q3=q3, max=float(values[-1]))


def by_role_and_block(matrices: Sequence[MatrixRecord]) -> dict[tuple[str, int | None], MatrixRecord]:
    """(role, block) -> matrix. The matrices of a mixture's experts, which share both, are pooled."""
    groups: dict[tuple[str, int | None], list[MatrixRecord]] = {}
    for matrix in matrices:
        groups.setdefault((matrix.role, matrix.block), []).append(matrix)
    return {key: members[0] if len(members) == 1 else _pooled_matrices(members) for key, members in groups.items()}


def _pooled_matrices(members: list[MatrixRecord]) -> MatrixRecord:
    rows = [float(member.rows) for member in members]

    def mean(name: str) -> float | None:
        values = [getattr(member, name) for member in members]
        return None if None in values else sum(v * r for v, r in zip(values, rows, strict=True)) / sum(rows)

    spreads = [member.s_eff for member in members if member.s_eff is not None]
    margins = [member.least_margin_over_bound for member in members if member.least_margin_over_bound is not None]
    return msgspec.structs.replace(
        members[0],
        rows=sum(member.rows for member in members),
        kept=sum(member.kept for member in members),
        kept_fraction=pooled([member.kept_fraction for member in members], rows),
        s_eff=pooled(spreads, rows) if len(spreads) == len(members) else None,
        least_margin_over_bound=min(margins) if len(margins) == len(members) else None,
        **{name: mean(name) for name in ("n_eff_mean", "s_eff_mean", "s_eff_bound_mean")},
    )


_ACCEPTED = "the output of prune, sweep, measure or bench, or a results file of evaluate"


def read_points(paths: list[Path]) -> list[MeasuredPoint]:
    """Read all points of some files and folders, in the order given, each once.

    Args:
        paths: output folders of prune or sweep, their report files, outputs of measure, results files of evaluate.

    Raises:
        UserError: a path is none of these, or a value in it is impossible.
    """
    points: dict[str, MeasuredPoint] = {}
    for path in paths:
        for point in _read(Path(path)):
            points.setdefault(point.id, point)
    return _with_results(list(points.values()))


def _read(path: Path) -> Iterator[MeasuredPoint]:
    if path.is_dir():
        found = next((path / name for name in (SWEEP_NAME, REPORT_NAME) if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: it holds neither {SWEEP_NAME} nor {REPORT_NAME}; give {_ACCEPTED}.")
        path = found
    elif not path.is_file():
        raise UserError(f"{path}: no such file or folder; give {_ACCEPTED}.")
    values, where = read_json(path, limit=REPORT_LIMIT), str(path)
    kind = next((kind for kind in (Sweep, Measure, Results, RunReport) if version_of(values, kind) is not None), None)
    if kind is None:
        raise UserError(f"{path}: this is not {_ACCEPTED}; give one of these.")
    if kind is Sweep:
        yield from _sweep(record_of(values, Sweep, where), path.parent, where)
    elif kind is Measure:
        yield from _measures(record_of(values, Measure, where), path)
    elif kind is Results:
        yield _result(record_of(values, Results, where), path)
    else:
        report = record_of(values, RunReport, where)
        yield _run(report, path.parent if path.name == REPORT_NAME else path, where)


def _run(report: RunReport, folder: Path, where: str, name: str | None = None, **more: Any) -> MeasuredPoint:
    models = models_of_report(report)
    dense = tuple(suite_result_of(model, where) for model in models if model.pruned is None)
    values: dict[str, Any] = {
        "id": str(folder.resolve()),
        "name": printable(name or folder.resolve().name),
        **origin_of(report.source),
        "recipe": report.recipe,
        "variant": _variant(report.recipe, report.calibration),
        "match": report.recipe.match_by if report.recipe.match else None,
        "sparsity": report.targets.sparsity_of_targets,
        "sparsity_of_all": report.targets.sparsity_of_all_parameters,
        "matrices": matrices_of(report.matrices, where),
        "targets": report.targets,
        "fits": fits_of(report, where),
        "structure": report.structure,
        "results": tuple(suite_result_of(model, where) for model in models if model.pruned is not None),
        "dense": dense,
        "signature": json.dumps(pruned_by(report).as_dict(), sort_keys=True),
        "masks": _masks_key(report.masks, folder),
        "facts": facts_of(report.source, report.recipe, report.calibration, report.targets),
    }
    return MeasuredPoint(**values | more)


def _masks_key(masks: str | None, folder: Path) -> str:
    """A key that is equal for equal masks only. The hash in a report leaves out the norms, so it is valid in its sweep only."""
    if masks is None or masks == ALL_KEPT:
        return masks or ""
    return f"{folder.resolve().parent} {masks}"


def _sweep(sweep: Sweep, folder: Path, where: str) -> Iterator[MeasuredPoint]:
    """The points of a sweep: each from its own report, its baselines from sweep.json."""
    base = folder.resolve() / "points"
    names = [entry.name for entry in sweep.points]
    for number, entry in enumerate(sweep.points):
        place = f"{where}: points[{number}]"
        if PurePath(entry.name).name != entry.name:
            raise UserError(f"{place}: name must be the name of a folder in points/, got {printable(entry.name, 40)!r}.")
        if entry.match is not None and entry.match not in get_args(MatchBy):
            raise UserError(f"{place}: match must be null or one of {', '.join(get_args(MatchBy))}.")
        if entry.baseline_of is not None and entry.baseline_of not in names:
            raise UserError(f"{place}: baseline_of must be null or the name of another point.")
        path = folder / "points" / entry.name / REPORT_NAME
        if not path.is_file():
            raise UserError(f"{path}: the report of this point of the sweep is missing; run the sweep's command again.")
        report = record_of(read_json(path, limit=REPORT_LIMIT), RunReport, str(path))
        of = None if entry.baseline_of is None else str(base / entry.baseline_of)
        yield _run(report, path.parent, str(path), entry.name, match=entry.match, baseline_of=of)


def _measures(measure: Measure, path: Path) -> Iterator[MeasuredPoint]:
    for number, entry in enumerate(measure.measures):
        where = f"{path}: measures[{number}]"
        recipe = measure.recipe.with_method(
            f"emp-{entry.criterion}", group="row", order=entry.order, score=entry.score, count_by=entry.count_by
        )
        values: dict[str, Any] = {
            "id": f"{path.resolve()}#{number}",
            "name": printable(f"{path.stem} {entry.criterion} {entry.order:g}"),
            **origin_of(measure.source),
            "recipe": recipe,
            "variant": _variant(recipe, measure.calibration),
            "pruned": False,
            "matrices": matrices_of(entry.matrices, where),
            "targets": entry.targets,
            "facts": facts_of(measure.source, recipe, measure.calibration, entry.targets),
        }
        yield MeasuredPoint(**values)


def _result(results: Results, path: Path) -> MeasuredPoint:
    where = str(path)
    common: dict[str, Any] = {
        "id": str(path.resolve()),
        "name": printable(path.stem),
        "results": (suite_result_of(model_of_results(results), where),),
    }
    pruned = results.pruned
    if pruned is None:
        made = results.made_by.model
        source = ModelSource(model=results.model, revision=results.revision, identity=made.identity)
        return MeasuredPoint(**common, **origin_of(source), recipe=None)
    return MeasuredPoint(
        **common,
        model=printable(pruned.of),
        identity=pruned.of,
        recipe=pruned.recipe,
        variant=_variant(pruned.recipe, None),
        match=pruned.recipe.match_by if pruned.recipe.match else None,
        sparsity=pruned.sparsity_of_targets,
        signature=json.dumps(pruned.as_dict(), sort_keys=True),
        facts={"model": printable(pruned.of)},
    )


def _with_results(points: list[MeasuredPoint]) -> list[MeasuredPoint]:
    """Join results files with the run of the same checkpoint, if that is given too: they add a suite to the run.

    Runs with equal signatures may differ in their calibration, which results do not record. Their point then stays alone.
    """
    runs: dict[str, list[int]] = {}
    for number, point in enumerate(points):
        if point.matrices and point.pruned:
            runs.setdefault(point.signature, []).append(number)
    joined: dict[int, MeasuredPoint] = dict(enumerate(points))
    for number, point in enumerate(points):
        alike = runs.get(point.signature, [])
        if (
            point.matrices
            or point.recipe is None
            or not alike
            or any(points[other].matrices != points[alike[0]].matrices for other in alike)
        ):
            continue
        run = alike[-1]
        known = {result.key for result in joined[run].results}
        added = tuple(result for result in point.results if result.key not in known)
        joined[run] = replace(joined[run], results=joined[run].results + added)
        del joined[number]
    return list(joined.values())


def suite_result_of(model: EvaluatedModel, where: str) -> SuiteResult:
    """The result of a suite on a model; UserError, beginning with `where`, for impossible values."""
    made_by, quantization = model.made_by, model.made_by.quantization
    fields = made_by.as_dict()
    key = {name: fields.get(name) for name in ("text", "tasks", "limit", "quantization")}
    key["dtype"] = made_by.dtype or "auto"
    values = values_of(model.measures)
    for name, value in values.items():
        if math.isnan(value.value):
            raise UserError(f"{where}: {name} must be a number.")
    base, *changes = model.suite.split(",")
    marks = [PurePath(base).stem or base, *changes, *([quantization.bits] if quantization else [])]
    values = {printable(measure): value for measure, value in values.items()}
    return SuiteResult(printable(", ".join(marks)), json.dumps(key, sort_keys=True), values)


def matrices_of(entries: dict[str, MatrixRecord], where: str) -> tuple[MatrixRecord, ...]:
    """The matrices of a record; UserError, beginning with `where`, for impossible values."""
    for name, entry in entries.items():
        _check_matrix(entry, f"{where}: matrices.{name}")
    return tuple(msgspec.structs.replace(entry, role=printable(entry.role)) for entry in entries.values())


def fits_of(report: RunReport, where: str) -> tuple[LayerFit, ...]:
    """The fits of a report's layers; UserError, beginning with `where`, for impossible values."""
    fits = []
    for name, fit in report.fits.items():
        for key, value in msgspec.structs.asdict(fit).items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{where}: fits.{printable(name)}: {key} must be a finite number of at least 0.")
        entry = report.matrices.get(name)
        fits.append(LayerFit(printable(name), printable(name if entry is None else entry.role), fit))
    return tuple(fits)


def _check_matrix(entry: MatrixRecord, where: str) -> None:
    for name, value in msgspec.structs.asdict(entry).items():
        numbers = value.values if isinstance(value, Quartiles) else [value] if isinstance(value, float) else []
        if not all(map(math.isfinite, numbers)):
            raise UserError(f"{where}: {name} must be a finite number.")
    size, mean = entry.group_size, entry.n_eff_mean
    if size is not None and mean is not None and mean > size * (1 + 1e-9):
        raise UserError(f"{where}: n_eff_mean must be between 0 and group_size, got {mean:g}.")
    _check_spread(entry.kept_fraction, f"{where}: kept_fraction")
    if entry.s_eff is not None:
        _check_spread(entry.s_eff, f"{where}: s_eff")


def _check_spread(quartiles: Quartiles, where: str) -> None:
    """Raise UserError if the quartiles of a share are not in order and between 0 and 1."""
    if list(quartiles.values) != sorted(quartiles.values) or not -1e-9 <= quartiles.min <= quartiles.max <= 1 + 1e-9:
        raise UserError(f"{where} must be quartiles in ascending order, between 0 and 1.")


def origin_of(source: ModelSource) -> dict[str, Any]:
    """Fields of a point: the name and the identity of the dense model."""
    return {"model": printable(source.model), "identity": source.key}


def _variant(recipe: Recipe, calibration: CalibrationRecord | None) -> str:
    """Everything that sets a recipe apart from others of the same method, in words."""
    words = [recipe.pattern] if recipe.pattern else []
    if recipe.structure is not None:
        words.append({"both": "heads and neurons"}.get(recipe.structure.structure, recipe.structure.structure))
        words += ["of all layers together"] if recipe.structure.structure_group == "all" else []
        words += ["query heads"] if recipe.structure.head_unit == "query" else []
        words += ["set to zero"] if recipe.structure.keep_shapes else []
    if recipe.neff_dtype not in (None, "float64"):
        words.append(f"N_eff in {recipe.neff_dtype}")
    if recipe.score_map is not None:
        words.append(f"map {recipe.score_map}")
    if digest := recipe.scores_digest or recipe.criterion_source:
        words.append(f"version {digest[:6]}")
    if calibration is not None and calibration.propagate == "pruned":
        words.append("pruned propagation")
    words += _score_words(recipe)
    words += [f"OWL shares, λ {recipe.owl_lambda:g}, M {recipe.owl_m:g}"] if recipe.shares == "owl" else []
    if recipe.refit:
        words.append("refit" if recipe.refit_target == "block" else "refit of single layers")
        words += [f"{recipe.refit_weighting} weights"] if recipe.refit_weighting != "equal" else []
    if recipe.group != "row":
        words.append({"matrix": "whole matrices", "all": "all together"}.get(recipe.group, recipe.group))
    return printable(", ".join(words))


def _score_words(recipe: Recipe) -> list[str]:
    """Words that set the score apart from the usual one of the method."""
    name = recipe.method.removeprefix("emp-")
    words = ["relative norms"] if recipe.score == "relative" and name != "relative" else []
    if recipe.method == "emp-relative":
        return words if recipe.count_by == "magnitude" else [*words, "counts by the scores"]
    return [*words, "counts by |W|"] if recipe.count_by == "magnitude" and name != "admm" else words


def _scope(recipe: Recipe) -> str:
    def words(value: str | list[str]) -> str:
        return ", ".join(value) if isinstance(value, list) else value

    ignored = f" without {words(recipe.ignore)}" if recipe.ignore else ""
    tower = f" ({recipe.tower} {'towers' if recipe.tower == 'all' else 'tower'})" if recipe.tower != "language" else ""
    return printable(words(recipe.targets) + ignored + tower)


def facts_of(
    source: ModelSource, recipe: Recipe, calibration: CalibrationRecord | None, targets: TargetsRecord
) -> dict[str, str]:
    """Facts about the model and its calibration for the head of a report: name -> text."""
    facts = {"model": printable(source.model)}
    if source.revision:
        facts["revision"] = printable(source.revision)
    if targets.parameters is not None:
        facts["parameters"] = f"{targets.parameters:,}"
    if targets.weights is not None:
        share = targets.share_of_all_parameters
        of_all = f", {100 * share:.1f} % of all parameters" if share is not None else ""
        facts["targets"] = f"{_scope(recipe)}: {targets.weights:,} weights{of_all}"
    texts = [
        f"{text.dataset or PurePath(text.file or '').name}, {text.samples} "
        + (f"x {text.seqlen} tokens" if text.image is None else f"rows with images, of up to {text.seqlen} tokens")
        for text in (calibration.all_texts if calibration is not None else [])
    ]
    if texts:
        facts["calibration"] = printable("; ".join(texts))
    return facts
