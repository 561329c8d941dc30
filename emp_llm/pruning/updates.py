"""Prunes the weights of a loaded model, and restores the dense weights.

Rows are pruned from the checkpoint's bytes, as for writing, and copied into the model. The dense
rows are restored from the same bytes. So no weights are kept twice, and several recipes can be
tried without reloading the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import as_tensor
from emp_llm.models.architecture import Target
from emp_llm.models.loading import is_offloaded
from emp_llm.models.modules import weight_of
from emp_llm.options.shared import Place
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Chunk, Outcomes, Pruner
from emp_llm.pruning.scores import read_chunks
from emp_llm.update.update import Update
from emp_llm.walk.update import OfTarget, update_model
from emp_llm.walk.updated import UpdatedWeights

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def holds_stored_weights(
    model: PreTrainedModel, checkpoint: Checkpoint, targets: list[Target]
) -> bool:
    """Whether every target in a model equals the checkpoint's, rounded to the model's dtype, bit
    for bit.

    False if weights are offloaded, quantised or otherwise converted.
    """
    if is_offloaded(model):
        return False
    for target, first, stored in _stored_rows(checkpoint, targets):
        weight = weight_of(model, target.layer)
        if (
            weight.shape != (target.matrix.rows, target.matrix.columns)
            or not weight.is_floating_point()
        ):
            return False
        rows = weight[first : first + len(stored)]
        bits = _BITS[rows.element_size()]
        if not torch.equal(rows.view(bits), stored.to(rows.device, rows.dtype).view(bits)):
            return False
    return True


@contextmanager
def prune_loaded(
    model: PreTrainedModel, pruner: Pruner, updated: UpdatedWeights | None = None
) -> Iterator[Outcomes]:
    """Replace a model's rows by those that a pruner decides; afterwards, restore the checkpoint's.

    Args:
        model: loaded, on any devices and in any dtype, with the checkpoint's weights
            (`holds_stored_weights`).
        updated: new values of the weights that stay.
    """

    def put(target: Target, chunk: Chunk) -> None:
        rows = as_tensor(chunk.words, target.matrix.stored.dtype)
        weight_of(model, target.layer)[chunk.first : chunk.first + len(rows)].copy_(rows)

    try:
        yield pruner.decide(put, updated)
    finally:
        for target, first, rows in _stored_rows(pruner.checkpoint, pruner.targets):
            weight_of(model, target.layer)[first : first + len(rows)].copy_(rows)


def _stored_rows(
    checkpoint: Checkpoint, targets: list[Target]
) -> Iterator[tuple[Target, int, Tensor]]:
    """(target, first row, rows) of each chunk of the checkpoint's weights."""
    with checkpoint.open_files() as files:
        for target in targets:
            for first, words in read_chunks(target, files):
                yield target, first, as_tensor(words, target.matrix.stored.dtype)


# The update of the kept weights in a run of `prune`: what it needs from the recipe and its
# masks, and its place in the run.


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
