"""The update of the kept weights in a run of `prune`: what it needs from the recipe and its
masks, and its place in the run.
"""

from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.options.calibration import Place
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Pruner
from emp_llm.update.update import Update
from emp_llm.walk.moved import UpdatedWeights
from emp_llm.walk.update import OfTarget, update_model


def counts_to_search(pruner: Pruner, update: Update, mask_of: OfTarget) -> OfTarget | None:
    """How many weights of a target a search keeps: int64, of each row, or shape (1,) of the matrix.
    None for given masks, and with a pattern.
    """
    if not update.searches or pruner.scores.recipe.n_of_m is not None:
        return None
    if update.keeps == "matrix":
        # It may read the weights.
        by_matrix = cache(lambda: counts_of(pruner.scores, group="matrix"))
        return lambda target: torch.from_numpy(by_matrix().kept[target.name])
    if pruner.counts.group == "matrix":
        return lambda target: mask_of(target).sum().reshape(1)
    return lambda target: mask_of(target).sum(1)


def move_weights(
    model: PreTrainedModel,
    pruner: Pruner,
    update: Update,
    tokens: Tensor,
    updated: UpdatedWeights,
    batch_size: int,
    hidden_states: Place = "auto",
) -> None:
    """Move the weights that stay by an update, block by block; those of blocks in `updated` are
    there. A collective call.

    Args:
        model: dense, on any devices.
        pruner: decides the masks, or how many weights a search keeps.
        tokens: the calibration text, int64, shape (samples, length).
        batch_size, hidden_states: of `update_model`.
    """
    recipe = pruner.scores.recipe
    mask_of = partial(pruner.mask_of, of_all=pruner.cut_all())
    update_model(
        model,
        pruner.targets,
        tokens,
        update,
        updated,
        mask_of=mask_of,
        counts_of=counts_to_search(pruner, update, mask_of),
        pattern=recipe.n_of_m,
        min_expert_tokens=recipe.targets.min_expert_tokens,
        blocks=recipe.targets.blocks,
        batch_size=batch_size,
        hidden_states=hidden_states,
    )
