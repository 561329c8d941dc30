"""Targets: which weights may be pruned, what they are called in the checkpoint, and how they lie there.

The layers are read off the architecture itself, built on the meta device without weights. Where no model class is to be had
(magnitude methods do not need one), the names in the checkpoint have to do.
"""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from emp_llm.models.blocks import find_blocks
from emp_llm.models.checkpoint import TORCH_DTYPES, Checkpoint, Matrix, StoredTensor
from emp_llm.models.errors import UserError, reason

logger = logging.getLogger(__name__)

Kind = Literal["mlp", "attention", "router", "head", "embedding", "other"]

# Submodules of a block that mix tokens, by the words the field uses for them; the other linears of a block are its MLP.
_MIXES_TOKENS = re.compile(r"attn|attention|mixer|mamba|ssm|deltanet|recurrent|rwkv", re.IGNORECASE)
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
_SCOPES: dict[str, tuple[Kind, ...]] = {
    "mlp": ("mlp",),
    "attention": ("attention",),
    "all-linear": ("mlp", "attention", "other"),
}
_NAMES_ONLY = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")


@dataclass(frozen=True)
class Layer:
    """A module with a weight matrix: name as in the model, what it is for, its block, and how its weight is laid."""

    name: str
    kind: Kind
    block: int | None
    transposed: bool = False

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def role(self) -> str:
        """The name within its block ("mlp.down_proj"), which the layers of all blocks share."""
        return re.sub(r"^.*?\.\d+\.", "", self.name) if self.block is not None else self.name


@dataclass(frozen=True)
class Target:
    """A layer whose weight is to be pruned, and where the weight lies."""

    layer: Layer
    matrix: Matrix

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True)
class Coverage:
    """How much of a model the targets are.

    Attributes:
        targets, matrices: how many of the matrices in decoder blocks are targets; how many there are.
        target_parameters, parameters: weights of the targets; parameters of the checkpoint.
        unreachable: names of matrices in blocks that no linear layer stands for (mixture-of-experts weights).
        unreachable_parameters: how many weights these hold.
    """

    targets: int
    matrices: int
    target_parameters: int
    parameters: int
    unreachable: tuple[str, ...]
    unreachable_parameters: int


