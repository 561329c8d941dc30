"""The targets' parameters of one block in two versions, dense and pruned, of which the block uses one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from emp_llm.models.architecture import Target
from emp_llm.models.modules import set_to_zero, weight_of


class BlockWeights:
    """Two versions of a block's parameters. Outside of `pruned`, the block uses the dense one.

    Args:
        model: with the block's weights loaded.
        targets: of the block.
    """

    def __init__(self, model: nn.Module, targets: list[Target]) -> None:
        self._model = model
        self._parameters = {name: model.get_parameter(name) for name in dict.fromkeys(t.layer.parameter for t in targets)}
        self._dense = {name: parameter.data for name, parameter in self._parameters.items()}
        self._pruned = {name: values.clone() for name, values in self._dense.items()}

    @contextmanager
    def pruned(self) -> Iterator[None]:
        """Inside this context, the block uses the pruned version."""
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._pruned[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = self._dense[name]

    def dense(self, target: Target) -> Tensor:
        """The dense weight of a target, shape (outputs, inputs)."""
        return weight_of(self._model, target.layer)

    def mask(self, target: Target, mask: Tensor) -> None:
        """Set weights of the pruned version to zero where a mask, bool, shape (outputs, inputs), is false."""
        with self.pruned():
            weight = weight_of(self._model, target.layer)
            set_to_zero(weight, ~mask.to(weight.device))

    def put(self, target: Target, weight: Tensor) -> None:
        """Set a target's weight in the pruned version: shape (outputs, inputs)."""
        with self.pruned():
            weight_of(self._model, target.layer).copy_(weight)
