"""Units: the attention heads and MLP neurons of a language model, found from config.json by the names and shapes of its layers.

A head is known by `num_attention_heads`, its output layer (o_proj, out_proj, c_proj, dense) and the layers that make queries,
keys and values, apart or in one matrix. A neuron is known by its shapes alone: one layer of an MLP maps hidden states to
features, or to features and gates, and a later one maps the features back. What is not so named or shaped is refused.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import read_json
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.layers import Layer
from emp_llm.models.loading import read_config

Indices = NDArray[np.int64]
UnitKind = Literal["heads", "neurons"]
Shapes = dict[str, tuple[int, ...]]
Field = tuple[str, ...]  # the names of a field of config.json and of the parts around it, outermost first
Changes = dict[Field, Any]

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")  # of attention
_JOINED = ("qkv_proj", "c_attn")  # all queries, then all keys, then all values
_BY_GROUP = ("query_key_value",)  # for each group of heads its queries, its key and its value
_HALVES = ("gate_up_proj",)  # all gates, then all features
_NARROW = 4  # a part narrower than this share of the hidden states is a low-rank connection, not an MLP
_KEEP = "Keep all shapes and set the removed ones to zero: --keep-shapes."
# Fields that hold the number of neurons, by a word in the name of the MLP; the first that has the number is taken.
_WIDTHS = (
    ("shared_expert", ("shared_expert_intermediate_size",)),
    ("experts", ("moe_intermediate_size", "intermediate_size")),
    ("", ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")),
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, eq=False)
class Units:
    """The heads of one attention, or the neurons of one MLP or expert; and which of them stay, once that is chosen.

    Attributes:
        kind, block: what they are, and the number of their decoder block.
        output: the layer that reads them (o_proj, down_proj).
        columns: inputs of `output` that belong to each unit, shape (units, columns).
        rows: layer -> outputs that belong to each unit, shape (units, rows).
        places: number of the group of heads that share keys and values, shape (units,); all 0 if units are taken from all.
        heads: attention heads in a unit; 0 for neurons.
        keys: heads of keys and values in a unit.
    """

    kind: UnitKind
    block: int
    output: Layer
    columns: Indices
    rows: dict[Layer, Indices]
    places: Indices
    heads: int = 0
    keys: int = 0

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def role(self) -> str:
        """The name within the block, shared by the units of all blocks."""
        return self.output.role

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def layers(self) -> list[Layer]:
        """All layers with rows or columns of the units; the output last."""
        return [*self.rows, self.output]


@dataclass(frozen=True, eq=False)
class UnitModel:
    """A checkpoint and its units. No weight is read.

    Attributes:
        units: in the model's order.
        matrices: layer -> stored weight, for all layers of the units.
        shapes: of the parameters of transformers' model.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    units: list[Units]
    matrices: dict[Layer, Matrix]
    shapes: Shapes
    config: Any
    build: Any

    @property
    def weights(self) -> int:
        """The number of weights in the matrices of all units."""
        return sum(matrix.numel for matrix in self.matrices.values())

    @property
    def width_by_block(self) -> bool:
        """Whether config.json has a width of the MLP for each block."""
        return isinstance(getattr(self.config.get_text_config(), "intermediate_size", None), list)


