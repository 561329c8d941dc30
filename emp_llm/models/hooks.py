"""Hooks on chosen layers, expert matrices included, that show their inputs and outputs while a model runs.

While the module of the experts runs, every matrix product is inspected. If one factor lies in the memory of an expert's matrix,
the other factor is the inputs of that expert, and the product its outputs. So no code depends on a family's routing, gating or
scaling.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from emp_llm.common.errors import UserError
from emp_llm.models.layers import Layer

_aten = torch.ops.aten
# Every product of two dense matrices (linear, matmul, einsum, ...) ends in one of these. The value is the position of the first
# factor among the arguments.
_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1, _aten.bmm.default: 0, _aten.baddbmm.default: 1}
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)

ExpertObserver = Callable[[str, int, Tensor, Tensor], None]
ExpertChange = Callable[[str, Tensor], Tensor]
LayerObserver = Callable[[list[Layer], Tensor, Any], None]


@contextmanager
def layer_hooks(
    model: nn.Module, layers: Iterable[Layer], observe: LayerObserver, paused: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Call `observe(layers, inputs, outputs)` after each call of these layers, inside this context.

    Args:
        model: on any devices, offloaded or not.
        layers: linear layers, and matrices of experts.
        observe: receives the layers whose weights are one matrix in the model (mostly one layer), its inputs, shape
            (..., inputs), and its outputs.
        paused: returns true while nothing is to be observed.
    """
    handles = []
    experts: dict[tuple[str, int], list[Layer]] = {}
    stacks: dict[str, bool] = {}
    for layer in layers:
        if layer.expert is not None:
            experts.setdefault((layer.expert.parameter, layer.expert.expert), []).append(layer)
            stacks[layer.expert.parameter] = layer.expert.transposed
            continue

        def hook(module: nn.Module, args: tuple[Any, ...], outputs: Any, layer: Layer = layer) -> None:
            if not paused():
                observe([layer], args[0], outputs)

        handles.append(model.get_submodule(layer.name).register_forward_hook(hook))

    def observe_expert(parameter: str, expert: int, inputs: Tensor, outputs: Tensor) -> None:
        if (parameter, expert) in experts:
            observe(experts[parameter, expert], inputs, outputs)

    try:
        with expert_hooks(model, stacks, observe_expert, paused):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def expert_hooks(
    model: nn.Module,
    stacks: Mapping[str, bool],
    observe: ExpertObserver | None = None,
    paused: Callable[[], bool] = lambda: False,
    change: ExpertChange | None = None,
) -> Iterator[None]:
    """Call `observe(parameter, expert, inputs, outputs)` for every expert of these parameters, inside this context.

    The experts run one by one in this context, because kernels for all experts at once do not show the tokens of each.

    Args:
        model: on any devices, offloaded or not.
        stacks: name of a parameter -> whether its matrices are stored as (inputs, outputs).
        observe: receives inputs of shape (tokens, inputs) and outputs of shape (tokens, outputs), without the rows of zeros in
            place of other experts' tokens. A bias that is added to a product is part of the outputs.
        paused: returns true while nothing is to be observed.
        change: receives a parameter's name and the inputs of one of its experts, shape (tokens, inputs), or of several, shape
            (experts, tokens, inputs) with rows of zeros in place of other experts' tokens; returns other inputs.

    Raises:
        UserError: in the forward pass, if a matrix is used in another orientation than its shape suggests.
    """
    by_module: dict[str, dict[str, bool]] = {}
    for name, transposed in stacks.items():
        by_module.setdefault(name.rpartition(".")[0], {})[name] = transposed
    handles = []
    for path, own in by_module.items():
        module = model.get_submodule(path)
        running: list[_Watch] = []

        def enter(module: nn.Module, args: Any, own: dict[str, bool] = own, running: list[_Watch] = running) -> None:
            if not paused():
                running.append(_Watch(module, own, observe, change))
                running[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, args: Any, output: Any, running: list[_Watch] = running) -> None:
            if running:
                watch = running.pop()
                watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                watch.finish()

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
    """Inside this context, transformers runs the experts of these modules in a loop."""
    own = (getattr(model.get_submodule(path), "config", None) for path in modules)
    configs = {id(config): config for config in own if config is not None}
    choosing = [config for config in configs.values() if hasattr(config, "_experts_implementation")]
    before = [(config, config._experts_implementation) for config in choosing]
    try:
        for config, _ in before:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation = implementation


