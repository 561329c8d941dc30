"""How many units EMP would keep at each beta, and the size of the model that is left; nothing is
written.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from emp_llm.calibration.data import calibration_data, keep_generated
from emp_llm.calibration.passes import calibrated, fit_origin, model_origin
from emp_llm.common.errors import UserError
from emp_llm.common.progress import stage
from emp_llm.hub.local_model import LocalModel
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.one_model import OneModel
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.model import LoadingOptions
from emp_llm.options.recipe import Effective, Recipe
from emp_llm.records.measure import MeasureEntry, UnitPoint
from emp_llm.records.run_report import TargetsRecord
from emp_llm.records.source import CalibrationRecord
from emp_llm.structure.choice import choose_units
from emp_llm.structure.parts import Parts
from emp_llm.structure.scores import Scores, unit_scores, unit_sums
from emp_llm.structure.unit_model import unit_model
from emp_llm.structure.units import UnitModel
from emp_llm.structure.writing import active_parameters, size_of


def measure_units(
    source: LocalModel,
    recipe: Recipe,
    text: CalibrationOptions,
    loading: LoadingOptions,
    trust_remote_code: bool,
    betas: list[float],
    kept: Path,
) -> tuple[MeasureEntry, CalibrationRecord | None]:
    """Score the units of a model, and choose at each beta.

    Args:
        source: the dense model.
        recipe: of `options.prune.structured`.
        text: of the calibration.
        loading: of the model.
        trust_remote_code: run code from the model's folder.
        betas: ascending.
        kept: file for a text that the model itself writes.

    Returns:
        The measures, and the calibration; None without one.
    """
    assert recipe.structure is not None
    plan = unit_model(source.folder, recipe.structure, recipe.targets.blocks, trust_remote_code)
    about: CalibrationRecord | None = None
    feature: Callable[[str], Tensor | None] | None = None
    if recipe.name != "magnitude":
        models = OneModel(loading.device_map, loading.dtype, trust_remote_code)
        data = calibration_data(text, plan.architecture, trust_remote_code, models=models)
        keep_generated(kept, data)
        dense = models.get(source.folder)
        origin = model_origin(source.name, source.revision, plan.checkpoint)
        with stage("score"):
            if recipe.name == "wanda":
                outputs = [units.output.layer for units in plan.units if isinstance(units, Parts)]
                norms = calibrated(dense, data, outputs, text, origin, blocks=recipe.targets.blocks)
                feature = norms.norm
                about = norms.about
            else:
                runner = BlockwiseModel(dense, recipe.targets.blocks, text.hidden_states)
                feature = unit_sums(runner, plan.units, data.tokens, text.batch_size).get
                about = fit_origin(data, text, origin)
        del dense
        models.free()
    scores = unit_scores(plan.units, recipe.name, feature)
    removed = curve(plan, scores, recipe, betas)
    at_one, _ = choose_units(plan.units, scores, recipe, plan.width_by_block)
    before = size_of(plan, [])[0]
    after = size_of(plan, at_one)[0]
    weights = plan.architecture.coverage(plan.targets).weights or 1
    entry = MeasureEntry(
        criterion=recipe.name,
        order=recipe.counts.order if isinstance(recipe.counts, Effective) else 0.0,
        targets=TargetsRecord(
            sparsity_of_targets=(before - after) / weights, weights=weights, parameters=before
        ),
        matrices={},
        units={choice.units.name: choice.record for choice in at_one},
        unit_curve=removed,
    )
    return entry, about


def curve(
    plan: UnitModel, scores: Sequence[Scores], recipe: Recipe, betas: Sequence[float]
) -> list[UnitPoint]:
    """What is left at each beta at which the model can be pruned; arguments are those of
    `choose_units`.
    """
    points = []
    counts = recipe.counts
    assert isinstance(counts, Effective)
    for beta in betas:
        try:
            asked = replace(recipe, counts=replace(counts, beta=beta, sparsity=None))
            choices, _ = choose_units(plan.units, scores, asked, plan.width_by_block)
        except UserError:  # fewer experts than a token needs
            continue
        parameters, size = size_of(plan, choices)
        points.append(
            UnitPoint(
                beta=beta,
                kept=[choice.record.rule for choice in choices],
                width=max(choice.record.kept for choice in choices),
                parameters=parameters,
                active_parameters=active_parameters(plan, choices, parameters),
                bytes=size,
            )
        )
    return points
