"""Hooks on chosen layers, expert matrices included, that show their inputs while a model runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from emp_llm.architecture.layers import Layer
from emp_llm.execution.expert_hooks import expert_hooks

InputObserver = Callable[[list[str], Tensor], None]


@contextmanager
def layer_hooks(
    model: nn.Module, layers: Iterable[Layer], observe: InputObserver, paused: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Call `observe(layers, inputs)` before each call of these layers, inside this context.

    Args:
        model: on any devices, offloaded or not.
        layers: linear layers, and matrices of experts.
        observe: receives the names of the layers whose weights are one matrix in the model (mostly one name), and their
            inputs, shape (..., inputs).
        paused: returns true while nothing is to be observed.
    """
    handles = []
    experts: dict[tuple[str, int], list[str]] = {}
    stacks: dict[str, bool] = {}
    for layer in layers:
        if layer.expert is not None:
            experts.setdefault((layer.expert.parameter, layer.expert.expert), []).append(layer.name)
            stacks[layer.expert.parameter] = layer.expert.transposed
            continue

        def hook(module: nn.Module, args: tuple[Any, ...], name: str = layer.name) -> None:
            if not paused():
                observe([name], args[0])

        handles.append(model.get_submodule(layer.name).register_forward_pre_hook(hook))

    def observe_expert(parameter: str, expert: int, inputs: Tensor) -> None:
        if (parameter, expert) in experts:
            observe(experts[parameter, expert], inputs)

    try:
        with expert_hooks(model, stacks, observe_expert, paused):
            yield
    finally:
        for handle in handles:
            handle.remove()