class Architecture:
    """The layers of a checkpoint's model and their names in the checkpoint.

    Args:
        checkpoint: the model.
        model: its skeleton, or the model itself; None: go by the names in the checkpoint.
        blocks: name of the list of decoder blocks; None: found by structure.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel | None, blocks: str | None = None) -> None:
        self.checkpoint = checkpoint
        self.model = model
        if model is None:
            self.layers = [layer for name in checkpoint.tensors if (layer := _layer_from_name(checkpoint, name))]
            self.stored_names = {f"{layer.name}.weight": f"{layer.name}.weight" for layer in self.layers}
        else:
            self.layers = model_layers(model, blocks)
            self.stored_names = _stored_names(model, checkpoint)

    def select(self, targets: str | list[str], ignore: str | list[str] | None = None) -> list[Target]:
        """The targets that a specification names, in the model's order.

        Args:
            targets: "mlp", "attention", "all-linear"; name suffixes, as a list or separated by commas; or a regular
                expression that the whole module name must match. Heads and embeddings only where their name is written.
            ignore: suffixes or a regular expression of modules to leave out.

        Raises:
            UserError: nothing matches, a regular expression is malformed, or a weight is not in the checkpoint as a
                16-, 32- or 64-bit floating-point matrix.
        """
        chosen = [layer for layer in self.layers if _matches(layer, targets)]
        if ignore:
            chosen = [layer for layer in chosen if not _named(layer, ignore)]
        found: dict[str, Target] = {}
        for layer in chosen:
            matrix = self._matrix(layer)
            if matrix is None:
                continue
            if matrix.stored.name in found:
                logger.warning("%s shares its weight with %s; pruned once.", layer.name, found[matrix.stored.name].name)
                continue
            if layer.kind == "head" and matrix.stored.name in self._stored_embeddings:
                logger.warning("warning: %s is tied to the embeddings (%s); both change.", layer.name, matrix.stored.name)
            found[matrix.stored.name] = Target(layer, matrix)
        if not found:
            roles = sorted({layer.role for layer in self.layers if layer.block is not None})
            raise UserError(
                f"--targets {targets!r}{f' without {ignore!r}' if ignore else ''} match nothing in "
                f"{self.checkpoint.folder}. The layers of its blocks are: {', '.join(roles) or 'none'}."
                + (" Its mixture-of-experts weights are not covered." if self._unreachable else "")
            )
        return list(found.values())

    def coverage(self, targets: list[Target]) -> Coverage:
        """How much of the model these targets are."""
        own = {target.matrix.stored.name for target in targets}
        in_blocks = [tensor for tensor in self._block_matrices if tensor.name not in own]
        missed = self._unreachable
        return Coverage(
            targets=len(targets),
            matrices=len(targets) + len(in_blocks),
            target_parameters=sum(target.matrix.stored.numel for target in targets),
            parameters=self.checkpoint.parameters,
            unreachable=tuple(tensor.name for tensor in missed),
            unreachable_parameters=sum(tensor.numel for tensor in missed),
        )

    def _matrix(self, layer: Layer) -> Matrix | None:
        stored_name = self.stored_names.get(f"{layer.name}.weight")
        if stored_name is None:
            logger.warning("%s: its weight is not in the checkpoint under a name of its own; left dense.", layer.name)
            return None
        stored = self.checkpoint.tensors[stored_name]
        if stored.dtype not in TORCH_DTYPES or len(stored.shape) != 2:
            raise UserError(
                f"{stored.shard}: {stored_name} is stored as {stored.dtype} {list(stored.shape)}; only 16-, 32- and 64-bit "
                "floating-point matrices can be pruned. Prune the original model and quantise the result."
            )
        shape = tuple(self.model.get_parameter(f"{layer.name}.weight").shape) if self.model is not None else stored.shape
        if shape != stored.shape:
            raise UserError(
                f"{self.checkpoint.folder}: config.json makes {layer.name} {list(shape)}, the checkpoint stores "
                f"{list(stored.shape)}; they are not of one model."
            )
        return Matrix(stored, layer.transposed)

    @cached_property
    def _stored_embeddings(self) -> set[str | None]:
        return {self.stored_names.get(f"{layer.name}.weight") for layer in self.layers if layer.kind == "embedding"}

    @cached_property
    def _block_matrices(self) -> list[StoredTensor]:
        """Stored tensors of two or more dimensions inside decoder blocks."""
        of_block = re.compile(r"(^|\.)\d+\.")
        heads = {self.stored_names.get(f"{layer.name}.weight") for layer in self.layers if layer.block is None}
        return [
            tensor
            for name, tensor in self.checkpoint.tensors.items()
            if len(tensor.shape) >= 2 and of_block.search(name) and name not in heads and min(tensor.shape) > 1
        ]

    @cached_property
    def _unreachable(self) -> list[StoredTensor]:
        reached = {self.stored_names.get(f"{layer.name}.weight") for layer in self.layers}
        return [t for t in self._block_matrices if t.name not in reached and re.search(r"experts?\.", t.name)]


def build_skeleton(folder: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder's config.json on the meta device: all its modules, no weights.

    Raises:
        UserError: no config.json, or no causal language model class that transformers knows for it.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json, so its architecture is unknown. Copy it from the original model.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        hint = "" if trust_remote_code else " If its code is in the repository and you trust it, add --trust-remote-code."
        raise UserError(f"{folder}: transformers knows no causal language model for it ({reason(error)}).{hint}") from error


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


def _stored_names(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the model -> name in the checkpoint, for weights that are stored one to one."""
    own = dict(model.named_parameters(remove_duplicate=False))
    prefix = getattr(model, "base_model_prefix", "")
    names: dict[str, str] = {}
    renamed: list[str] = []
    for key in checkpoint.tensors:
        for candidate in (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")):
            if candidate in own:
                names[candidate] = key
                break
        else:
            renamed.append(key)
    names.update(_converted_names(model, renamed, own))
    first_of = {id(own[name]): key for name, key in names.items()}
    for name, parameter in own.items():  # tied weights are stored once and known by two names
        if name not in names and id(parameter) in first_of:
            names[name] = first_of[id(parameter)]
    return names


def _converted_names(model: PreTrainedModel, keys: Iterable[str], own: dict[str, nn.Parameter]) -> dict[str, str]:
    """What transformers renames while loading (it stores GPT-NeoX's lm_head as embed_out), read from its own tables."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # the tables of another transformers: names that differ stay unknown, and are reported so
        return {}
    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    names = {}
    for key in keys:
        renamed, merged = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if merged is None and renamed in own:
            names[renamed] = key
    return names


def _matches(layer: Layer, targets: str | list[str]) -> bool:
    if isinstance(targets, str) and targets in _SCOPES:
        return layer.kind in _SCOPES[targets]
    if not _named(layer, targets):
        return False
    written = targets if isinstance(targets, str) else ",".join(targets)
    in_so_many_words = re.search(rf"(?<!\w){re.escape(layer.leaf)}(?!\w)", written) is not None
    return layer.kind not in ("head", "embedding", "router") or in_so_many_words


def _named(layer: Layer, names: str | list[str]) -> bool:
    """PEFT's rule: a list names suffixes, a string is a regular expression for the whole name; plain words are a list."""
    if isinstance(names, str) and not _NAMES_ONLY.fullmatch(names):
        try:
            return re.fullmatch(names, layer.name) is not None
        except re.error as error:
            raise UserError(f"--targets or --ignore {names!r} is not a regular expression ({error}).") from error
    suffixes = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    return any(layer.name == suffix or layer.name.endswith(f".{suffix}") for suffix in suffixes)
