"""The update of a model in memory: a refit of its masks, SparseGPT or ADMM. The weights change only when all is decided."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.architecture.targets import Target
from emp_llm.calibration.batch_pass import in_evaluation_mode
from emp_llm.common.errors import UserError
from emp_llm.execution.loading import max_context
from emp_llm.execution.offload import resident_parameter
from emp_llm.execution.text_inputs import NOT_BY_BLOCKS, reads_twice
from emp_llm.in_memory.calibration_data import calibration_text, holds_images
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.recipe import Recipe
from emp_llm.packing.masks import rows_in
from emp_llm.pruning.pruner import Pruner
from emp_llm.runs.stages.refitting import update_weights
from emp_llm.update.moved import MovedWeights
from emp_llm.update.update import check_update


def check_fit(model: nn.Module, recipe: Recipe, pruner: Pruner, data: Any, tokenizer: Any) -> None:
    """Raise UserError if the weights of a model cannot be updated on calibration data."""
    flag = "Recipe(refit=True)" if recipe.refit else f"method {recipe.method}"
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{flag} runs a model of transformers block by block; {type(model).__name__} is none.")
    if reads_twice(model):
        raise UserError(NOT_BY_BLOCKS.format(type(model).__name__))
    if data is None:
        raise UserError(f"{flag} fits weights to calibration data; give data=, such as texts or token ids, or leave it out.")
    if holds_images(data, tokenizer):
        raise UserError(f"{flag} runs block by block, on text alone; give data without images.")
    check_update(pruner.targets, recipe.fit_flag, recipe.without_fit)


def moved_weights(
    model: PreTrainedModel, pruner: Pruner, recipe: Recipe, data: Any, tokenizer: Any, options: CalibrationOptions
) -> MovedWeights:
    """The kept weights of a dense model, moved by a recipe on the data of `prune_model`; the model stays unchanged.

    Raises:
        UserError: the data is batches, memory runs out, or a moment is not finite.
    """
    text = calibration_text(data, tokenizer, options, max_context(model.config))
    if text is None:
        raise UserError("data: batches cannot run block by block, as a fit of weights does; give texts or token ids.")
    moved = MovedWeights()
    with in_evaluation_mode(model):
        update_weights(model, pruner, recipe, text.tokens, options, moved)
    return moved


def put_weights(model: nn.Module, targets: list[Target], weights: dict[str, Tensor]) -> None:
    """Set the weights of targets in a model, in place; other targets stay.

    Args:
        weights: by the name of the target, shape (outputs, inputs).
    """
    for target in targets:
        weight = weights.get(target.name)
        parameter = resident_parameter(model, target.layer.parameter)
        if weight is not None and parameter is not None:
            rows_in(parameter, target.layer).copy_(weight)  # type: ignore[arg-type, attr-defined]
