"""The names by which layers are known, of all families. Imports neither torch nor transformers.

A leaf is the last component of a layer's name. Tables of fields of config.json lie with what reads
the fields.
"""

import re
from dataclasses import dataclass
from typing import Literal

# Submodules that mix tokens. The other linear layers of a block are its MLP.
MIXES_TOKENS = re.compile(
    r"attn|attention|mixer|mamba|(?<![a-z])ssm|deltanet|recurrent|rwkv", re.IGNORECASE
)
IS_MLP = re.compile(r"(mlp|feedforward)$", re.IGNORECASE)  # a class of which this is the end

# Leaves of attention.
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
JOINED = ("qkv_proj", "c_attn")  # all queries, then all keys, then all values
JOINED_BY_GROUP = ("query_key_value",)  # for each group of heads its queries, its key and its value
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")

# Leaves of MLPs and mixtures of experts.
GATE_AND_UP = ("gate_up_proj",)  # all gates, then all features
ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))
OF_AN_EXPERT = re.compile(r"experts?\.\d+\.")

# A component of the name of layers that predict a second token.
SECOND_TOKEN = re.compile(r"(^|\.)(mtp|nextn)(_\w+)?\.", re.IGNORECASE)

# Of a model in an adapter of PEFT, and of one in a wrapper of torch.
IN_ADAPTER = re.compile(
    r"^base_model\.model\.|(^|\.)(base_layer|lora_[AB]|original_module|modules_to_save)(\.|$)"
)
IN_WRAPPER = re.compile(
    r"^module\.|(^|\.)(_orig_mod|_(fsdp|checkpoint)_wrapped_module|_forward_module)\."
)

# Leaves that write to the residual stream.

# Outside of blocks, but for relative position biases.
EMBEDDINGS = re.compile(r"(^|_)(bias|embed|embeddings?)$|^embed_|^w[tp]e$", re.IGNORECASE)
HEADS = re.compile(r"(^|[._])(lm_?heads?|unembed|embed_out)([._]|$)", re.IGNORECASE)
HEAD_LEAVES = ("lm_head", "embed_out", "output")

# Parts of names that tell an encoder of images or sound, and what connects it with the decoder.
VISION = re.compile(
    r"(^|_)(vision|visual|image|images|video|vit|vqmodel|vqvae|pixel)(_|$)", re.IGNORECASE
)
AUDIO = re.compile(r"(^|_)(audio|speech|sound|acoustic)(_|$)", re.IGNORECASE)
CONNECTS = re.compile(r"projector|connector|aligner|multi_modal", re.IGNORECASE)
HALF = re.compile(r"(?:^|\.)(encoder|decoder)(?=\.|$)")

# Llama's conventions, which most published models follow in every name.
LLAMA_BLOCKS = "model.layers"
LLAMA_EMBEDDING = "model.embed_tokens"
LLAMA_NORM = "model.norm"
LLAMA_HEAD = "lm_head"
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_MORE_NORMS = (
    "self_attn.q_norm",
    "self_attn.k_norm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# Apart or joined, in the order of the modules.
LLAMA_ATTENTION = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ("self_attn.o_proj", "self_attn.qkv_proj"),
)
LLAMA_MLP = (
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ("mlp.gate_up_proj", "mlp.down_proj"),
)


# Layers: the weight matrices of a model, each with its purpose and its block. Imports neither
# torch nor transformers.


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