@dataclass(frozen=True)
class _Product:
    """A product of inputs and an expert's matrix; it may wait for its bias.

    Attributes:
        parameter, expert: the matrix; the first of them, for a product of several experts.
        inputs, outputs: shape (tokens, features), or (experts, tokens, features).
    """

    parameter: str
    expert: int
    inputs: Tensor
    outputs: Tensor


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inspects the matrix products of one forward pass of a module of experts."""

    def __init__(
        self, module: nn.Module, stacks: dict[str, bool], observe: ExpertObserver | None, change: ExpertChange | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._stacks = stacks
        self._observe = observe
        self._change = change
        self._product: _Product | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        first = _PRODUCTS.get(func)
        if first is not None and self._change is not None:
            args = self._changed(args, first)
        result = func(*args, **(kwargs or {}))
        if self._observe is None:
            return result
        if first is not None:
            self.finish()
            left, right = args[first], args[first + 1]
            self._product = self._found(left, right, result)
            if self._product is None:
                turned = [factor.transpose(-1, -2) for factor in (right, left, result)]
                self._product = self._found(turned[0], turned[1], turned[2])
            if self._product is not None and not (func is _aten.mm.default and self._has_bias(self._product.parameter)):
                self.finish()  # at once, because the model may change the product in place
        elif func in _SUMS and self._product is not None:
            left, right = args[:2]
            if left is self._product.outputs and isinstance(right, Tensor) and right.dim() == 1:  # the bias of one expert
                self._product = replace(self._product, outputs=result)
                self.finish()
        return result

    def _changed(self, args: tuple[Any, ...], first: int) -> tuple[Any, ...]:
        """The arguments of a product with other inputs of its experts; unchanged if no factor is an expert's matrix."""
        assert self._change is not None
        left, right = args[first], args[first + 1]
        if (name := self._owner(right)) is not None:
            return (*args[:first], self._change(name, left), *args[first + 1 :])
        if (name := self._owner(left.transpose(-1, -2))) is not None:
            turned = self._change(name, right.transpose(-1, -2)).transpose(-1, -2)
            return (*args[: first + 1], turned, *args[first + 2 :])
        return args

    def _owner(self, matrix: Tensor) -> str | None:
        """Name of the parameter in which a matrix of shape (inputs, outputs) lies."""
        found = self._found(matrix, matrix, matrix)
        return None if found is None else found.parameter

    def finish(self) -> None:
        """Observe the last product."""
        if self._product is None or self._observe is None:
            return
        product, self._product = self._product, None
        if product.inputs.dim() == 2:
            self._observe(product.parameter, product.expert, product.inputs, product.outputs)
            return
        for expert, (inputs, outputs) in enumerate(zip(product.inputs, product.outputs, strict=True), product.expert):
            routed = inputs.any(1)
            self._observe(product.parameter, expert, inputs[routed], outputs[routed])

    def _has_bias(self, parameter: str) -> bool:
        return hasattr(self._module, f"{parameter.rpartition('.')[2]}_bias")

    def _found(self, inputs: Tensor, matrix: Tensor, outputs: Tensor) -> _Product | None:
        """The product, if `matrix`, of shape (inputs, outputs), is an expert's."""
        for name, as_stored in self._stacks.items():
            stack = self._module.get_parameter(name.rpartition(".")[2])  # an offloaded parameter is loaded by now
            place = _place(stack, matrix)
            if place is None:
                continue
            first, transposed = place
            if transposed != as_stored:
                raise UserError(
                    f"{name}: its experts are used in another orientation than its shape suggests. Leave them out with "
                    "--ignore."
                )
            return _Product(name, first, inputs, outputs)
        return None


def _place(stack: Tensor, matrix: Tensor) -> tuple[int, bool] | None:
    """(first expert, transposed) if `matrix` lies in the memory of `stack`, else None."""
    if matrix.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr() or matrix.dtype != stack.dtype:
        return None
    offset = matrix.storage_offset() - stack.storage_offset()
    if not 0 <= offset < stack.numel() or (matrix.dim() == 3 and matrix.stride(0) != stack.stride(0)):
        return None
    return offset // stack.stride(0), matrix.stride(-2) == stack.stride(1)
