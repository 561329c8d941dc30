"""Targets: which weights may be pruned, what they are called in the checkpoint, and how they lie there.

The layers are read off the architecture itself, built on the meta device without weights. Where no model class is to be had
(magnitude methods do not need one), the names in the checkpoint have to do.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from emp_llm.models.blocks import find_blocks
from emp_llm.models.checkpoint import TORCH_DTYPES, Checkpoint, Matrix
from emp_llm.models.errors import UserError, reason
from emp_llm.models.experts import find_stacks
from emp_llm.models.layers import Kind, Layer, is_router, model_layers, stored_layers
from emp_llm.models.names import find_names

logger = logging.getLogger(__name__)

_SCOPES: dict[str, tuple[Kind, ...]] = {
    "mlp": ("mlp",),
    "attention": ("attention",),
    "all-linear": ("mlp", "attention", "other"),
}
_NAMES_ONLY = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")


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
        targets, matrices: how many of the matrices in decoder blocks are targets; how many there are (of a tensor with a
            matrix for each expert, each one counts).
        target_parameters, parameters: weights of the targets; parameters of the checkpoint.
        block_parameters: weights of the matrices in decoder blocks.
        unreachable: parameters of blocks that hold matrices of which no target can be made; routers, which nobody wants to
            prune, are left out.
        unreachable_parameters: how many weights these hold.
    """

    targets: int
    matrices: int
    target_parameters: int
    parameters: int
    block_parameters: int
    unreachable: tuple[str, ...]
    unreachable_parameters: int

    @property
    def unreachable_share(self) -> float:
        """Of the weights in decoder blocks."""
        return self.unreachable_parameters / self.block_parameters if self.block_parameters else 0.0

    def check(self, targets: str | list[str], allow_partial: bool) -> None:
        """Say what a scope leaves out because it cannot be reached.

        Raises:
            UserError: it is more than half of the blocks, and that was not allowed.
        """
        if targets not in ("mlp", "all-linear") or self.unreachable_share < 0.01:
            return
        left = (
            f"{100 * self.unreachable_share:.0f} % of the weights in decoder blocks are of no layer that can be pruned "
            f"({_some(self.unreachable)})"
        )
        if self.unreachable_share > 0.5 and not allow_partial:
            raise UserError(f"{left}. To prune the others only, add --allow-partial.")
        logger.warning("warning: %s; they stay dense.", left)


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
        self.blocks = blocks
        self._of_experts: dict[str, Matrix] = {}
        if model is None:
            self.layers = stored_layers(checkpoint)
            self.stored_names = {f"{layer.name}.weight": f"{layer.name}.weight" for layer in self.layers}
        else:
            found = find_names(model, checkpoint, find_stacks(model, blocks))
            self.stored_names, self._of_experts = found.names, found.matrices
            self.layers = _in_order(model, model_layers(model, blocks) + found.experts)

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
        found: dict[tuple[str, int | None], Target] = {}
        for layer in chosen:
            matrix = self._matrix(layer)
            if matrix is None:
                continue
            place = matrix.stored.name, matrix.expert
            if place in found:
                logger.warning("%s shares its weight with %s; pruned once.", layer.name, found[place].name)
                continue
            if layer.kind == "head" and matrix.stored.name in self._stored_embeddings:
                logger.warning("warning: %s is tied to the embeddings (%s); both change.", layer.name, matrix.stored.name)
            found[place] = Target(layer, matrix)
        if not found:
            roles = sorted({layer.role for layer in self.layers if layer.block is not None})
            raise UserError(
                f"--targets {targets!r}{f' without {ignore!r}' if ignore else ''} match nothing in "
                f"{self.checkpoint.folder}. The layers of its blocks are: {', '.join(roles) or 'none'}."
                + (f" Of these there are no layers: {_some(self._unreachable)}." if self._unreachable else "")
            )
        return list(found.values())

    def coverage(self, targets: list[Target]) -> Coverage:
        """How much of the model these targets are."""
        of_blocks = [target for target in targets if target.layer.block is not None]
        return Coverage(
            targets=len(targets),
            matrices=sum(number for number, _ in self._in_blocks.values()) + len(targets) - len(of_blocks),
            target_parameters=sum(target.matrix.numel for target in targets),
            parameters=self.checkpoint.parameters,
            block_parameters=sum(weights for _, weights in self._in_blocks.values()),
            unreachable=self._unreachable,
            unreachable_parameters=sum(self._in_blocks[name][1] for name in self._unreachable),
        )

    def _matrix(self, layer: Layer) -> Matrix | None:
        if layer.expert is not None:
            matrix = self._of_experts[layer.name]
        else:
            stored_name = self.stored_names.get(f"{layer.name}.weight")
            if stored_name is None:
                logger.warning("%s: its weight is not in the checkpoint under a name of its own; left dense.", layer.name)
                return None
            matrix = Matrix(self.checkpoint.tensors[stored_name], layer.transposed)
        stored = matrix.stored
        if stored.dtype not in TORCH_DTYPES or len(stored.shape) != (2 if matrix.expert is None else 3):
            raise UserError(
                f"{stored.shard}: {stored.name} is stored as {stored.dtype} {list(stored.shape)}; only 16-, 32- and 64-bit "
                "floating-point matrices can be pruned. Prune the original model and quantise the result."
            )
        shape = stored.shape
        if self.model is not None and layer.expert is None:
            shape = tuple(self.model.get_parameter(f"{layer.name}.weight").shape)
        if shape != stored.shape:
            raise UserError(
                f"{self.checkpoint.folder}: config.json makes {layer.name} {list(shape)}, the checkpoint stores "
                f"{list(stored.shape)}; they are not of one model."
            )
        return matrix

    @cached_property
    def _stored_embeddings(self) -> set[str | None]:
        return {self.stored_names.get(f"{layer.name}.weight") for layer in self.layers if layer.kind == "embedding"}

    @cached_property
    def _in_blocks(self) -> dict[str, tuple[int, int]]:
        """Name -> number of matrices, and of weights, of each parameter of the decoder blocks that holds matrices."""
        layers = Counter(_parameter(layer) for layer in self.layers if layer.block is not None)
        shapes = {name: tensor.shape for name, tensor in self.checkpoint.tensors.items() if re.search(r"(^|\.)\d+\.", name)}
        if self.model is not None:
            path, blocks = find_blocks(self.model, self.blocks)
            shapes = {f"{path}.{name}": tuple(parameter.shape) for name, parameter in blocks.named_parameters()}
        return {
            name: (layers[name] or math.prod(shape[:-2]), math.prod(shape))
            for name, shape in shapes.items()
            if len(shape) >= 2 and min(shape) > 1 and "bias" not in name.rpartition(".")[2]
        }

    @cached_property
    def _unreachable(self) -> tuple[str, ...]:
        reached = {_parameter(layer) for layer in self.layers if layer.expert or f"{layer.name}.weight" in self.stored_names}
        return tuple(name for name in self._in_blocks if name not in reached and not is_router(name))


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


def _parameter(layer: Layer) -> str:
    """Name of the parameter that a layer's weight is in."""
    return layer.expert.parameter if layer.expert is not None else f"{layer.name}.weight"


def _in_order(model: PreTrainedModel, layers: list[Layer]) -> list[Layer]:
    """Layers in the order of the parameters they are in; those of one stack by their experts."""
    order = {name: number for number, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return sorted(layers, key=lambda layer: order.get(_parameter(layer), len(order)))


def _some(names: Sequence[str], number: int = 3) -> str:
    listed = ", ".join(names[:number])
    return listed if len(names) <= number else f"{listed} and {len(names) - number} more"


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
