"""Mixtures of experts: parameters that hold one matrix for each expert, and what each of these is multiplied with.

transformers 5 keeps the weights of a block's experts in parameters of three dimensions, which no linear layer stands for. What
an expert is shown is seen where it is used: while the module of the experts runs, every matrix product is looked at, and one
with a matrix of such a parameter (told by the memory it lies in) names the expert and holds its tokens. So nothing has to be
known of how a family routes, gates or scales.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from emp_llm.models.blocks import find_blocks
from emp_llm.models.errors import UserError

_aten = torch.ops.aten
# Every way of multiplying two dense matrices (linear, matmul, einsum, ...) comes down to one of these; where the factors are.
_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1, _aten.bmm.default: 0, _aten.baddbmm.default: 1}

See = Callable[[str, int, Tensor], None]


@dataclass(frozen=True)
class Stack:
    """A parameter of shape (experts, outputs, inputs), or (experts, inputs, outputs) if `transposed`, in a decoder block.

    Attributes:
        name: the parameter's name in the model.
        block: number of the decoder block.
        transposed: None where that cannot be told.
        shape: as it is.
    """

    name: str
    block: int
    transposed: bool | None
    shape: tuple[int, int, int]

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def outputs(self) -> int:
        return self.shape[2 if self.transposed else 1]

    @property
    def inputs(self) -> int:
        return self.shape[1 if self.transposed else 2]


def find_stacks(model: PreTrainedModel, blocks: str | None = None) -> dict[str, Stack]:
    """The parameters that hold a matrix for each expert, by name, in the model's order."""
    path, _ = find_blocks(model, blocks)
    hidden = getattr(model.config.get_text_config(), "hidden_size", None)
    found = {}
    for name, module in model.named_modules():
        if not name.startswith(f"{path}.") or isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            continue
        own = {
            leaf: p
            for leaf, p in module.named_parameters(recurse=False)
            if p.dim() == 3 and min(p.shape) > 1 and "bias" not in leaf
        }
        transposed = _transposed(module, [tuple(p.shape) for p in own.values()], hidden)
        for leaf, parameter in own.items():
            block = int(name.removeprefix(f"{path}.").partition(".")[0])
            experts, rows, columns = parameter.shape
            found[f"{name}.{leaf}"] = Stack(f"{name}.{leaf}", block, transposed, (experts, rows, columns))
    return found


def _transposed(module: nn.Module, shapes: list[tuple[int, ...]], hidden: int | None) -> bool | None:
    """Whether a module's experts are laid out as (inputs, outputs): by its own word, else by what can be multiplied."""
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        return said
    sizes = (getattr(module, "output_size", None), getattr(module, "input_size", None))
    if len(shapes) == 1:
        fits = shapes[0][1:] == sizes, shapes[0][1:] == sizes[::-1]
    else:  # from the hidden states, and back to them
        fits = (
            bool(shapes) and shapes[0][2] == hidden and shapes[-1][1] == hidden,
            bool(shapes) and shapes[0][1] == hidden and shapes[-1][2] == hidden,
        )
    return fits[1] if fits[0] != fits[1] else None


@contextmanager
def expert_hooks(model: nn.Module, stacks: Mapping[str, bool], see: See, asleep: Callable[[], bool]) -> Iterator[None]:
    """While this lasts, `see(parameter, expert, inputs)` is called for what every expert of these parameters is shown.

    Experts are run one by one meanwhile: kernels that take all at once do not show who sees what.

    Args:
        model: on any devices, offloaded or not.
        stacks: name of a parameter -> whether its matrices are (inputs, outputs).
        see: inputs have shape (tokens, inputs), without the rows of zeros that stand for tokens of other experts.
        asleep: nothing is watched while it says so.

    Raises:
        UserError: in the forward pass: a matrix is used the other way round than its layout.
    """
    by_module: dict[str, dict[str, bool]] = {}
    for name, transposed in stacks.items():
        by_module.setdefault(name.rpartition(".")[0], {})[name] = transposed
    handles = []
    for path, own in by_module.items():
        module = model.get_submodule(path)
        running: list[_Watch] = []

        def enter(module: nn.Module, args: Any, own: dict[str, bool] = own, running: list[_Watch] = running) -> None:
            if not asleep():
                running.append(_Watch(module, own, see))
                running[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, args: Any, output: Any, running: list[_Watch] = running) -> None:
            if running:
                running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with _one_by_one(model, by_module):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _one_by_one(model: nn.Module, modules: Iterable[str]) -> Iterator[None]:
    """While this lasts, transformers runs the experts of these modules in a loop."""
    configs = {id(c): c for path in modules if (c := getattr(model.get_submodule(path), "config", None)) is not None}
    before = [(config, config._experts_implementation) for config in configs.values() if _has_choice(config)]
    try:
        for config, _ in before:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation = implementation


def _has_choice(config: Any) -> bool:
    return hasattr(config, "_experts_implementation")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the matrix products of one forward pass of a module of experts."""

    def __init__(self, module: nn.Module, stacks: dict[str, bool], see: See) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._stacks = stacks
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        first = _PRODUCTS.get(func)
        if first is not None:
            left, right = args[first], args[first + 1]
            if not self._note(left, right):
                self._note(right.transpose(-1, -2), left.transpose(-1, -2))
        return func(*args, **(kwargs or {}))

    def _note(self, inputs: Tensor, matrix: Tensor) -> bool:
        """Whether `matrix`, of shape (inputs, outputs), is an expert's; if so, what it is shown has been seen."""
        for name, laid in self._stacks.items():
            stack = self._module.get_parameter(name.rpartition(".")[2])  # offloaded ones are there by now
            place = _place(stack, matrix)
            if place is None:
                continue
            first, transposed = place
            if transposed != laid:
                raise UserError(f"{name}: its experts are multiplied the other way round than its shape says; --ignore them.")
            if inputs.dim() == 2:
                self._see(name, first, inputs)
            else:
                for expert, tokens in enumerate(inputs, first):
                    self._see(name, expert, tokens[tokens.any(1)])
            return True
        return False


def _place(stack: Tensor, matrix: Tensor) -> tuple[int, bool] | None:
    """(first expert, transposed) where `matrix` lies in `stack`; None where it lies elsewhere."""
    if matrix.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr() or matrix.dtype != stack.dtype:
        return None
    offset = matrix.storage_offset() - stack.storage_offset()
    if not 0 <= offset < stack.numel() or (matrix.dim() == 3 and matrix.stride(0) != stack.stride(0)):
        return None
    return offset // stack.stride(0), matrix.stride(-2) == stack.stride(1)
