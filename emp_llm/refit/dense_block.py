"""What the targets of a block see in the dense model: their inputs, and the norms of their outputs."""

from typing import Any

import torch
from torch import Tensor

from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import HiddenStates, Walk, choose_place
from emp_llm.models.layers import Layer
from emp_llm.options.refit import Weighting
from emp_llm.refit.level_moments import energy_of, token_weights
from emp_llm.refit.levels import Level


class DenseBlock:
    """The inputs of a block's targets in the dense model, and the weights of their tokens, batch by batch.

    Experts are left out: other tokens may be routed to them there.

    Args:
        levels: of the block.
        walk: the pass of the dense model.
        weighting: of the tokens.
        biases: of the targets' layers, by name.

    Attributes:
        layers: to observe.
        energy: sum_t w_t (W x_t)_r^2 over the batches on which weights are fitted, by target, float64, shape (outputs,).
    """

    def __init__(self, levels: list[Level], walk: Walk, weighting: Weighting, biases: dict[str, Tensor | None]) -> None:
        single = [level for level in levels if not level.routed]
        self.layers = [target.layer for level in single for target in level.targets]
        # The closing level is fitted to the outputs of the block, and needs neither its dense inputs nor their energy.
        self._leaders = {
            name: number
            for number, level in enumerate(levels)
            if level in single and not level.closing
            for name in level.inputs
        }
        self._fitted = {target.name for level in single if not level.closing for target in level.targets}
        self.energy: dict[str, Tensor] = {}
        self._count = len(levels)
        self._width = sum(
            targets[0].matrix.columns for level in single if not level.closing for targets in level.inputs.values()
        )
        self._walk = walk
        self._weighting = weighting
        self._biases = biases
        self._inputs: dict[int, list[Tensor]] = {}  # of this batch
        self._outputs: dict[str, list[Tensor]] = {}
        self._shares: dict[tuple[int, str], Tensor] = {}
        self._states: HiddenStates | None = None

    def observe(self, layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        """Take the inputs and outputs of a call; for `layer_hooks`."""
        name = layers[0].name
        if name in self._leaders:  # a copy, because the block may write into it
            self._inputs.setdefault(self._leaders[name], []).append(inputs.detach().reshape(-1, inputs.shape[-1]).clone())
        self._outputs.setdefault(name, []).append(outputs.detach().reshape(-1, outputs.shape[-1]).clone())

    def end_of_batch(self, number: int, fitted_on: bool) -> None:
        """Store what was observed since the last batch.

        Args:
            number: of the batch.
            fitted_on: weights are fitted on it.
        """
        for level, parts in self._inputs.items():
            self._put(number, level, torch.cat(parts))
        for name, parts in self._outputs.items():
            outputs, bias = torch.cat(parts), self._biases[name]
            share = token_weights(self._weighting, outputs)
            if share is not None:
                self._shares[number, name] = share
            if fitted_on and name in self._fitted:
                energy = energy_of(outputs if bias is None else outputs - bias, share)
                self.energy[name] = self.energy[name] + energy if name in self.energy else energy
        self._inputs.clear()
        self._outputs.clear()

    def share(self, number: int, target: Target) -> Tensor | None:
        """The weights of a batch's tokens for a target; None if all are equal."""
        return self._shares.get((number, target.name))

    def inputs(self, number: int, level: int, device: torch.device) -> Tensor:
        """The inputs of a level for a batch, float32, shape (tokens, inputs)."""
        assert self._states is not None
        return self._states.get(number * self._count + level, device).float()

    def close(self) -> None:
        """Free the memory or the file."""
        if self._states is not None:
            self._states.close()

    def _put(self, number: int, level: int, inputs: Tensor) -> None:
        if self._states is None:
            tokens = sum(batch.numel() for batch in self._walk.batches)
            size = tokens * self._width * inputs.element_size()
            self._states = HiddenStates(choose_place(self._walk.runner.hidden_states, size, inputs.device))
        self._states.put(number * self._count + level, inputs)
