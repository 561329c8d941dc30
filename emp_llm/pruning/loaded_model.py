"""Prunes the weights of a loaded model, and restores the dense weights.

Rows are pruned from the checkpoint's bytes, as for writing, and copied into the model. The dense rows are restored from the
same bytes. So no weights are kept twice, and several recipes can be tried without reloading the model.
"""

from types import TracebackType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.matrix import as_tensor
from emp_llm.models.architecture import Target
from emp_llm.models.modules import weight_of
from emp_llm.models.offload import is_offloaded
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.row_pruners import PrunedBlock
from emp_llm.storage.file_pool import FilePool

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MaskedModel:
    """`with MaskedModel(model, pruner) as masked: outcomes = masked.prune(pruner); ...`. The context restores the model.

    Args:
        model: loaded, on any devices and in any dtype; its weights are changed in place.
        pruner: of the model's checkpoint; the pruners of later calls have the same targets.
    """

    def __init__(self, model: PreTrainedModel, pruner: Pruner) -> None:
        self.model = model
        self._dense = pruner
        self._changed = False

    def fits(self) -> bool:
        """Whether every target in the model equals the checkpoint's, rounded to the model's dtype, bit for bit.

        False if weights are offloaded, quantised or otherwise converted.
        """
        if is_offloaded(self.model):
            return False
        with FilePool(again=True) as files:
            for target in self._dense.targets:
                weight = weight_of(self.model, target.layer)
                if weight.shape != (target.matrix.rows, target.matrix.columns) or not weight.is_floating_point():
                    return False
                for first, words in self._dense.blocks(target, files):
                    own = weight[first : first + words.shape[0]]
                    stored = as_tensor(words, target.matrix.stored.dtype)
                    if not torch.equal(_bits(own), _bits(stored.to(own.device, own.dtype))):
                        return False
        return True

    def prune(self, pruner: Pruner) -> list[Outcome]:
        """Replace the model's rows by those that a pruner decides. Rows decided on a GPU stay on it."""
        self._changed = True
        return pruner.decide(self._put_block, back=False)

    def restore(self) -> None:
        """Restore the checkpoint's rows."""
        with FilePool(again=True) as files:
            for target in self._dense.targets:
                for first, words in self._dense.blocks(target, files):
                    self._put(target, first, as_tensor(words, target.matrix.stored.dtype))
        self._changed = False

    def __enter__(self) -> "MaskedModel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._changed:
            self.restore()

    def _put_block(self, target: Target, block: PrunedBlock) -> None:
        weights = block.weights if block.weights is not None else as_tensor(block.words, target.matrix.stored.dtype)
        self._put(target, block.first, weights)

    def _put(self, target: Target, first: int, rows: Tensor) -> None:
        weight_of(self.model, target.layer)[first : first + rows.shape[0]].copy_(rows)


def _bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.element_size()])
