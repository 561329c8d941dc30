"""Layers: the weight matrices of a model, each with its purpose and its decoder block."""

import re
from dataclasses import dataclass
from typing import Literal

from emp_llm.checkpoint.checkpoint import Checkpoint

Kind = Literal["mlp", "attention", "router", "head", "embedding", "other"]

# Names of submodules that mix tokens. The other linear layers of a block are its MLP.
MIXES_TOKENS = re.compile(r"attn|attention|mixer|mamba|(?<![a-z])ssm|deltanet|recurrent|rwkv", re.IGNORECASE)
ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
# Lookup tables, in a block or outside: relative position biases, position embeddings.
_TABLES = re.compile(r"(^|_)(bias|embed|embeddings?)$|^embed_|^w[tp]e$", re.IGNORECASE)
_OF_AN_EXPERT = re.compile(r"experts?\.\d+\.")


@dataclass(frozen=True)
class ExpertSlice:
    """The position of an expert's matrix in the model.

    Attributes:
        parameter: name of the three-dimensional parameter.
        expert: index of the matrix in it.
        transposed: the matrices are stored as (inputs, outputs).
        first, last: the layer's outputs are first to last - 1; two stored matrices (gate and up) may form one of the model's.
        inputs: number of inputs.
    """

    parameter: str
    expert: int
    transposed: bool
    first: int
    last: int
    inputs: int


@dataclass(frozen=True)
class Layer:
    """A weight matrix of a model.

    Attributes:
        name: of the module; for an expert, the module of all experts, the expert's number and the matrix's stored name.
        kind: its purpose.
        block: number of its decoder block; None outside the blocks.
        transposed: its weight is stored as (inputs, outputs).
        expert: its position in a parameter that holds all experts; None for an ordinary layer.
    """

    name: str
    kind: Kind
    block: int | None
    transposed: bool = False
    expert: ExpertSlice | None = None

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def role(self) -> str:
        """The name within its block ("mlp.down_proj", "mlp.experts.*.w1"), shared by the layers of all blocks."""
        name = re.sub(r"^.*?\.\d+\.", "", self.name) if self.block is not None else self.name
        return re.sub(r"\.\d+(?=\.|$)", ".*", name) if self.routed else name

    @property
    def routed(self) -> bool:
        """Whether it sees only the tokens routed to it."""
        return self.expert is not None or _OF_AN_EXPERT.search(self.name) is not None

    @property
    def parameter(self) -> str:
        """Name of the parameter that holds its weight."""
        return self.expert.parameter if self.expert is not None else f"{self.name}.weight"


def is_router(name: str) -> bool:
    """Whether a stored tensor's name is that of a router's weight."""
    return name.removesuffix(".weight").rpartition(".")[2] in ROUTER_NAMES


def stored_layers(checkpoint: Checkpoint) -> list[Layer]:
    """The layers derived from a checkpoint's tensor names, for models without a known class."""
    return [layer for name in checkpoint.tensors if (layer := _layer_from_name(checkpoint, name))]


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
    if _TABLES.search(leaf):
        return Layer(module, "embedding", None)
    if leaf in ROUTER_NAMES and tensor.shape[0] * 4 <= tensor.shape[1]:
        return Layer(module, "router", int(number[1]))
    return Layer(module, "attention" if MIXES_TOKENS.search(module) else "mlp", int(number[1]))
