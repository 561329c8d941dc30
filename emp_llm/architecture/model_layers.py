"""The layers of a model, derived from its modules, with or without weights.

The matrices of all experts of a mixture lie in one parameter of three dimensions. Each of them is a layer too (see `experts`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from emp_llm.architecture.blocks import block_lists
from emp_llm.architecture.layers import MIXES_TOKENS, ROUTER_NAMES, Kind, Layer


def model_layers(model: PreTrainedModel, blocks: str | None = None) -> list[Layer]:
    """All linear layers (nn.Linear and its subclasses, GPT-2's Conv1D) and embeddings of a model, in its order."""
    towers = block_lists(model, blocks)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            layers.append(Layer(name, "embedding", None, tower=towers.of(name)))
        elif isinstance(module, (nn.Linear, Conv1D)):
            place, transposed = towers.place(name), isinstance(module, Conv1D)
            if place is None:
                kind: Kind = "head" if module is head else "other"
                layers.append(Layer(name, kind, None, transposed, tower=towers.of(name)))
            else:
                own_list, block, inside = place
                kind = _kind_in_block(model, name, inside, module)
                layers.append(Layer(name, kind, block, transposed, tower=own_list.tower, part=own_list.part))
    return layers


def weight_of(model: nn.Module, layer: Layer) -> Tensor:
    """A layer's weight in a model, shape (outputs, inputs): a view that can be changed in place."""
    if layer.expert is None:
        weight: Tensor = model.get_submodule(layer.name).weight.data  # type: ignore[assignment]
        return weight.T if layer.transposed else weight
    matrix = model.get_parameter(layer.expert.parameter).data[layer.expert.expert]
    return (matrix.T if layer.expert.transposed else matrix)[layer.expert.first : layer.expert.last]


def bias_of(model: nn.Module, layer: Layer) -> Tensor | None:
    """A layer's bias in a model, shape (outputs,); None for a layer without one, and for experts."""
    bias = None if layer.expert is not None else getattr(model.get_submodule(layer.name), "bias", None)
    return bias.data if isinstance(bias, Tensor) else None


def set_to_zero(weight: Tensor, removed: Tensor) -> None:
    """Set weights to zero, in place; `removed` is bool, of the same shape. torch cannot fill FP8, so its bits are filled."""
    (weight.view(torch.int8) if weight.element_size() == 1 else weight).masked_fill_(removed, 0)


def inputs_of(model: nn.Module, layer: Layer) -> int:
    """Number of a layer's input features, even if its weight is quantised or offloaded."""
    if layer.expert is not None:
        return layer.expert.inputs
    module: Any = model.get_submodule(layer.name)
    return int(module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0])


def _kind_in_block(model: PreTrainedModel, name: str, inside: str, module: nn.Linear | Conv1D) -> Kind:
    outputs, inputs = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
    if name.rpartition(".")[2] in ROUTER_NAMES and outputs * 4 <= inputs:
        return "router"
    parts = inside.split(".")
    prefix = name.removesuffix("." + ".".join(parts))
    for part in parts[:-1]:
        prefix = f"{prefix}.{part}"
        if MIXES_TOKENS.search(part) or MIXES_TOKENS.search(type(model.get_submodule(prefix)).__name__):
            return "attention"
    return "mlp"
