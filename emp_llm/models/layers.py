"""Layers: the weight matrices of a model, each with its purpose and its block. Imports neither
torch nor transformers.
"""

import re
from dataclasses import dataclass
from typing import Literal

from emp_llm.models.names import AUDIO, OF_AN_EXPERT, ROUTERS, VISION

Purpose = Literal["mlp", "attention", "router", "head", "embedding", "other"]
Tower = Literal["language", "vision", "audio"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ExpertSlice:
    """The position of an expert's matrix in the model.

    Attributes:
        parameter: name of the three-dimensional parameter.
        expert: index of the matrix in it.
        transposed: the matrices are stored as (inputs, outputs).
        first, last: the layer's outputs are first to last - 1; two stored matrices (gate and up)
            may form one of the model's.
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
        name: name of the module; for an expert, the module of all experts, the expert's number and
            the matrix's stored name.
        purpose: what the layer is part of: an MLP, attention, a router, ...
        block: number of its decoder block; None outside the blocks.
        transposed: its weight is stored as (inputs, outputs).
        expert: its position in a parameter that holds all experts; None for an ordinary layer.
        tower: the part of a multimodal model to which it belongs.
        block_list: label of its list of blocks ("encoder", "vision"), if the model has several;
            else empty.
        grouped: its weight is block-diagonal: groups of its outputs have inputs of their own. Such
            a layer is never pruned.
    """

    name: str
    purpose: Purpose
    block: int | None
    transposed: bool = False
    expert: ExpertSlice | None = None
    tower: Tower = "language"
    block_list: str = ""
    grouped: bool = False

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def role(self) -> str:
        """The name within its block ("mlp.down_proj", "mlp.experts.*.w1"), shared by the layers of
        all blocks.

        If the model has several lists of blocks, their label comes first ("encoder.fc1").
        """
        name = self.name
        if self.block is not None:
            name = re.sub(r"^.*?\.\d+\.", "", name)
            name = f"{self.block_list}.{name}" if self.block_list else name
        return re.sub(r"\.\d+(?=\.|$)", ".*", name) if self.routed else name

    @property
    def routed(self) -> bool:
        """Whether it sees only the tokens routed to it."""
        return self.expert is not None or OF_AN_EXPERT.search(self.name) is not None

    @property
    def parameter(self) -> str:
        """Name of the parameter that holds its weight."""
        return self.expert.parameter if self.expert is not None else f"{self.name}.weight"


def is_router(name: str, outputs: int, inputs: int) -> bool:
    """Whether a layer chooses experts: it is a router or part of one, or it has few outputs, and
    its name is a router's, or that of the module that holds it (gate, gate.wg).
    """
    parts = name.split(".")
    return "router" in parts or (outputs * 4 <= inputs and not ROUTERS.isdisjoint(parts[-2:]))


def named_tower(name: str) -> Tower | None:
    """The tower that a component of a name names ("visual.blocks.0.attn"); None if none does."""
    for component in name.split("."):
        if VISION.search(component):
            return "vision"
        if AUDIO.search(component):
            return "audio"
    return None


def within(name: str, root: str) -> bool:
    """Whether a module or parameter is another module, or a part of it; the root "" is the whole
    model.
    """
    return not root or name == root or name.startswith(f"{root}.")


def tower_of(others: dict[str, Tower], name: str) -> Tower:
    """The tower of a module or parameter; `others`: name of a module outside the language tower
    -> its tower.
    """
    return next((tower for root, tower in others.items() if within(name, root)), "language")
