"""Hooks on chosen layers, expert matrices included, that show their inputs and outputs while a model runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from emp_llm.architecture.layers import Layer
from emp_llm.execution.expert_hooks import expert_hooks

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
