"""Layers: the modules of a model that hold a weight matrix, what each is for, and where the matrix is in memory.

They are read off the architecture itself, with or without weights, and no family is known by name. Mixtures of experts hold
the matrices of all experts in one parameter of three dimensions; each of these matrices is a layer too (see `experts`).
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from emp_llm.models.blocks import find_blocks
from emp_llm.models.checkpoint import Checkpoint

Kind = Literal["mlp", "attention", "router", "head", "embedding", "other"]

# Submodules of a block that mix tokens, by the words the field uses for them; the other linears of a block are its MLP.
_MIXES_TOKENS = re.compile(r"attn|attention|mixer|mamba|ssm|deltanet|recurrent|rwkv", re.IGNORECASE)
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
_OF_AN_EXPERT = re.compile(r"experts?\.\d+\.")


@dataclass(frozen=True)
class Slice:
    """Where an expert's matrix is in the model.

    Attributes:
        parameter: name of the three-dimensional parameter.
        expert: which of its matrices.
        transposed: these are (inputs, outputs).
        first, last: the outputs that are the layer's; two stored matrices may lie in one of the model's (gate and up).
        inputs: of the matrix.
    """

    parameter: str
    expert: int
    transposed: bool
    first: int
    last: int
    inputs: int


@dataclass(frozen=True)
class Layer:
    """A weight matrix of a model: name as in the model, what it is for, its block, and how its weight is stored.

    Attributes:
        name: of the module; of an expert's matrix, the module of the experts, its number, and its name in the checkpoint.
        kind: what it is for.
        block: number of its decoder block; None outside of them.
        transposed: its weight is stored as (inputs, outputs).
        expert: where in a parameter of all experts it is; None for a module's own weight.
    """

    name: str
    kind: Kind
    block: int | None
    transposed: bool = False
    expert: Slice | None = None

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def role(self) -> str:
        """The name within its block ("mlp.down_proj", "mlp.experts.*.w1"), which the layers of all blocks share."""
        name = re.sub(r"^.*?\.\d+\.", "", self.name) if self.block is not None else self.name
        return re.sub(r"\.\d+(?=\.|$)", ".*", name) if self.routed else name

    @property
    def routed(self) -> bool:
        """Whether it sees only the tokens that are routed to it."""
        return self.expert is not None or _OF_AN_EXPERT.search(self.name) is not None


def model_layers(model: PreTrainedModel, blocks: str | None = None) -> list[Layer]:
    """Every linear layer (nn.Linear and its subclasses, GPT-2's Conv1D) and embedding of a model, in its order."""
    path, _ = find_blocks(model, blocks)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = []
    for name, module in model.named_modules():
        inside = name.removeprefix(f"{path}.") if name.startswith(f"{path}.") else None
        if isinstance(module, nn.Embedding):
            layers.append(Layer(name, "embedding", None))
        elif isinstance(module, (nn.Linear, Conv1D)):
            if inside is None:
                layers.append(Layer(name, "head" if module is head else "other", None, isinstance(module, Conv1D)))
            else:
                kind = _kind_in_block(model, name, inside, module)
                layers.append(Layer(name, kind, int(inside.partition(".")[0]), isinstance(module, Conv1D)))
    return layers


def stored_layers(checkpoint: Checkpoint) -> list[Layer]:
    """The layers that the names in a checkpoint tell of, where no model class is to be had."""
    return [layer for name in checkpoint.tensors if (layer := _layer_from_name(checkpoint, name))]


def weight_of(model: nn.Module, layer: Layer) -> Tensor:
    """A layer's weight in a model, shape (outputs, inputs): a view, to be read or filled in place."""
    if layer.expert is None:
        weight: Tensor = model.get_submodule(layer.name).weight.data  # type: ignore[assignment]
        return weight.T if layer.transposed else weight
    matrix = model.get_parameter(layer.expert.parameter).data[layer.expert.expert]
    return (matrix.T if layer.expert.transposed else matrix)[layer.expert.first : layer.expert.last]


def is_router(name: str) -> bool:
    """Whether a stored tensor's name is that of a router's weight."""
    return name.removesuffix(".weight").rpartition(".")[2] in _ROUTER_NAMES


def inputs_of(model: nn.Module, layer: Layer) -> int:
    """How many input features a layer has; also where its weight is quantised or lies elsewhere."""
    if layer.expert is not None:
        return layer.expert.inputs
    module: Any = model.get_submodule(layer.name)
    return int(module.in_features if isinstance(module, nn.Linear) else module.weight.shape[0])


def _kind_in_block(model: PreTrainedModel, name: str, inside: str, module: nn.Linear | Conv1D) -> Kind:
    outputs, inputs = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
    if name.rpartition(".")[2] in _ROUTER_NAMES and outputs * 4 <= inputs:
        return "router"
    parts = inside.split(".")[1:]
    prefix = name.removesuffix("." + ".".join(parts))
    for part in parts[:-1]:
        prefix = f"{prefix}.{part}"
        if _MIXES_TOKENS.search(part) or _MIXES_TOKENS.search(type(model.get_submodule(prefix)).__name__):
            return "attention"
    return "mlp"


def _layer_from_name(checkpoint: Checkpoint, name: str) -> Layer | None:
    tensor = checkpoint.tensors[name]
    module, _, parameter = name.rpartition(".")
    if parameter != "weight" or len(tensor.shape) != 2:
        return None
    number = re.search(r"(?:^|\.)(\d+)\.", name)
    if number is None:
        is_head = module.rpartition(".")[2] in ("lm_head", "embed_out", "output")
        return Layer(module, "head" if is_head else "embedding", None)
    leaf = module.rpartition(".")[2]
    if leaf in _ROUTER_NAMES and tensor.shape[0] * 4 <= tensor.shape[1]:
        return Layer(module, "router", int(number[1]))
    return Layer(module, "attention" if _MIXES_TOKENS.search(module) else "mlp", int(number[1]))
