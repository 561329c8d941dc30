"""What the targets of a level see in the pruned block, batch by batch, beside what they saw in the dense one."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import HiddenStates, Step
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer
from emp_llm.refit.block_weights import BlockWeights
from emp_llm.refit.dense_block import DenseBlock
from emp_llm.refit.levels import Level

_SAME = 0.01  # rounding of bfloat16, relative


class _AllSeen(Exception):
    """All inputs of a level are seen; the rest of the block's pass is not needed."""


@dataclass(frozen=True)
class SeenInputs:
    """The inputs of targets that share them, for one batch. All are float32.

    Attributes:
        number: of the batch.
        targets: that share the inputs.
        pruned: the inputs in the pruned model, shape (tokens, inputs).
        dense: those of the same tokens in the dense model; None for experts, to which other tokens may be routed there, and
            for the closing level.
        wanted: for the closing level only: the outputs that its target shall return, without the bias, shape
            (tokens, outputs). Added to what the rest of the pruned block returns, they are the outputs of the dense block.
    """

    number: int
    targets: list[Target]
    pruned: Tensor
    dense: Tensor | None = None
    wanted: Tensor | None = None


class LevelInputs:
    """Passes batches through the pruned block as far as a level.

    Args:
        model: with the block's weights loaded.
        step: the block.
        weights: its two versions.
        pruned: the hidden states that enter the pruned block.
        outputs: the hidden states that leave the dense block.
        dense: what its targets saw.
        biases: of the targets' layers, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        weights: BlockWeights,
        pruned: HiddenStates,
        outputs: HiddenStates,
        dense: DenseBlock,
        biases: dict[str, Tensor | None],
    ) -> None:
        self._model = model
        self._step = step
        self._weights = weights
        self._pruned = pruned
        self._outputs = outputs
        self._dense = dense
        self._biases = biases

    def of(self, level: Level, place: int, numbers: Sequence[int]) -> Iterator[SeenInputs]:
        """The inputs of a level for some batches; `place` is its number among the levels."""
        return self._closing(level, numbers) if level.closing else self._inner(level, place, numbers)

    def _inner(self, level: Level, place: int, numbers: Sequence[int]) -> Iterator[SeenInputs]:
        leaders = {targets[0].name: targets for targets in level.inputs.values()}
        seen: dict[str, list[Tensor]] = {}

        def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
            flat = inputs.detach().reshape(-1, inputs.shape[-1])
            seen.setdefault(layers[0].name, []).append(flat.to(torch.float32, copy=True))
            if not level.routed and len(seen) == len(leaders):
                raise _AllSeen

        with layer_hooks(self._model, [targets[0].layer for targets in leaders.values()], observe):
            for number in numbers:
                with self._weights.pruned(), suppress(_AllSeen):
                    self._step.output(number, self._pruned)
                found, seen = seen, {}
                for leader, parts in found.items():
                    pruned = torch.cat(parts)
                    dense = None if level.routed else self._dense.inputs(number, place, pruned.device)
                    yield SeenInputs(number, leaders[leader], pruned, dense)

    def _closing(self, level: Level, numbers: Sequence[int]) -> Iterator[SeenInputs]:
        (target,) = level.targets
        bias, seen = self._biases[target.name], list[tuple[Tensor, Tensor]]()

        def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
            copies = [each.detach().flatten(0, -2).to(torch.float32, copy=True) for each in (inputs, outputs)]
            seen.append((copies[0], copies[1]))  # the block may write into them

        with layer_hooks(self._model, [target.layer], observe):
            for number in numbers:
                with self._weights.pruned():
                    output = self._step.output(number, self._pruned)
                ((pruned, own),) = seen
                seen.clear()
                missing = self._outputs.get(number, output.device).float() - output.float()
                wanted = missing.flatten(0, -2) + own
                yield SeenInputs(number, [target], pruned, wanted=wanted if bias is None else wanted - bias.float())


def is_added(model: nn.Module, step: Step, level: Level, number: int, states: HiddenStates) -> bool:
    """Whether a level is one layer, called once, whose output is added to the block's as it is.

    It is found by a change of the layer's output, which must change the block's by as much.

    Args:
        model: dense, with the block's weights loaded.
        step: the block.
        number: of a batch; `states` hold its hidden states.
    """
    if level.routed or len(level.targets) != 1:
        return False
    target, calls = level.targets[0], list[Tensor]()
    before = step.output(number, states)
    if target.matrix.rows != before.shape[-1]:
        return False
    generator = torch.Generator().manual_seed(0)
    scale = float(before.float().std())
    change = (scale * torch.randn(before.shape, generator=generator)).to(before.device, before.dtype)

    def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
        calls.append(output)
        return output + change.view(output.shape)

    handle = model.get_submodule(target.layer.name).register_forward_hook(add)
    try:
        after = step.output(number, states)
    except RuntimeError:  # another shape
        return False
    finally:
        handle.remove()
    difference = after.float() - before.float() - change.float()
    return len(calls) == 1 and float(difference.norm()) <= _SAME * float(change.float().norm())
