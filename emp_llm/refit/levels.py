"""The levels of a block: its targets in the order in which they are called, so that each is fitted after those before it."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import HiddenStates, Step
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer


@dataclass
class Level:
    """Targets of a block none of whose inputs depend on the output of another: q, k and v; or the same matrix of all experts.

    Attributes:
        inputs: name of the first target of each distinct input -> the targets that it feeds.
        routed: the targets are experts, which see only the tokens routed to them.
        closing: it is one target, whose output is added to that of the block; it restores the block's output.
    """

    routed: bool
    inputs: dict[str, list[Target]] = field(default_factory=dict)
    closing: bool = False

    @property
    def targets(self) -> list[Target]:
        return [target for targets in self.inputs.values() for target in targets]

    def parts(self, limit: int, size: "MomentSize") -> list["Level"]:
        """The level in consecutive parts whose moments take at most `limit` bytes each, or belong to one input."""
        parts: list[Level] = []
        held = 0
        for leader, targets in self.inputs.items():
            needed = size.of(targets)
            if not parts or held + needed > limit:
                parts.append(Level(self.routed, closing=self.closing))
                held = 0
            parts[-1].inputs[leader] = targets
            held += needed
        return parts


@dataclass(frozen=True)
class MomentSize:
    """The size of the second moments.

    Attributes:
        per_target: each target has its own, because its tokens are weighted by its output.
    """

    per_target: bool

    def of(self, targets: list[Target]) -> int:
        """Bytes for targets that share an input: two float32 matrices, (inputs, inputs)."""
        return 8 * targets[0].matrix.columns ** 2 * (len(targets) if self.per_target else 1)


def levels_of(model: nn.Module, step: Step, targets: list[Target], number: int, states: HiddenStates) -> list[Level]:
    """The levels of a block, found by running one batch through it.

    Args:
        step: the block.
        targets: of the block.
        number: of the batch.
        states: hold its hidden states.
    """
    by_name = {target.name: target for target in targets}
    order: dict[str, Level] = {}
    last: list[tuple[Tensor, Level, str]] = []

    def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        own = [by_name[layer.name] for layer in layers]
        if any(own[0] in level.targets for level in order.values()):
            return
        if own[0].layer.routed:
            order.setdefault(_stack(own[0]), Level(True))
            return
        if last and last[0][0] is inputs:
            last[0][1].inputs[last[0][2]] += own
            return
        level = order[own[0].name] = Level(False, {own[0].name: own})
        last[:] = [(inputs, level, own[0].name)]

    with layer_hooks(model, [target.layer for target in targets], observe):
        step.output(number, states)
    for target in targets:  # experts in one order on all ranks, whichever of them this batch reached
        if target.layer.routed:
            inputs = order.setdefault(_stack(target), Level(True)).inputs
            leader = next((name for name in inputs if _same_matrix(by_name[name], target)), target.name)
            inputs[leader] = [*inputs.get(leader, []), target]
    return list(order.values())


def _same_matrix(one: Target, other: Target) -> bool:
    """Whether two experts' targets are parts of one matrix in the model, so that they share their inputs."""
    first, second = one.layer.expert, other.layer.expert
    return first is not None and second is not None and (first.parameter, first.expert) == (second.parameter, second.expert)


def _stack(target: Target) -> str:
    """The matrix of all experts to which one belongs."""
    layer = target.layer
    return layer.expert.parameter if layer.expert is not None else layer.role
