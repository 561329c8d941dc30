"""The names of a model's weights in its checkpoint, where transformers renames, merges or turns them while loading.

What it does is read from its own tables, and followed where it is a new name, experts stacked into one parameter (one after
another, gate before up), or a stack turned round. A tensor that goes through anything else is left alone.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from emp_llm.models.checkpoint import Checkpoint, Matrix
from emp_llm.models.experts import Stack
from emp_llm.models.layers import Layer, Slice

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class StoredNames:
    """Where the weights of a model are in a checkpoint.

    Attributes:
        names: parameter -> stored tensor, for those stored one to one.
        experts: the layers that experts' matrices are, in the model's order.
        matrices: name of such a layer -> where its weight lies.
    """

    names: dict[str, str]
    experts: list[Layer]
    matrices: dict[str, Matrix]


@dataclass(frozen=True)
class _Piece:
    """A stored tensor that becomes a part of a stack: the one of an expert (None: of all), in its place among the parts."""

    key: str
    expert: int | None
    place: int
    turned: bool


def find_names(model: PreTrainedModel, checkpoint: Checkpoint, stacks: dict[str, Stack]) -> StoredNames:
    """Match a model's parameters with a checkpoint's tensors.

    Args:
        model: its skeleton, or the model itself.
        checkpoint: where its weights are stored.
        stacks: its parameters that hold a matrix for each expert, as of `find_stacks`.
    """
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
    converted, pieces = _converted(model, renamed, own)
    names.update(converted)
    for name in stacks:
        if name in names:
            pieces[name].append(_Piece(names[name], None, 0, False))
    first_of = {id(own[name]): key for name, key in names.items()}
    for name, parameter in own.items():  # tied weights are stored once and known by two names
        if name not in names and id(parameter) in first_of:
            names[name] = first_of[id(parameter)]
    found = [place for name, stack in stacks.items() for place in _matrices(stack, pieces[name], checkpoint)]
    return StoredNames(names, [layer for layer, _ in found], {layer.name: matrix for layer, matrix in found})


def _converted(
    model: PreTrainedModel, keys: list[str], own: dict[str, nn.Parameter]
) -> tuple[dict[str, str], defaultdict[str, list[_Piece]]]:
    """What transformers makes of stored tensors while loading (it stores GPT-NeoX's lm_head as embed_out)."""
    names: dict[str, str] = {}
    pieces: defaultdict[str, list[_Piece]] = defaultdict(list)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # the tables of another transformers: names that differ stay unknown, and are reported so
        return names, pieces
    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    for key in keys:
        renamed, merged = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if renamed not in own:
            continue
        if merged is None:
            names[renamed] = key
            continue
        converter = next(c for c in converters if merged in c.source_patterns)
        piece = _piece(key, converter.source_patterns.index(merged), converter)
        if piece is not None:
            pieces[renamed].append(piece)
    return names, pieces


def _piece(key: str, place: int, converter: Any) -> _Piece | None:
    """What becomes of a stored tensor that a converter takes; None where it is more than stacking or turning."""
    if len(converter.target_patterns) != 1:
        return None
    steps = [
        (type(step).__name__, *(getattr(step, name, None) for name in ("dim", "dim0", "dim1"))) for step in converter.operations
    ]
    turn = [("Transpose", None, 1, 2)]
    if steps == turn or steps == []:
        return _Piece(key, None, 0, steps == turn) if len(converter.source_patterns) == 1 else None
    stacked = ("MergeModulelist", 0, None, None)
    if steps == [stacked, ("Concatenate", 1, None, None)] or (steps == [stacked] and len(converter.source_patterns) == 1):
        numbers = _NUMBER.findall(key)
        return _Piece(key, int(numbers[-1]), place, False) if numbers else None
    return None


def _matrices(stack: Stack, pieces: list[_Piece], checkpoint: Checkpoint) -> list[tuple[Layer, Matrix]]:
    """Each stored matrix of a stack's experts; none where what is stored does not make up the stack."""
    if stack.transposed is None:
        return []
    if len(pieces) == 1 and pieces[0].expert is None:
        return _slices(stack, pieces[0], checkpoint)
    found = []
    filled = dict.fromkeys(range(stack.shape[0]), 0)
    for piece in sorted(pieces, key=lambda piece: (-1 if piece.expert is None else piece.expert, piece.place)):
        matrix = Matrix(checkpoint.tensors[piece.key], stack.transposed)
        if piece.expert not in filled or len(matrix.stored.shape) != 2 or matrix.columns != stack.inputs:
            return []
        first = filled[piece.expert]
        filled[piece.expert] = last = first + matrix.rows
        leaf = piece.key.removesuffix(".weight").rpartition(".")[2]
        found.append(
            (_layer(stack, leaf, Slice(stack.name, piece.expert, stack.transposed, first, last, stack.inputs)), matrix)
        )
    return found if set(filled.values()) == {stack.outputs} else []


def _slices(stack: Stack, piece: _Piece, checkpoint: Checkpoint) -> list[tuple[Layer, Matrix]]:
    """The matrices of a stack that is stored as such, or the other way round."""
    stored, (experts, rows, columns) = checkpoint.tensors[piece.key], stack.shape
    if stored.shape != ((experts, columns, rows) if piece.turned else stack.shape) or stack.transposed is None:
        return []
    leaf = stack.name.rpartition(".")[2]
    return [
        (
            _layer(stack, leaf, Slice(stack.name, expert, stack.transposed, 0, stack.outputs, stack.inputs)),
            Matrix(stored, stack.transposed != piece.turned, expert),
        )
        for expert in range(experts)
    ]


def _layer(stack: Stack, leaf: str, place: Slice) -> Layer:
    name = f"{stack.module}.{place.expert}.{leaf}".removesuffix(".weight")
    return Layer(name, "attention" if "attention" in stack.module else "mlp", stack.block, place.transposed, place)
