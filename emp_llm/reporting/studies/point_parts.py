"""Converts the parts of a record to the parts of a measured point."""

import json
import math
from pathlib import PurePath
from typing import Any

import msgspec

from emp_llm.common.errors import UserError, printable
from emp_llm.evaluation.results import EvaluatedModel
from emp_llm.evaluation.values import values_of
from emp_llm.options.recipe import MatchBy, Recipe
from emp_llm.records.run_report import MatrixRecord, Quartiles, RunReport, TargetsRecord
from emp_llm.records.source import CalibrationRecord, ModelSource
from emp_llm.reporting.studies.measured_points import LayerFit, MatrixStats, SuiteResult, WholeGroup


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


def matrices_of(entries: dict[str, MatrixRecord], where: str) -> tuple[MatrixStats, ...]:
    """The matrices of a record; UserError, beginning with `where`, for impossible values."""
    return tuple(_matrix(entry, f"{where}: matrices.{name}") for name, entry in entries.items())


def whole_group_of(targets: TargetsRecord) -> WholeGroup | None:
    """The effective number of all targets as one group; None if they were not one group."""
    if targets.n_eff is None or not targets.weights:
        return None
    return WholeGroup(targets.weights, targets.n_eff, targets.s_eff, targets.s_eff_bound)


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


def _matrix(entry: MatrixRecord, where: str) -> MatrixStats:
    for name, value in msgspec.structs.asdict(entry).items():
        if any(not math.isfinite(number) for number in _numbers(value)):
            raise UserError(f"{where}: {name} must be a finite number.")
    size, mean = entry.group_size, entry.n_eff_mean
    if size is not None and mean is not None and mean > size * (1 + 1e-9):
        raise UserError(f"{where}: n_eff_mean must be between 0 and group_size, got {mean:g}.")
    return MatrixStats(
        role=printable(entry.role),
        block=entry.block,
        weights=entry.rows * entry.columns,
        rows=entry.rows,
        kept=entry.kept,
        kept_fraction=_spread(entry.kept_fraction, f"{where}: kept_fraction"),
        effective_share=mean / size if mean is not None and size is not None else None,
        group_size=size,
        s_eff=None if entry.s_eff is None else _spread(entry.s_eff, f"{where}: s_eff"),
        s_eff_mean=entry.s_eff_mean,
        bound=entry.s_eff_bound_mean,
        margin=entry.least_margin_over_bound,
    )


def _numbers(value: Any) -> tuple[float, ...]:
    """The floats in a field of a matrix."""
    if isinstance(value, Quartiles):
        return value.values
    return (value,) if isinstance(value, float) else ()


def _spread(quartiles: Quartiles, where: str) -> Quartiles:
    """The same quartiles of a share; UserError if they are not in order and between 0 and 1."""
    if list(quartiles.values) != sorted(quartiles.values) or not -1e-9 <= quartiles.min <= quartiles.max <= 1 + 1e-9:
        raise UserError(f"{where} must be quartiles in ascending order, between 0 and 1.")
    return quartiles


def origin_of(source: ModelSource) -> dict[str, Any]:
    """Fields of a point: the name and the identity of the dense model."""
    return {"model": printable(source.model), "identity": source.key}


def method_of(recipe: Recipe, calibration: CalibrationRecord | None, where: str) -> dict[str, Any]:
    """Fields of a point: the method, and everything that sets it apart from others."""
    if not recipe.method:
        raise UserError(f"{where}: recipe: missing field method.")
    adaptive = recipe.method.startswith("emp-")
    if adaptive and ((recipe.beta is None and recipe.structure is None) or recipe.order is None):
        raise UserError(f"{where}: recipe: method {recipe.method} must have a beta and an order.")
    words = [recipe.pattern] if recipe.pattern else []
    if recipe.structure is not None:
        words.append({"both": "heads and neurons"}.get(recipe.structure.structure, recipe.structure.structure))
        words += ["of all layers together"] if recipe.structure.group == "all" else []
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
    match: MatchBy = "matrix" if recipe.match_by == "matrix" else "total"
    return {
        "method": printable(recipe.method),
        "beta": recipe.beta if adaptive else None,
        "order": recipe.order if adaptive else None,
        "group": recipe.group,
        "relative": recipe.relative,
        "scope": _scope(recipe),
        "variant": printable(", ".join(words)),
        "match": match if recipe.match else None,
    }


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
