"""One forward pass of a model, observed: the layers that it calls, their normalisations, the layers that end it, its FLOPs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from emp_llm.calibration.passes import in_evaluation_mode
from emp_llm.common.errors import UserError
from emp_llm.structured.unit_groups import BATCH_NORMS, unit_layers


@dataclass(frozen=True)
class Trace:
    """What a forward pass showed.

    Attributes:
        called: the unit layers that were called, in the order of the model.
        batch_norms: layer -> the batch normalisation that reads its output.
        ends: the layers whose outputs reach the model's output through no other unit layer.
        flops: floating-point operations; a multiplication and an addition count as two.
    """

    called: tuple[str, ...]
    batch_norms: dict[str, str]
    ends: frozenset[str]
    flops: int


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with inputs, on the model's device: a tensor, a tuple or list of arguments, or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return model(**{name: beside_model(model, value) for name, value in inputs.items()})
    if isinstance(inputs, tuple | list):
        return model(*(beside_model(model, value) for value in inputs))
    return model(beside_model(model, inputs))


def beside_model(model: nn.Module, value: Any) -> Any:
    """A tensor on the device of a model; other values as they are."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return value.to(device) if isinstance(value, Tensor) else value


def tensors_in(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextmanager
def with_gradients(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients for all parameters; afterwards the modes and the frozen parameters are as before."""
    frozen = [each for each in model.parameters() if not each.requires_grad and each.is_floating_point()]
    with in_evaluation_mode(model), torch.enable_grad():
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def trace_model(model: nn.Module, example: Any) -> Trace:
    """Observe one forward pass.

    Raises:
        UserError: the output holds no tensor that depends on the model's parameters.
    """
    layers = unit_layers(model)
    outputs: list[tuple[Tensor, str]] = []  # tensors are kept, so that no other one gets the same identity
    nodes: dict[Any, str] = {}
    batch_norms: dict[str, str] = {}

    def saw_layer(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((output, name))
            nodes[output.grad_fn] = name

    def saw_norm(name: str, inputs: Any) -> None:
        batch_norms.update({layer: name for tensor, layer in outputs if inputs and inputs[0] is tensor})

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: saw_layer(name, output))
        for name, module in layers.items()
    ]
    hooks += [
        module.register_forward_pre_hook(lambda _, inputs, name=name: saw_norm(name, inputs))
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS)
    ]
    try:
        with with_gradients(model), FlopCounterMode(display=False) as counter:
            results = tensors_in(call_model(model, example))
    finally:
        for hook in hooks:
            hook.remove()
    ends = _first_reached([each.grad_fn for each in results if each.grad_fn is not None], nodes)
    if not ends:
        raise UserError("example: the model's output does not depend on its layers, or is cut off from them by no_grad.")
    called = {name for _, name in outputs}
    return Trace(tuple(name for name in layers if name in called), batch_norms, ends, counter.get_total_flops())


def _first_reached(starts: list[Any], nodes: dict[Any, str]) -> frozenset[str]:
    """The layers first reached from nodes of the autograd graph, going back to the inputs."""
    reached, visited, left = set(), set(), list(starts)
    while left:
        node = left.pop()
        if node in visited:
            continue
        visited.add(node)
        if node in nodes:
            reached.add(nodes[node])
        else:
            left.extend(parent for parent, _ in node.next_functions if parent is not None)
    return frozenset(reached)
