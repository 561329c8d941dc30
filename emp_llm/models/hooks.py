"""Hooks on chosen layers, expert matrices included, that show their inputs and outputs while a
model runs.

While the module of the experts runs, every matrix product is inspected. If one factor lies in the
memory of an expert's matrix, the other factor is the inputs of that expert, and the product its
outputs. So no code depends on a family's routing, gating or scaling.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from emp_llm.common.errors import UserError
from emp_llm.models.layers import Layer

_aten = torch.ops.aten
# Every product of two dense matrices (linear, matmul, einsum, ...) ends in one of these. The value
# is the position of the first factor among the arguments.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
    _aten.bmm.default: 0,
    _aten.baddbmm.default: 1,
}
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)

LayerObserver = Callable[[list[Layer], Tensor, Any], None]
# Parameter and number of an expert's matrix (of the first, in a product of all experts), its inputs
# and its outputs, of shape (tokens, features), or (experts, tokens, features).
Product = tuple[str, int, Tensor, Tensor]


@contextmanager
def layer_hooks(
    model: nn.Module, layers: Iterable[Layer], observe: LayerObserver
) -> Iterator[None]:
    """Call `observe(layers, inputs, outputs)` after each call of these layers, inside this context.

    Experts run one by one in this context, because kernels for all experts at once do not show the
    tokens of each.

    Args:
        model: on any devices, offloaded or not.
        layers: linear layers, and matrices of experts.
        observe: receives the layers whose weights are one matrix in the model (mostly one layer),
            its inputs, shape (..., inputs), and its outputs. For an expert, these have one row for
            each of its tokens, and a bias that is added to the product is part of the outputs.

    Raises:
        UserError: in the forward pass, if an expert's matrix is used in another orientation than
            its shape suggests, or a layer is not one matrix times all its inputs.
    """
    handles: list[RemovableHandle] = []
    experts: dict[str, list[Layer]] = {}  # by the name of their module
    for layer in layers:
        if layer.expert is None:
            handles.append(_hook_layer(model.get_submodule(layer.name), layer, observe))
        else:
            experts.setdefault(layer.expert.parameter.rpartition(".")[0], []).append(layer)
    for path, members in experts.items():
        handles += _hook_experts(model.get_submodule(path), members, observe)
    try:
        with _one_by_one(model, experts):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _hook_layer(module: nn.Module, layer: Layer, observe: LayerObserver) -> RemovableHandle:
    def show(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        width = getattr(module, "out_features", None)
        if width is not None and isinstance(outputs, Tensor) and outputs.shape[-1] != width:
            raise UserError(
                f"{layer.name}: it returns {outputs.shape[-1]:,} features and its weight has "
                f"{width:,} rows, so it is not one matrix times all inputs. Leave it out by "
                f"--ignore {layer.leaf}."
            )
        observe([layer], args[0], outputs)

    return module.register_forward_hook(show)


def _hook_experts(
    module: nn.Module, layers: list[Layer], observe: LayerObserver
) -> list[RemovableHandle]:
    running: list[_ProductObserver] = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append(_ProductObserver(module, layers, observe))
        running[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            observer = running.pop()
            observer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            observer.finish()

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


@contextmanager
def _one_by_one(model: nn.Module, modules: Iterable[str]) -> Iterator[None]:
    """Inside this context, transformers runs the experts of these modules in a loop."""
    configs: dict[int, Any] = {}
    for path in modules:
        config = getattr(model.get_submodule(path), "config", None)
        if hasattr(config, "_experts_implementation"):
            configs[id(config)] = config
    before = [(config, config._experts_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation = implementation


class _ProductObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inspects the matrix products of one forward pass of a module of experts, and shows those
    of some layers.
    """

    def __init__(self, module: nn.Module, layers: list[Layer], observe: LayerObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._observe = observe
        self._layers: dict[tuple[str, int], list[Layer]] = {}
        self._transposed: dict[str, bool] = {}
        for layer in layers:
            assert layer.expert is not None
            self._layers.setdefault((layer.expert.parameter, layer.expert.expert), []).append(layer)
            self._transposed[layer.expert.parameter] = layer.expert.transposed
        self._product: Product | None = None  # the last one; it may wait for its bias

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = _PRODUCTS.get(func)
        if first is not None:
            self.finish()
            left = args[first]
            right = args[first + 1]
            turned = [factor.transpose(-1, -2) for factor in (right, left, result)]
            self._product = self._expert_product(left, right, result) or self._expert_product(
                *turned
            )
            if self._product is not None and not (
                func is _aten.mm.default and self._has_bias(self._product[0])
            ):
                self.finish()  # at once, because the model may change the product in place
        elif func in _SUMS and self._product is not None:
            parameter, expert, inputs, outputs = self._product
            # The bias of one expert.
            if args[0] is outputs and isinstance(args[1], Tensor) and args[1].dim() == 1:
                self._product = parameter, expert, inputs, result
                self.finish()
        return result

    def finish(self) -> None:
        """Show the last product."""
        if self._product is None:
            return
        (parameter, first, inputs, outputs), self._product = self._product, None
        if inputs.dim() == 2:
            self._show(parameter, first, inputs, outputs)
            return
        for expert, (given, returned) in enumerate(zip(inputs, outputs, strict=True), first):
            routed = given.any(1)  # the other rows are zeros in place of other experts' tokens
            self._show(parameter, expert, given[routed], returned[routed])

    def _show(self, parameter: str, expert: int, inputs: Tensor, outputs: Tensor) -> None:
        if layers := self._layers.get((parameter, expert)):
            self._observe(layers, inputs, outputs)

    def _has_bias(self, parameter: str) -> bool:
        return hasattr(self._module, f"{parameter.rpartition('.')[2]}_bias")

    def _expert_product(self, inputs: Tensor, matrix: Tensor, outputs: Tensor) -> Product | None:
        """The product, if `matrix`, of shape (inputs, outputs), is an expert's."""
        for name, as_stored in self._transposed.items():
            # An offloaded parameter is loaded by now.
            stack = self._module.get_parameter(name.rpartition(".")[2])
            position = _position(stack, matrix)
            if position is None:
                continue
            first, transposed = position
            if transposed != as_stored:
                raise UserError(
                    f"{name}: its experts are used in another orientation than its shape suggests. "
                    "Leave them out with --ignore."
                )
            return name, first, inputs, outputs
        return None


def _position(stack: Tensor, matrix: Tensor) -> tuple[int, bool] | None:
    """(first expert, transposed) if `matrix` lies in the memory of `stack`, else None."""
    if (
        matrix.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr()
        or matrix.dtype != stack.dtype
    ):
        return None
    offset = matrix.storage_offset() - stack.storage_offset()
    if not 0 <= offset < stack.numel() or (
        matrix.dim() == 3 and matrix.stride(0) != stack.stride(0)
    ):
        return None
    return offset // stack.stride(0), matrix.stride(-2) == stack.stride(1)
