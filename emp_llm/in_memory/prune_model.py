"""Pruning of a model in memory, by the recipes of the command and with the same bits."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.architecture.targets import Target, check_calibrated
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.batch_pass import in_evaluation_mode, norms_of_batches
from emp_llm.calibration.calibration import Calibration
from emp_llm.calibration.images.image_calibration import ImageCalibration
from emp_llm.calibration.tokens import tokens_signature
from emp_llm.common.errors import UserError
from emp_llm.common.timing import Stopwatch
from emp_llm.execution.loading import load_model, max_context
from emp_llm.hub.local_model import find_model
from emp_llm.in_memory.calibration_data import IN_MEMORY, calibration_rows, calibration_text, holds_images
from emp_llm.in_memory.fit_in_memory import check_fit, moved_weights, put_weights
from emp_llm.in_memory.model_report import ModelReport
from emp_llm.in_memory.model_weights import ModelWeights, architecture_of, is_convolution, name_of
from emp_llm.options.calibration import CalibrationOptions, Propagate
from emp_llm.options.model import LoadingOptions
from emp_llm.options.recipe import Recipe
from emp_llm.packing.masks import Masks, rows_in
from emp_llm.pruning.curve import settle_budget
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.plan import Plan
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.recipe import check_ranges, recipe_record
from emp_llm.pruning.row_pruners import PrunedBlock
from emp_llm.records.source import CalibrationRecord, ModelSource, TextRecord
from emp_llm.runs.stages.calibrating import check_images
from emp_llm.runs.stages.refitting import update_of
from emp_llm.runs.stages.report_assembly import assemble_report
from emp_llm.runs.stages.stage import stage_records
from emp_llm.selection.criteria import CRITERIA

if TYPE_CHECKING:
    from emp_llm.storage.buffers import Block
from emp_llm.update.moved import MovedWeights
from emp_llm.update.update import update_warnings

logger = logging.getLogger(__name__)
Data = str | Path | Tensor | Iterable[Any]


class CalibrationArguments(TypedDict, total=False):
    """The keyword arguments of `prune_model` and `masks_of`, which `prune_model` describes."""

    activations: Activations | Path | str | None
    samples: int | None
    seqlen: int | None
    batch_size: int
    seed: int
    propagate: Propagate


@dataclass(frozen=True)
class _Calibration:
    """The source of the input norms, as `prune_model` takes it."""

    data: Any
    tokenizer: Any
    activations: Activations | Path | str | None = None
    samples: int | None = None
    seqlen: int | None = None
    batch_size: int = 4
    seed: int = 0
    propagate: Propagate = "dense"

    @property
    def options(self) -> CalibrationOptions:
        names = ("samples", "seqlen", "batch_size", "seed")
        return CalibrationOptions(**{name: getattr(self, name) for name in names})


def prune_model(
    model: nn.Module | str | Path,
    recipe: Recipe | None = None,
    data: Data | None = None,
    tokenizer: Any = None,
    **how: Unpack[CalibrationArguments],
) -> ModelReport:
    """Prune a model in memory, in place. The masks are those of the command for the same weights, recipe and calibration.

    Everything is decided before the first weight changes.

    Args:
        model: of transformers, on any devices, also with parts offloaded to the CPU; or any module with linear layers or
            convolutions (by magnitude; a filter is a row); or a model folder or Hub id, which is loaded.
        recipe: method, targets and group; None: EMP-Wanda on the MLP layers.
        data: the calibration data, for methods that need it: the name of a recipe ("wikitext2"), a text file, texts,
            conversations, rows of a data set, also with images, token ids of shape (samples, length), or batches (a
            DataLoader).
        tokenizer: the model's, or its folder; for texts. Rows with images need the processor.
        activations: norms to use in place of `data`, or their file.
        samples, seqlen, seed: of the calibration, as for `prune`.
        batch_size: sequences per forward pass; a DataLoader has its own.
        propagate: calibrate each block on the outputs of dense or of pruned blocks.

    Returns:
        The report, with the pruned model as `report.model`. `report.save(folder)` completes a folder that
        `model.save_pretrained(folder)` wrote.

    Raises:
        UserError: options conflict, no layer matches, weights are not in memory, or the data cannot be used. The model is
            unchanged.
    """
    report, weights = _decide(model, recipe, _Calibration(data, tokenizer, **how))
    report.masks.apply(report.model)
    put_weights(report.model, weights.targets, weights.fitted)
    return report


def masks_of(
    model: nn.Module | str | Path,
    recipe: Recipe | None = None,
    data: Data | None = None,
    tokenizer: Any = None,
    **how: Unpack[CalibrationArguments],
) -> Masks:
    """The masks that `prune_model` would apply; the model is unchanged. Arguments and errors are those of `prune_model`.

    Returns:
        Parameter name -> bool tensor, true where a weight stays. `Masks.save` writes them, `reapply_mask` takes them.
    """
    if recipe is not None and recipe.refit and not CRITERIA[recipe.criterion_name].fits:  # the masks do not depend on it
        recipe = replace(recipe, refit=False, refit_weighting=None, refit_target=None, refit_damping=None)
    return _decide(model, recipe, _Calibration(data, tokenizer, **how))[0].masks


class _Weights(NamedTuple):
    """The fitted weights by target, and the targets."""

    targets: list[Target]
    fitted: dict[str, Tensor]


def _decide(model: nn.Module | str | Path, recipe: Recipe | None, how: _Calibration) -> tuple[ModelReport, _Weights]:
    """Decide the masks and the fitted weights of a model, which stays unchanged."""
    recipe = recipe or Recipe()
    recipe.check_recipe()
    check_ranges(recipe)
    how.options.check_calibration()
    if how.propagate == "pruned" and recipe.needs_activations:
        recipe.check_propagated()
    if isinstance(model, str | Path):
        folder = find_model(str(model)).folder
        model, how = load_model(folder), replace(how, tokenizer=how.tokenizer or folder)
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}; give a model in memory, its folder or a Hub id.")
    weights, stopwatch = ModelWeights(model), Stopwatch()
    images = recipe.needs_activations and how.activations is None and holds_images(how.data, how.tokenizer)
    plan = Plan(architecture_of(model, weights, recipe.blocks), recipe, with_images=images)
    pruner, norms = plan.pruner_of(recipe), None
    if recipe.fits:
        check_fit(model, recipe, pruner, how.data, how.tokenizer)
    if how.propagate == "pruned" and recipe.needs_activations:
        settle_budget(pruner)
    if recipe.needs_activations:
        with stopwatch("calibrate"):
            norms = _norms(model, plan, pruner, recipe, how)
        pruner.scores.use(norms)
    elif not recipe.fits and (how.data is not None or how.activations is not None):
        logger.warning("warning: the calibration data has no effect: method %s needs none.", recipe.method)
    settle_budget(pruner)
    store = None
    if recipe.fits and isinstance(model, PreTrainedModel):
        with stopwatch("refit"):
            store = moved_weights(model, pruner, recipe, how.data, how.tokenizer, how.options)
    with stopwatch("prune"):
        masks, outcomes = _masks(model, pruner, store)
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    source = ModelSource(model=name_of(model), revision=revision)
    about = None if norms is None else norms.about
    record = assemble_report(source, plan, recipe, LoadingOptions(), pruner, outcomes, about)
    record.recipe.dtype = record.recipe.device_map = None
    record.stages = stage_records(stopwatch)
    if store is not None:
        record.fits = store.records()
        record.warnings = [*update_warnings(record.fits, pruner.targets, update_of(recipe, pruner)), *record.warnings]
    report = ModelReport(record, masks, norms, pruner.scheme, model)
    return report, _Weights(pruner.targets, {} if store is None else store.weights())


def _norms(model: nn.Module, plan: Plan, pruner: Pruner, recipe: Recipe, how: _Calibration) -> Activations:
    """The norms that the user gave, or those of a calibration."""
    if how.activations is not None:
        given = how.activations
        return Activations.load(Path(given)) if isinstance(given, str | Path) else given
    if how.data is None:
        raise UserError(
            f"method {recipe.method} needs calibration data: give data=, such as texts, token ids, a DataLoader or the name of "
            "a recipe; or use a magnitude method."
        )
    filters = next((target.name for target in pruner.targets if is_convolution(model, target.layer)), None)
    if filters is not None:
        raise UserError(
            f"{filters} is a convolution, which has no norms of input features. Use a magnitude method, or targets without it."
        )
    context = max_context(model.config) if isinstance(model, PreTrainedModel) else None
    if holds_images(how.data, how.tokenizer):
        return _norms_of_images(model, plan, how, context)
    text = calibration_text(how.data, how.tokenizer, how.options, context)
    layers = [layer for layer in plan.layers_to_calibrate() if not is_convolution(model, layer)]
    if text is not None:
        check_calibrated(layers)
    name = name_of(model)
    name = Path(name).name if Path(name).is_dir() else name  # the norms may be published
    about = CalibrationRecord(model=name, pruned_by=recipe_record(recipe) if how.propagate == "pruned" else None)
    if text is None or not isinstance(model, PreTrainedModel):
        if how.propagate == "pruned":
            raise UserError("propagate='pruned' runs a model of transformers block by block; give texts or token ids.")
        batches = how.data if text is None else list(torch.split(text.tokens, how.options.batch_size))
        norms, tokens = norms_of_batches(model, layers, batches)
        return replace(norms, about=msgspec.structs.replace(about, text=TextRecord(file=IN_MEMORY), tokens=tokens))
    calibration = Calibration(text, how.options, how.propagate, blocks=recipe.blocks)
    with in_evaluation_mode(model):
        norms = calibration.run(model, plan.checkpoint, layers, about, pruner if how.propagate == "pruned" else None)
    if norms.about.text is not None and norms.about.text.file == IN_MEMORY:
        norms.about.text.sha256 = tokens_signature(text.tokens)
    return norms


def _norms_of_images(model: nn.Module, plan: Plan, how: _Calibration, context: int | None) -> Activations:
    """The norms of a calibration on rows with images."""
    if not isinstance(model, PreTrainedModel):
        raise UserError("data: rows with images are for models of transformers; give batches to other modules.")
    check_images(plan.architecture, how.options, how.propagate)
    layers = plan.layers_to_calibrate()
    check_calibrated(layers, with_images=True)
    rows = calibration_rows(how.data, how.tokenizer, how.options, context)
    name = name_of(model)
    about = CalibrationRecord(model=Path(name).name if Path(name).is_dir() else name)
    norms = ImageCalibration(rows, how.options).run(model, plan.checkpoint, layers, about)
    if norms.about.text is not None and norms.about.text.file == IN_MEMORY:
        norms.about.text.sha256 = rows.signature
    return norms


def _masks(model: nn.Module, pruner: Pruner, moved: MovedWeights | None) -> tuple[Masks, list[Outcome]]:
    """The masks that a pruner or a fit decides, by parameter, and the outcome of each target."""
    parameters: dict[str, Block] = {}
    masks, shapes = Masks(), {name: parameter.shape for name, parameter in model.named_parameters()}

    def put(target: Target, block: PrunedBlock) -> None:
        name = target.layer.parameter
        if name not in parameters:
            for done in list(parameters):  # the targets of a parameter are consecutive
                masks.put(done, parameters.pop(done))
            parameters[name] = np.ones(shapes[name], dtype=np.bool_)
        rows_in(parameters[name], target.layer)[block.first : block.first + block.words.shape[0]] = block.words != 0

    outcomes = pruner.decide(put, moved=moved)
    for name, mask in parameters.items():
        masks.put(name, mask)
    return masks, outcomes
