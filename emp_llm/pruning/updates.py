"""What an update of the kept weights needs from the recipe and its masks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import Recipe
from emp_llm.options.update import Update
from emp_llm.pruning.chosen import Chosen
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Pruner
from emp_llm.update.update import check_update

if TYPE_CHECKING:
    from torch import Tensor


def check_updatable(recipe: Recipe, chosen: Chosen, data: Any) -> None:
    """Raise UserError if weights cannot move: because of the targets, of the model, or of calibration data with images."""
    from emp_llm.calibration.data import CalibrationText

    check_update(chosen.targets, recipe.update_flag, recipe.without_update)
    by_blocks = f"{recipe.update_flag} runs block by block"
    if not isinstance(data, CalibrationText):
        raise UserError(f"{by_blocks}, on text alone. {recipe.without_update}, or leave out image= in --calibration.")
    if chosen.checkpoint.config.get("is_encoder_decoder"):
        raise UserError(f"{by_blocks}, which an encoder-decoder model cannot. {recipe.without_update}.")


def counts_to_search(
    pruner: Pruner, update: Update, mask_of: "Callable[[Target], Tensor]"
) -> "Callable[[Target], Tensor] | None":
    """How many weights of a target a search keeps: int64, of each row, or shape (1,) of the matrix. None without a search.

    SparseGPT shares the kept weights of a matrix among its rows itself.
    """
    if update.search is None:
        return None
    if update.search == "sparsegpt":
        import torch

        if update.pattern is not None:
            return None
        by_matrix = counts_of(pruner.scores, group="matrix")
        return lambda target: torch.from_numpy(by_matrix.kept[target.name])
    if pruner.counts.group == "matrix":
        return lambda target: mask_of(target).sum().reshape(1)
    return lambda target: mask_of(target).sum(1)
