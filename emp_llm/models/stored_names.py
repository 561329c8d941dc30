"""The names of a model's weights in its checkpoint, if transformers renames, merges or transposes them while loading.

The conversions are read from the tables of transformers. Three are supported: new names, experts stacked into one parameter (in
order, gate before up), and transposed stacks. Tensors with any other conversion are never pruned.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrix import Matrix
from emp_llm.models.architecture import ExpertSlice, Kind, Layer
from emp_llm.models.modules import ExpertStack

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class StoredNames:
    """The weights of a model in a checkpoint.

    Attributes:
        names: parameter -> stored tensor, for parameters stored one to one.
        experts: the layer and the stored matrix of each matrix of an expert, in the model's order.
        missing: parameters without a counterpart in the checkpoint.
    """

    names: dict[str, str]
    experts: list[tuple[Layer, Matrix]]
    missing: list[str]


@dataclass(frozen=True)
class _Piece:
    """A stored tensor that becomes a part of a stack.

    Attributes:
        key: its name.
        expert: number of its expert; None: it holds all experts.
        place: its position among the parts of an expert's matrix.
        transposed: it is transposed while loading.
    """

    key: str
    expert: int | None
    place: int
    transposed: bool


def find_names(model: nn.Module, checkpoint: Checkpoint, stacks: dict[str, ExpertStack]) -> StoredNames:
    """Match a model's parameters with a checkpoint's tensors.

    Args:
        model: of transformers, with or without weights.
        checkpoint: its weights.
        stacks: the result of `find_stacks`.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    prefix = getattr(model, "base_model_prefix", "")
    names: dict[str, str] = {}
    renamed: list[str] = []
    for key in checkpoint.tensors:
        candidates = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
        name = next((candidate for candidate in candidates if candidate in own), None)
        if name is not None:
            names[name] = key
        else:
            renamed.append(key)
    converted, pieces = _converted(model, renamed, own)
    names |= converted
    for name in stacks.keys() & names.keys():
        pieces[name].append(_Piece(names[name], None, 0, False))
    first_of = {id(own[name]): key for name, key in names.items()}
    for name, parameter in own.items():  # tied weights have two names and are stored once
        if name not in names and id(parameter) in first_of:
            names[name] = first_of[id(parameter)]
    experts = [pair for name, stack in stacks.items() for pair in _matrices(stack, pieces[name], checkpoint)]
    used = {*names.values(), *(piece.key for parts in pieces.values() for piece in parts)}
    # A tensor of unknown use may become an absent parameter by an unsupported conversion.
    if _not_ignored(model, "unexpected", (key for key in renamed if key not in used)):
        return StoredNames(names, experts, [])
    absent = (name for name in own if name not in names and name not in pieces)
    return StoredNames(names, experts, _not_ignored(model, "missing", absent))


def _not_ignored(model: nn.Module, problem: str, names: Iterable[str]) -> list[str]:
    """The names that transformers does not tolerate as "missing" or "unexpected"."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{problem}", None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _converted(
    model: Any, keys: list[str], own: dict[str, nn.Parameter]
) -> tuple[dict[str, str], defaultdict[str, list[_Piece]]]:
    """Stored tensors that transformers renames or merges while loading (it stores GPT-NeoX's lm_head as embed_out)."""
    names: dict[str, str] = {}
    pieces: defaultdict[str, list[_Piece]] = defaultdict(list)
    if not keys:
        return names, pieces
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # a version of transformers without these tables: converted names are reported as unknown
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
        converter = next(each for each in converters if merged in each.source_patterns)
        piece = _piece(key, converter.source_patterns.index(merged), converter)
        if piece is not None:
            pieces[renamed].append(piece)
    return names, pieces


def _piece(key: str, place: int, converter: Any) -> _Piece | None:
    """A stored tensor as a part of a stack; None if its conversion is more than stacking or transposing."""
    if len(converter.target_patterns) != 1:
        return None
    steps = [
        (type(step).__name__, *(getattr(step, name, None) for name in ("dim", "dim0", "dim1"))) for step in converter.operations
    ]
    transpose = [("Transpose", None, 1, 2)]
    if steps == transpose or steps == []:
        return _Piece(key, None, 0, steps == transpose) if len(converter.source_patterns) == 1 else None
    stacked = ("MergeModulelist", 0, None, None)
    if steps == [stacked, ("Concatenate", 1, None, None)] or (steps == [stacked] and len(converter.source_patterns) == 1):
        numbers = _NUMBER.findall(key)
        return _Piece(key, int(numbers[-1]), place, False) if numbers else None
    return None


def _matrices(stack: ExpertStack, pieces: list[_Piece], checkpoint: Checkpoint) -> list[tuple[Layer, Matrix]]:
    """The layers and stored matrices of a stack's experts; empty if the stored tensors do not make up the whole stack."""
    transposed = stack.transposed
    if transposed is None:
        return []
    kind: Kind = "attention" if "attention" in stack.module else "mlp"

    def layer(leaf: str, expert: int, first: int, last: int) -> Layer:
        place = ExpertSlice(stack.name, expert, transposed, first, last, stack.inputs)
        name = f"{stack.module}.{expert}.{leaf}".removesuffix(".weight")
        return Layer(name, kind, stack.block, transposed, place, stack.tower, stack.part)

    if len(pieces) == 1 and pieces[0].expert is None:  # stored as a stack, possibly transposed
        stored, turned = checkpoint.tensors[pieces[0].key], pieces[0].transposed
        experts, rows, columns = stack.shape
        if stored.shape != ((experts, columns, rows) if turned else stack.shape):
            return []
        leaf = stack.name.rpartition(".")[2]
        every = (layer(leaf, expert, 0, stack.outputs) for expert in range(experts))
        return [(each, Matrix(stored, transposed != turned, expert)) for expert, each in enumerate(every)]
    matrices = []
    filled = dict.fromkeys(range(stack.shape[0]), 0)
    for piece in sorted(pieces, key=lambda piece: (-1 if piece.expert is None else piece.expert, piece.place)):
        matrix = Matrix(checkpoint.tensors[piece.key], transposed)
        if piece.expert not in filled or len(matrix.stored.shape) != 2 or matrix.columns != stack.inputs:
            return []
        first = filled[piece.expert]
        filled[piece.expert] = last = first + matrix.rows
        leaf = piece.key.removesuffix(".weight").rpartition(".")[2]
        matrices.append((layer(leaf, piece.expert, first, last), matrix))
    return matrices if set(filled.values()) == {stack.outputs} else []
