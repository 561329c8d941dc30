"""The size of a model, from its config.json alone: of the weightless model that transformers builds from it."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.hub.local_model import find_config

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# The names of the number of experts that a token passes through, in the configs of mixtures.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts")
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Where the blocks of a family differ from those of the others.

    Attributes:
        norms: as wide as the hidden states; norms_of_heads: also one for queries and one for keys.
        qkv_bias: always; attention_bias, mlp_bias: whether its config has a switch of this name.
        names_head_dim: config.json must name it.
        tied: whether the head is, if config.json does not say.
    """

    norms: int = 2
    norms_of_heads: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    names_head_dim: bool = False
    tied: bool = False


_FAMILIES = {
    "llama": _Family(attention_bias=True, mlp_bias=True),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(norms_of_heads=True, attention_bias=True, names_head_dim=True),
    "gemma": _Family(attention_bias=True, names_head_dim=True, tied=True),
    "gemma2": _Family(norms=4, attention_bias=True, names_head_dim=True, tied=True),
    "gemma3_text": _Family(norms=4, norms_of_heads=True, attention_bias=True, names_head_dim=True, tied=True),
}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a model.

    Attributes:
        name: of the model, as the user gave it.
        parameters: number of all parameters; tied ones count once.
        embeddings: of the input embeddings and of the head; tied ones count once.
        head: weights that the logits of a token are computed with.
        in_blocks, largest_block: parameters of all decoder blocks, and of the largest.
        active: parameters of the blocks that a token passes through; fewer than `in_blocks` in a mixture of experts.
        layers: number of decoder blocks.
        hidden_size: width of the hidden states.
        shapes: (outputs, inputs, number) of the linear layers in blocks, each expert's among them.
        vocabulary: number of tokens.
        context: longest sequence in tokens; None if the config does not say.
        experts: of a block, for a mixture; else 0.
        dtype: of the checkpoint.
        fp8: the weights of the blocks are stored in 8 bits.
    """

    name: str
    parameters: int
    embeddings: int
    head: int
    in_blocks: int
    largest_block: int
    active: int
    layers: int
    hidden_size: int
    shapes: tuple[tuple[int, int, int], ...]
    vocabulary: int
    context: int | None
    experts: int
    dtype: str
    fp8: bool = False

    def bytes_of(self, parameters: int, dtype: str = "auto") -> int:
        """Bytes of a number of parameters in a dtype; "auto" is the checkpoint's."""
        return parameters * self.itemsize(dtype)

    def itemsize(self, dtype: str = "auto") -> int:
        """Bytes of a number."""
        return _BYTES[self.dtype if dtype == "auto" else dtype]

    def weight_bytes(self, dtype: str = "auto") -> int:
        """Bytes of all weights in the dtype in which the model runs."""
        return self.bytes_of(self.parameters, dtype)

    @property
    def widest_input(self) -> int:
        """Largest number of inputs of a linear layer in a block."""
        return max((inputs for _, inputs, _ in self.shapes), default=0)

    @property
    def file_bytes(self) -> int:
        """Bytes of the checkpoint."""
        return self.weight_bytes() - (self.in_blocks * (self.itemsize() - 1) if self.fp8 else 0)


