"""Models with conventional names and shapes: their structure is derived from the checkpoint, without transformers.

Importing transformers takes several times as long as pruning a small model. Most published models follow the conventions of
Llama in the names of their tensors and in the shapes that follow from config.json. For any other model the result is None, and
the model's class is used instead. Both ways give the same structure; `scripts/check_conventional.py` compares them for every
class of transformers.
"""

import re
from collections.abc import Iterator
from typing import Any

from emp_llm.architecture.layers import Layer
from emp_llm.architecture.structure import Shape, Structure
from emp_llm.checkpoint.checkpoint import Checkpoint

_BLOCKS = "model.layers"
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_ATTENTION = (("q_proj", "k_proj", "v_proj", "o_proj"), ("o_proj", "qkv_proj"))  # in the order of the modules
_MLP = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
_IN_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_MORE_NORMS = (
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
)


def conventional_structure(checkpoint: Checkpoint, blocks: str | None = None) -> Structure | None:
    """The structure of a checkpoint that follows the conventions in every name and shape; None for any other.

    Args:
        checkpoint: the model.
        blocks: name of the list of decoder blocks, if given by the user.
    """
    sizes = _sizes(checkpoint.config)
    if sizes is None or blocks not in (None, _BLOCKS):
        return None
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    tied = checkpoint.config.get("tie_word_embeddings") is True
    outside = {name for name in shapes if not _IN_BLOCK.fullmatch(name)}
    if outside - {_HEAD} != {_EMBEDDING, _NORM} or (_HEAD not in outside and not tied):
        return None
    roles = _roles(shapes, sizes)
    if roles is None:
        return None
    for name in outside - {_NORM}:
        if shapes[name] != (sizes["vocab"], sizes["hidden"]):
            return None
    layers = [Layer("model.embed_tokens", "embedding", None)]
    for block in range(sizes["layers"]):
        for role in roles:
            layers.append(Layer(f"{_BLOCKS}.{block}.{role}", "attention" if role.startswith("self_attn") else "mlp", block))
    layers.append(Layer("lm_head", "head", None))
    names = {name: name for name in shapes}
    names.setdefault(_HEAD, _EMBEDDING)  # tied
    return Structure(layers, names, {name: shape for name, shape in shapes.items() if _IN_BLOCK.fullmatch(name)})


def _sizes(config: dict[str, Any]) -> dict[str, int] | None:
    """The sizes in config.json; None if it is not conventional."""
    names = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "inner": "intermediate_size",
        "heads": "num_attention_heads",
        "layers": "num_hidden_layers",
    }
    sizes = {name: config.get(key) for name, key in names.items()}
    classes = config.get("architectures")
    is_causal = isinstance(classes, list) and len(classes) == 1 and str(classes[0]).endswith("ForCausalLM")
    if not is_causal or "auto_map" in config or "model_type" not in config:
        return None
    sizes["groups"] = config.get("num_key_value_heads") or sizes["heads"]
    valid = {name: size for name, size in sizes.items() if type(size) is int and size > 0}
    if valid.keys() != sizes.keys():
        return None
    head = config.get("head_dim") or valid["hidden"] // valid["heads"]
    return valid | {"head": head} if type(head) is int else None


def _roles(shapes: dict[str, Shape], sizes: dict[str, int]) -> list[str] | None:
    """The linear layers of a block, in the order of its modules; None if blocks differ or are not conventional."""
    blocks: dict[int, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        match = _IN_BLOCK.fullmatch(name)
        if match is not None:
            blocks.setdefault(int(match[1]), {})[match[2]] = shape
    first = blocks.get(0)
    if first is None or sorted(blocks) != list(range(sizes["layers"])) or any(block != first for block in blocks.values()):
        return None
    attention = next((names for names in _ATTENTION if f"self_attn.{names[0]}.weight" in first and _has(first, names)), None)
    mlp = next((names for names in _MLP if f"mlp.{names[0]}.weight" in first), None)
    if attention is None or mlp is None or not all(norm in first for norm in _NORMS):
        return None
    roles = [*(f"self_attn.{name}" for name in attention), *(f"mlp.{name}" for name in mlp)]
    expected = dict(_expected(roles, sizes))
    known = {*(f"{role}.{leaf}" for role in roles for leaf in ("weight", "bias")), *_NORMS, *_MORE_NORMS}
    fits = all(first.get(f"{role}.weight") == shape for role, shape in expected.items())
    return roles if fits and first.keys() <= known else None


def _has(block: dict[str, Shape], names: tuple[str, ...]) -> bool:
    return all(f"self_attn.{name}.weight" in block for name in names)


def _expected(roles: list[str], sizes: dict[str, int]) -> Iterator[tuple[str, Shape]]:
    """(role, shape) of each linear layer of a block."""
    hidden, inner, head = sizes["hidden"], sizes["inner"], sizes["head"]
    queries, groups = sizes["heads"] * head, sizes["groups"] * head
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (groups, hidden),
        "v_proj": (groups, hidden),
        "qkv_proj": (queries + 2 * groups, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }
    return ((role, shapes[role.rpartition(".")[2]]) for role in roles)
