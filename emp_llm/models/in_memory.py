"""Pruned weights in a model that is loaded, and its own again afterwards.

Rows are decided from the checkpoint's bytes, as when they are written, and go to their places in the model. What they replace
comes back from the same bytes, so that nothing is kept twice, and one set of masks follows another without loading a model.
"""

from types import TracebackType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.models.files import OpenFiles
from emp_llm.models.layers import weight_of
from emp_llm.models.outcomes import Outcome
from emp_llm.models.pruning import Pruner
from emp_llm.models.residency import is_offloaded
from emp_llm.models.targets import Target

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class InMemory:
    """`with InMemory(model, pruner) as masked: outcomes = masked.prune(pruner); ...`; at the end the model is as before.

    Args:
        model: loaded, on any devices and in any dtype; its weights are set in place.
        pruner: of its checkpoint; any further ones are of the same targets.
    """

    def __init__(self, model: PreTrainedModel, pruner: Pruner) -> None:
        self.model = model
        self._dense = pruner
        self._changed = False

    def fits(self) -> bool:
        """Whether every target in the model is the checkpoint's, rounded to the model's dtype, bit for bit.

        It is not where weights are offloaded, quantised, or made of the stored ones by more than moving them.
        """
        if is_offloaded(self.model):
            return False
        with OpenFiles(again=True) as files:
            for target in self._dense.targets:
                weight = weight_of(self.model, target.layer)
                if weight.shape != (target.matrix.rows, target.matrix.columns) or not weight.is_floating_point():
                    return False
                for first, block in self._dense.blocks(target, files):
                    own = weight[first : first + block.shape[0]]
                    if not torch.equal(_bits(own), _bits(block.to(own.device, own.dtype))):
                        return False
        return True

    def prune(self, pruner: Pruner) -> list[Outcome]:
        """Put the rows that a pruner makes in the model, in place of whatever was there; as `Pruner.write` decides them."""
        self._changed = True
        return pruner.decide(self._put)

    def restore(self) -> None:
        """Put the checkpoint's own rows back."""
        with OpenFiles(again=True) as files:
            for target in self._dense.targets:
                for first, block in self._dense.blocks(target, files):
                    self._put(target, first, block)
        self._changed = False

    def __enter__(self) -> "InMemory":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._changed:
            self.restore()

    def _put(self, target: Target, first: int, block: Tensor) -> None:
        weight_of(self.model, target.layer)[first : first + block.shape[0]].copy_(block)


def _bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.element_size()])