@cache
def model_size(name: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelSize:
    """The size of a model, found once for each name. Of a Hub repository, only config.json is downloaded.

    Args:
        name: folder or Hub id.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run code from the model repository.

    Raises:
        UserError: there is no such model, its config.json is missing or cannot be fetched, or transformers cannot build it.
    """
    folder = find_config(name, revision, trust_remote_code)
    known = conventional_size(name, _config_in(folder))
    if known is not None:
        return known
    from emp_llm.models.loading import build_skeleton

    model = build_skeleton(folder, trust_remote_code)
    try:
        return size_of_skeleton(name, model)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def conventional_size(name: str, config: dict[str, Any]) -> ModelSize | None:
    """The size of a model of a known family, by arithmetic: importing transformers would take seconds.

    Args:
        name: of the model.
        config: the content of config.json.

    Returns:
        None for any other model, and if a field is missing.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    if config.get("model_type") == "llama" and config.get("num_key_value_heads") is None:
        config = config | {"num_key_value_heads": config.get("num_attention_heads")}  # as in the first Llama
    sizes = [config.get(key) for key in _FIELDS]
    if family is None or "auto_map" in config or config.get("quantization_config"):
        return None
    if not all(type(size) is int and size > 0 for size in sizes):
        return None
    hidden, inner, layers, heads, groups, vocabulary, context = (int(size or 0) for size in sizes)
    dim = config.get("head_dim") or (None if family.names_head_dim else hidden // heads)
    switches = [config.get(key, False) for key in ("attention_bias", "mlp_bias")]
    tied, dtype = config.get("tie_word_embeddings", family.tied), str(config.get("dtype") or config.get("torch_dtype"))
    if type(dim) is not int or not all(type(value) is bool for value in (*switches, tied)):
        return None
    queries, keys = heads * dim, groups * dim
    shapes = Counter([(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)])
    shapes.update([(inner, hidden), (inner, hidden), (hidden, inner)])
    biases = (queries + 2 * keys) * (family.qkv_bias or (family.attention_bias and switches[0]))
    biases += hidden * (family.attention_bias and switches[0]) + (2 * inner + hidden) * (family.mlp_bias and switches[1])
    block = sum(outputs * inputs * number for (outputs, inputs), number in shapes.items())
    block += biases + family.norms * hidden + (2 * dim if family.norms_of_heads else 0)
    table = vocabulary * hidden
    return ModelSize(
        name=name,
        parameters=layers * block + hidden + table * (1 if tied else 2),
        embeddings=table * (1 if tied else 2),
        head=table,
        in_blocks=layers * block,
        largest_block=block,
        active=layers * block,
        layers=layers,
        hidden_size=hidden,
        shapes=tuple((*shape, number * layers) for shape, number in shapes.items()),
        vocabulary=vocabulary,
        context=context,
        experts=0,
        dtype=dtype if dtype in _BYTES else "float32",
    )


def _config_in(folder: Path) -> dict[str, Any]:
    """The content of config.json; empty if it cannot be read."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def size_of_skeleton(name: str, model: "PreTrainedModel") -> ModelSize:
    """The size of a model of any family.

    Args:
        name: of the model.
        model: with or without weights.

    Raises:
        UserError: it has no decoder blocks.
    """
    from emp_llm.models.modules import block_lists, find_stacks, parameters_of
    from emp_llm.models.placement import max_context

    lists = block_lists(model).lists
    blocks = [block for each in lists for block in each.modules]
    text = model.config.get_text_config()
    stacks = find_stacks(model).values()
    shapes = _linear_shapes(blocks)
    for stack in stacks:
        shapes[stack.outputs, stack.inputs] += stack.shape[0]
    experts = max((stack.shape[0] for stack in stacks), default=0)
    chosen = next((getattr(text, key) for key in _CHOSEN if isinstance(getattr(text, key, None), int)), experts)
    in_stacks = sum(stack.shape[0] * stack.shape[1] * stack.shape[2] for stack in stacks)
    in_blocks = sum(parameters_of(each.modules) for each in lists)
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(table.weight): table.weight.numel() for table in tables if getattr(table, "weight", None) is not None}
    head = getattr(tables[1], "weight", None)
    return ModelSize(
        name=name,
        parameters=model.num_parameters(),
        embeddings=sum(weights.values()),
        head=0 if head is None else head.numel(),
        in_blocks=in_blocks,
        largest_block=max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks),
        active=in_blocks - (in_stacks * max(0, experts - chosen) // experts if experts else 0),
        layers=len(blocks),
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        shapes=tuple((*shape, number) for shape, number in shapes.items()),
        vocabulary=int(getattr(text, "vocab_size", 0) or 0),
        context=max_context(model.config),
        experts=experts,
        dtype=_dtype_of(model.config),
        fp8=_quantization(model.config) == "fp8",
    )


def _linear_shapes(blocks: "list[nn.Module]") -> Counter[tuple[int, int]]:
    """(outputs, inputs) of the linear layers of blocks, and how many there are of each."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    shapes: Counter[tuple[int, int]] = Counter()
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                shapes[module.out_features, module.in_features] += 1
            elif isinstance(module, Conv1D):
                shapes[module.weight.shape[1], module.weight.shape[0]] += 1
    return shapes


def _dtype_of(config: Any) -> str:
    """The dtype that a config names, or that of its text model; float32 if it names none, as transformers assumes."""
    for part in (config, config.get_text_config()):
        name = str(getattr(part, "dtype", None)).removeprefix("torch.")
        if name in _BYTES:
            return name
    return "float32"


def _quantization(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
