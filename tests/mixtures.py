"""Layers of any tiny model, including the matrices of experts: loaded, read and observed without
the package.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PreTrainedModel

# For each stored matrix of an expert, the parameter of transformers that holds it, and the half of
# its rows.
PARTS = {
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
}


def load(folder: Path) -> PreTrainedModel:
    """Load a model as a user does; the experts of a mixture run one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.config._experts_implementation = "eager"
    return model


def weight(model: PreTrainedModel, layer: str, transposed: bool) -> Tensor:
    """A view of a layer's weight, with one output per row."""
    *path, number, leaf = layer.split(".")
    if path[-1] != "experts":
        found = model.get_submodule(layer).weight.data
        return found.T if transposed else found
    name, half = PARTS[leaf]
    matrix = model.get_parameter(".".join([*path, name])).data[int(number)]
    return matrix.chunk(2)[half] if name == "gate_up_proj" else matrix


def watch(
    model: PreTrainedModel,
    layers: list[str],
    sums: dict[str, Tensor],
    relative: dict[str, Tensor] | None = None,
) -> list[RemovableHandle]:
    """Add up the squares of these layers' inputs, in float64; and in `relative` those divided by
    the square of the output.
    """
    handles = []
    both = (sums, {} if relative is None else relative)
    for path in dict.fromkeys(layer.rsplit(".", 2)[0] for layer in layers):
        if path.endswith(".experts"):
            leaves = {layer.rpartition(".")[2] for layer in layers if layer.startswith(f"{path}.")}
            handles.append(
                model.get_submodule(path).register_forward_pre_hook(
                    _see_experts(both, path, leaves)
                )
            )
    for layer in layers:
        if ".experts." not in layer:
            handles.append(model.get_submodule(layer).register_forward_hook(_see(both, layer)))
    return handles


def add_squares(
    sums: tuple[dict[str, Tensor], dict[str, Tensor]], layer: str, inputs: Tensor, outputs: Tensor
) -> None:
    """Add the squares of the inputs of tokens, and those divided by the squares of the outputs,
    unless these are zero.
    """
    squares = inputs.double().flatten(0, -2).square()
    sizes = outputs.double().flatten(0, -2).square().sum(1, keepdim=True)
    counts = sizes[:, 0] > 0
    for total, values in zip(sums, (squares, squares[counts] / sizes[counts]), strict=True):
        total[layer] = total.get(layer, 0) + values.sum(0)


def _see(sums: tuple[dict[str, Tensor], dict[str, Tensor]], layer: str) -> Callable[..., None]:
    return lambda module, inputs, output: add_squares(sums, layer, inputs[0], output)


def _see_experts(
    sums: tuple[dict[str, Tensor], dict[str, Tensor]], path: str, leaves: set[str]
) -> Callable[..., None]:
    """A hook that adds the tokens routed to each expert, and the outputs of its gate for them."""

    def see(module: Any, given: tuple[Tensor, ...]) -> None:
        hidden = given[0]
        chosen = given[1]
        for expert in range(len(module.gate_up_proj)):
            tokens = hidden[(chosen == expert).any(-1)]
            gate, up = nn.functional.linear(tokens, module.gate_up_proj[expert]).chunk(2, -1)
            middle = module.act_fn(gate) * up
            for leaf in leaves:
                name, half = PARTS[leaf]
                inputs = tokens
                outputs = (gate, up)[half]
                if name == "down_proj":
                    inputs = middle
                    outputs = nn.functional.linear(middle, module.down_proj[expert])
                add_squares(sums, f"{path}.{expert}.{leaf}", inputs, outputs)

    return see
