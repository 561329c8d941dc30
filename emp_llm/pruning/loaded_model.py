"""Prunes the weights of a loaded model, and restores the dense weights.

Rows are pruned from the checkpoint's bytes, as for writing, and copied into the model. The dense
rows are restored from the same bytes. So no weights are kept twice, and several recipes can be
tried without reloading the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import as_tensor
from emp_llm.models.architecture import Target
from emp_llm.models.modules import weight_of
from emp_llm.models.offload import is_offloaded
from emp_llm.pruning.masks import Chunk, Pruner
from emp_llm.pruning.outcome import Outcomes
from emp_llm.pruning.scores import read_chunks
from emp_llm.walk.moved import UpdatedWeights

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
