"""Mixtures of experts: three-dimensional parameters that hold one matrix per expert.

This is how transformers 5 stores the experts of a block. They are not linear layers (`nn.Linear`).
"""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from emp_llm.architecture.blocks import block_lists
from emp_llm.architecture.layers import Tower


@dataclass(frozen=True)
class ExpertStack:
    """A parameter of shape (experts, outputs, inputs), or (experts, inputs, outputs) if `transposed`, in a decoder block.

    Attributes:
        name: the parameter's name in the model.
        block: number of the decoder block.
        transposed: None if unknown.
        shape: of the parameter.
        tower, part: as for `Layer`.
    """

    name: str
    block: int
    transposed: bool | None
    shape: tuple[int, int, int]
    tower: Tower = "language"
    part: str = ""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def outputs(self) -> int:
        return self.shape[2 if self.transposed else 1]

    @property
    def inputs(self) -> int:
        return self.shape[1 if self.transposed else 2]


def find_stacks(model: PreTrainedModel, blocks: str | None = None) -> dict[str, ExpertStack]:
    """The parameters that hold one matrix per expert, by name, in the model's order."""
    towers = block_lists(model, blocks)
    hidden = getattr(model.config.get_text_config(), "hidden_size", None)
    stacks = {}
    for name, module in model.named_modules():
        place = towers.place(name)
        if place is None or isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            continue
        own = {
            leaf: p
            for leaf, p in module.named_parameters(recurse=False)
            if p.dim() == 3 and min(p.shape) > 1 and "bias" not in leaf
        }
        transposed = _transposed(module, [tuple(p.shape) for p in own.values()], hidden)
        for leaf, parameter in own.items():
            own_list, block, _ = place
            shape = (parameter.shape[0], parameter.shape[1], parameter.shape[2])
            stack = ExpertStack(f"{name}.{leaf}", block, transposed, shape, own_list.tower, own_list.part)
            stacks[stack.name] = stack
    return stacks


def _transposed(module: nn.Module, shapes: list[tuple[int, ...]], hidden: int | None) -> bool | None:
    """Whether a module's experts are stored as (inputs, outputs), by its attribute or else by its shapes; None if unknown."""
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    sizes = (getattr(module, "output_size", None), getattr(module, "input_size", None))
    if len(shapes) == 1:
        fits = shapes[0][1:] == sizes, shapes[0][1:] == sizes[::-1]
    else:  # the first maps from the hidden states, the last back to them
        fits = (
            bool(shapes) and shapes[0][2] == hidden and shapes[-1][1] == hidden,
            bool(shapes) and shapes[0][1] == hidden and shapes[-1][2] == hidden,
        )
    return fits[1] if fits[0] != fits[1] else None