def unit_model(
    folder: Path,
    kinds: Sequence[UnitKind],
    head_unit: str = "group",
    blocks: str | None = None,
    trust_remote_code: bool = False,
) -> UnitModel:
    """The heads and neurons of a model.

    Args:
        folder: of the model.
        kinds: "heads", "neurons", or both.
        head_unit: "group": query heads with the keys and values that they share; "query": single query heads.
        blocks: name of the list of decoder blocks; None: detected.
        trust_remote_code: run code from the model's folder.

    Raises:
        UserError: the model has no such units, or they are stored in a form that cannot be pruned.
    """
    checkpoint = Checkpoint(folder)
    if checkpoint.config.get("quantization_config") is not None:
        raise UserError(f"{folder}: it is quantised, and --structure needs plain weights. Prune the original model.")
    config, auto = read_config(folder, trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{folder}: --structure is for decoder-only models, and this one has an encoder.")

    def build(of: Any) -> Any:
        with torch.device("meta"):
            return auto.from_config(of, trust_remote_code=trust_remote_code)

    model = build(config)
    architecture = Architecture.of_model(checkpoint, model, blocks)
    shapes = shapes_of(model)
    units = _find_units(architecture.layers, shapes, config.get_text_config(), kinds, head_unit)
    missing = {
        "heads": "no attention whose heads can be told apart (each head must have outputs of its own in layers of usual names)",
        "neurons": "no MLP whose neurons can be told apart (a layer that reads one activation for each neuron)",
    }
    for kind in kinds:
        if not any(each.kind == kind for each in units):
            raise UserError(f"--structure {kind}: {type(model).__name__} has {missing[kind]}.")
    wanted = {layer for each in units for layer in each.layers}
    matrices = {t.layer: t.matrix for t in architecture.select("all-linear", tower="all") if t.layer in wanted}
    for layer in wanted:
        if layer not in matrices:
            raise UserError(f"{layer.name}: its weight is not stored by itself, so its units cannot be pruned.")
        if matrices[layer].scales is not None:
            raise UserError(f"{layer.name} is stored in FP8, and --structure needs plain weights. Use the unquantised model.")
    return UnitModel(checkpoint, architecture, units, matrices, shapes, config, build)


def shapes_of(model: Any) -> Shapes:
    """The shapes of a model's parameters."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}


def _find_units(layers: Sequence[Layer], shapes: Shapes, config: Any, kinds: Sequence[UnitKind], head_unit: str) -> list[Units]:
    """The units of all decoder blocks, block by block: heads, then neurons, then those of experts."""
    found: list[Units | None] = []
    of_block: dict[int, list[Layer]] = {}
    for layer in layers:
        if layer.block is not None and layer.tower == "language":
            of_block.setdefault(layer.block, []).append(layer)
    for block, own in of_block.items():
        plain = [layer for layer in own if layer.expert is None]
        if "heads" in kinds:
            found.append(_heads(block, [layer for layer in plain if layer.kind == "attention"], shapes, config, head_unit))
        if "neurons" in kinds:
            found += _neurons(block, [layer for layer in plain if layer.kind == "mlp"], shapes, int(config.hidden_size))
            found += _expert_neurons(block, [layer for layer in own if layer.expert is not None])
    return [units for units in found if units is not None]


def _size(layer: Layer, shapes: Shapes) -> tuple[int, int]:
    """(outputs, inputs) of a layer."""
    first, second = shapes[layer.parameter]
    return (second, first) if layer.transposed else (first, second)


def _heads(block: int, layers: list[Layer], shapes: Shapes, config: Any, head_unit: str) -> Units | None:
    """The heads of a block's attention; None if its layers have other names, or its shapes do not fit."""
    by_leaf = {layer.leaf: layer for layer in layers}
    output = next((by_leaf[leaf] for leaf in _OUTPUTS if leaf in by_leaf), None)
    number = getattr(config, "num_attention_heads", None)
    if output is None or not isinstance(number, int) or _size(output, shapes)[1] % number:
        return None
    width = _size(output, shapes)[1] // number  # of a head
    every = np.arange
    joined = next((by_leaf[leaf] for leaf in (*_JOINED, *_BY_GROUP) if leaf in by_leaf), None)
    if joined is not None:
        rows = _size(joined, shapes)[0]
        keys, rest = divmod(rows - number * width, 2 * width)
        if rest or keys < 1 or number % keys:
            return None
        if joined.leaf in _BY_GROUP:
            grid = every(rows).reshape(keys, number // keys + 2, width)
            parts = [(joined, grid[:, :-2].reshape(number, width)), (joined, grid[:, -2]), (joined, grid[:, -1])]
        else:
            first, second = number * width, (number + keys) * width
            parts = [
                (joined, every(first).reshape(number, width)),
                (joined, every(first, second).reshape(keys, width)),
                (joined, every(second, rows).reshape(keys, width)),
            ]
    elif {"q_proj", "k_proj", "v_proj"} <= by_leaf.keys():
        sizes = [_size(by_leaf[leaf], shapes)[0] for leaf in ("q_proj", "k_proj", "v_proj")]
        keys, rest = divmod(sizes[2], width)
        if rest or keys < 1 or number % keys or sizes[0] % number or sizes[1] % keys:
            return None
        parts = [
            (by_leaf[leaf], every(size).reshape(count, -1))
            for leaf, size, count in zip(("q_proj", "k_proj", "v_proj"), sizes, (number, keys, keys), strict=True)
        ]
    else:
        return None
    module = output.name.rpartition(".")[0]
    shared_norms = {len(parts[0][1]) * parts[0][1].shape[1], len(parts[1][1]) * parts[1][1].shape[1]}
    for norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
        if number > 1 and math.prod(shapes.get(f"{module}.{norm}.weight", ())) in shared_norms - {width}:
            return None
    if keys == 1 < number or (head_unit == "query" and keys < number):  # keys and values belong to all heads, so that they stay
        parts, together = parts[:1], 1
    else:
        together = number // keys
    units = number // together
    rows_of: dict[Layer, Indices] = {}
    for layer, each in parts:
        own = each.reshape(units, -1).astype(np.int64)
        rows_of[layer] = np.concatenate([rows_of[layer], own], 1) if layer in rows_of else own
    places = np.arange(number) // (number // keys) if len(parts) == 1 and 1 < keys < number else np.zeros(units)
    columns = np.arange(number * width, dtype=np.int64).reshape(units, -1)
    return Units("heads", block, output, columns, rows_of, places.astype(np.int64), together, int(len(parts) > 1))


def _neurons(block: int, layers: list[Layer], shapes: Shapes, hidden: int) -> list[Units]:
    """The neurons of the MLPs of a block: the layers of one module that map hidden states to features, and these back."""
    by_module: dict[str, list[Layer]] = {}
    for layer in layers:
        by_module.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    found = []
    for own in by_module.values():
        output = next((layer for layer in reversed(own) if _size(layer, shapes)[0] == hidden and layer is not own[0]), None)
        if output is None:
            continue
        width = _size(output, shapes)[1]
        each = np.arange(width, dtype=np.int64)[:, None]
        rows: dict[Layer, Indices] = {}
        for layer in own[: own.index(output)]:
            outputs, inputs = _size(layer, shapes)
            if inputs == hidden and outputs == width:
                rows[layer] = each
            elif inputs == hidden and outputs == 2 * width and layer.leaf in _HALVES:
                rows[layer] = np.concatenate([each, each + width], 1)
        if rows and _NARROW * width > hidden:
            found.append(Units("neurons", block, output, each, rows, np.zeros(width, dtype=np.int64)))
    return found


def _expert_neurons(block: int, layers: list[Layer]) -> list[Units]:
    """The neurons of a mixture's experts in a block: one `Units` for each expert with gate, up and down."""
    by_expert: dict[tuple[str, int], list[Layer]] = {}
    for layer in layers:
        assert layer.expert is not None
        by_expert.setdefault((layer.name.rpartition(".")[0], layer.expert.expert), []).append(layer)
    found = []
    for own in by_expert.values():
        of_parameter: dict[str, list[Layer]] = {}
        for layer in own:
            assert layer.expert is not None
            of_parameter.setdefault(layer.expert.parameter, []).append(layer)
        joined = [each for each in of_parameter.values() if len(each) == 2]
        single = [each[0] for each in of_parameter.values() if len(each) == 1]
        if len(joined) != 1 or len(single) != 1:
            continue
        output, sources = single[0], joined[0]
        assert output.expert is not None
        width = output.expert.inputs
        if all(e.expert is not None and e.expert.last - e.expert.first == width for e in sources):
            each = np.arange(width, dtype=np.int64)[:, None]
            found.append(Units("neurons", block, output, each, dict.fromkeys(sources, each), np.zeros(width, dtype=np.int64)))
    return found


def config_changes(model: UnitModel, kept: Sequence[Indices]) -> Changes:
    """The fields of config.json that change if only these units stay.

    Args:
        model: dense.
        kept: numbers of the units that stay, for each of `model.units`.

    Raises:
        UserError: config.json has no number for such units, or the smaller model would need other shapes.
    """
    stored = read_json(model.checkpoint.folder / "config.json")
    part = ("text_config",) if isinstance(stored.get("text_config"), dict) else ()
    text = model.config.get_text_config()
    wanted = _smaller_shapes(model, kept)
    changes: Changes = {}

    def put(name: str, value: Any) -> None:
        field = (*part, getattr(text, "attribute_map", {}).get(name, name))
        if field_of(stored, field) != value:
            changes[field] = value

    changed = [(units, stay) for units, stay in zip(model.units, kept, strict=True) if len(stay) < len(units)]
    roles: dict[str, list[tuple[Units, Indices]]] = {}
    for units, stay in changed:
        roles.setdefault(units.role, []).append((units, stay))
    for role, members in sorted(roles.items(), key=lambda each: each[1][0][0].kind, reverse=True):  # neurons, then heads
        units, stay = members[0]
        if units.kind == "heads":
            put("num_attention_heads", len(stay) * units.heads)
            if units.keys:
                put(next((name for name in _KEY_HEADS if hasattr(text, name)), _KEY_HEADS[0]), len(stay))
            put("head_dim", units.columns.shape[1] // units.heads)
            continue
        names = next(names for word, names in _WIDTHS if word in role)
        field = next((name for name in names if _holds(getattr(text, name, 0), len(units))), None)
        if field is None:
            raise _no_number("neurons", role)
        before = getattr(text, field)
        if isinstance(before, list):
            by_block = {each.block: len(stays) for each, stays in members}
            put(field, [by_block.get(number, value) for number, value in enumerate(before)])
        else:
            put(field, len(stay))
    try:
        shapes = shapes_of(model.build(type(model.config).from_dict(changed_config(stored, changes))))
    except Exception as error:  # of the model's own code, for numbers that do not fit together
        raise _no_number(changed[0][0].kind, changed[0][0].role) from error
    for units, _ in changed:
        if any(shapes.get(layer.parameter) != wanted[layer.parameter] for layer in units.layers):
            raise _no_number(units.kind, units.role)
    other = next((name for name in wanted if shapes.get(name) != wanted[name]), None)
    if other is not None:
        raise UserError(f"the smaller model would need another {other} too, of shape {shapes.get(other)}. {_KEEP}")
    return changes


def _no_number(kind: str, role: str) -> UserError:
    return UserError(f"config.json has no number for the {kind} of {role} in this form. {_KEEP}")


def _holds(value: Any, number: int) -> bool:
    """Whether a field may hold a number of neurons: it does, in a list or alone, or is left to the model's default."""
    return value is None or value == number or (isinstance(value, list) and number in value)


def field_of(config: Mapping[str, Any], field: Field) -> Any:
    """The value of a field; None if it is missing."""
    for name in field[:-1]:
        config = config.get(name) or {}
    return config.get(field[-1])


def changed_config(config: Mapping[str, Any], changes: Mapping[Field, Any]) -> dict[str, Any]:
    """A copy of a configuration with some values replaced or added."""
    changed = copy.deepcopy(dict(config))
    for field, value in changes.items():
        part = changed
        for name in field[:-1]:
            part = part.setdefault(name, {})
        part[field[-1]] = value
    return changed


def _smaller_shapes(model: UnitModel, kept: Sequence[Indices]) -> Shapes:
    """The shape of every parameter of transformers' model after the removal."""
    wanted = dict(model.shapes)

    def shrink(layer: Layer, outputs: int, inputs: int) -> None:
        *stack, first, second = wanted[layer.parameter]
        transposed = layer.transposed if layer.expert is None else layer.expert.transposed
        less = (inputs, outputs) if transposed else (outputs, inputs)
        wanted[layer.parameter] = (*stack, first - less[0], second - less[1])
        bias = f"{layer.name}.bias"
        if layer.expert is None and outputs and bias in wanted:
            wanted[bias] = (wanted[bias][0] - outputs,)

    for units, stay in zip(model.units, kept, strict=True):
        if units.output.expert is not None and units.output.expert.expert > 0:
            continue  # all experts have the width of the first
        gone = len(units) - len(stay)
        shrink(units.output, 0, gone * units.columns.shape[1])
        for layer, rows in units.rows.items():
            shrink(layer, gone * rows.shape[1], 0)
    return wanted
