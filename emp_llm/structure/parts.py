"""Attention heads and MLP neurons, found by the names and shapes of layers.

A head is known by `num_attention_heads`, its output layer (o_proj, out_proj, c_proj, dense) and the
layers that make queries, keys and values, apart or in one matrix. A neuron is known by its shapes
alone: one layer of an MLP maps hidden states to features, or to features and gates, and a later one
maps the features back. What is not so named or shaped is refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.layers import Shape
from emp_llm.options.recipe import StructureRecipe
from emp_llm.structure.units import Changes, Indices, UnitModel, Units, field_path, smaller_model

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")  # of attention
_JOINED = ("qkv_proj", "c_attn")  # all queries, then all keys, then all values
_BY_GROUP = ("query_key_value",)  # for each group of heads its queries, its key and its value
_HALVES = ("gate_up_proj",)  # all gates, then all features
# A part narrower than this share of the hidden states is a low-rank connection, not an MLP.
_NARROW = 4
# Fields that hold the number of neurons, by a word in the name of the MLP; the first that has the
# number is taken.
_WIDTHS = (
    ("shared_expert", ("shared_expert_intermediate_size",)),
    ("experts", ("moe_intermediate_size", "intermediate_size")),
    ("", ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")),
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_MISSING = {
    "heads": "no attention whose heads can be told apart (each head must have outputs of its own "
    "in layers of usual names)",
    "neurons": "no MLP whose neurons can be told apart (a layer that reads one activation for each "
    "neuron)",
}


@dataclass(frozen=True, eq=False)
class Parts(Units):
    """The heads of one attention, or the neurons of one MLP or expert: rows and columns of layers.

    Attributes:
        output: the layer that reads them (o_proj, down_proj).
        columns: inputs of `output` that belong to each unit, shape (units, columns).
        rows: layer -> outputs that belong to each unit, shape (units, rows).
        heads: attention heads in a unit; 0 for neurons.
        keys: heads of keys and values in a unit.
    """

    output: Target
    columns: Indices
    rows: dict[Target, Indices]
    heads: int = 0
    keys: int = 0

    @classmethod
    def of(
        cls,
        kind: Literal["heads", "neurons"],
        output: Target,
        columns: Indices,
        rows: dict[Target, Indices],
        places: Indices | None = None,
        heads: int = 0,
        keys: int = 0,
        multiple_of: str = "",
    ) -> "Parts":
        """The units that a layer reads; arguments are the attributes."""
        layer = output.layer
        one = np.zeros(len(columns), dtype=np.int64)
        where = one if places is None else places
        targets = [*rows, output]
        place = (kind, output.name, layer.role, layer.block or 0, where, 1, targets)
        return cls(*place, output, columns, rows, heads, keys, multiple_of=multiple_of)


def find_parts(
    skeleton: PreTrainedModel, architecture: Architecture, structure: StructureRecipe
) -> list[Parts]:
    """The heads or neurons of a model, or both, in its order; UserError if it has none that can
    be told apart.
    """
    config = skeleton.config.get_text_config()
    stored = {target.layer: target for target in architecture.select("all-linear", tower="all")}
    wanted = {"heads": ("attention",), "neurons": ("mlp",)}.get(
        structure.structure, ("attention", "mlp")
    )
    # Of a block: its attention, then its MLPs, then its experts.
    groups: dict[tuple[int, bool, bool, str], list[Target]] = {}
    for layer in architecture.layers:
        if layer.block is None or layer.tower != "language" or layer.kind not in wanted:
            continue
        if layer not in stored:
            raise UserError(
                f"{layer.name}: its weight is not stored by itself, or blocks share it, so its "
                "units cannot be pruned. Leave out --structure to prune weights."
            )
        if stored[layer].matrix.scales is not None:
            raise UserError(
                f"{layer.name} is stored in FP8, and --structure needs plain weights. "
                "Use the unquantised model."
            )
        module = "" if layer.kind == "attention" else layer.name.rpartition(".")[0]
        groups.setdefault(
            (layer.block, layer.kind == "mlp", layer.expert is not None, module), []
        ).append(stored[layer])
    units: list[Parts] = []
    for (_, is_mlp, _, _), members in sorted(groups.items(), key=lambda item: item[0][:3]):
        if is_mlp:
            found = _neurons(members, config, structure.keep_shapes)
        else:
            found = _heads(members, config, architecture.shapes, structure.head_unit == "query")
        units += [] if found is None else [found]
    for kind, missing in _MISSING.items():
        if structure.structure in (kind, "both") and not any(each.kind == kind for each in units):
            raise UserError(f"--structure {kind}: {type(skeleton).__name__} has {missing}.")
    return units


def _heads(
    targets: list[Target], config: Any, shapes: Mapping[str, Shape], by_query: bool
) -> Parts | None:
    """The heads of a block's attention; None if its layers have other names, or its shapes do
    not fit.
    """
    by_leaf = {target.layer.leaf: target for target in targets}
    output = next((by_leaf[leaf] for leaf in _OUTPUTS if leaf in by_leaf), None)
    number = getattr(config, "num_attention_heads", None)
    if output is None or not isinstance(number, int) or output.matrix.columns % number:
        return None
    width = output.matrix.columns // number  # of a head
    joined = next((by_leaf[leaf] for leaf in (*_JOINED, *_BY_GROUP) if leaf in by_leaf), None)
    if joined is not None:
        keys, rest = divmod(joined.matrix.rows - number * width, 2 * width)
        if rest or keys < 1 or number % keys:
            return None
        rows = np.arange(joined.matrix.rows, dtype=np.int64).reshape(-1, width)
        if joined.layer.leaf in _BY_GROUP:
            grid = rows.reshape(keys, number // keys + 2, width)
            parts = [
                (joined, grid[:, :-2].reshape(number, width)),
                (joined, grid[:, -2]),
                (joined, grid[:, -1]),
            ]
        else:
            parts = [(joined, each) for each in np.split(rows, [number, number + keys])]
    elif {"q_proj", "k_proj", "v_proj"} <= by_leaf.keys():
        layers = [by_leaf[leaf] for leaf in ("q_proj", "k_proj", "v_proj")]
        queries, key_rows, value_rows = (layer.matrix.rows for layer in layers)
        keys, rest = divmod(value_rows, width)
        if rest or keys < 1 or number % keys or queries % number or key_rows % keys:
            return None
        counts = (number, keys, keys)
        parts = [
            (layer, np.arange(layer.matrix.rows, dtype=np.int64).reshape(count, -1))
            for layer, count in zip(layers, counts, strict=True)
        ]
    else:
        return None
    module = output.name.rpartition(".")[0]
    # Over all heads, they cannot be told apart.
    for norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
        size = math.prod(shapes.get(f"{module}.{norm}.weight", ()))
        if number > 1 and size != width and size in (parts[0][1].size, parts[1][1].size):
            return None
    places = np.zeros(keys, dtype=np.int64)
    together = number // keys
    # Keys and values belong to all heads, so that they stay.
    if keys == 1 < number or (by_query and keys < number):
        places = np.arange(number) // (number // keys)
        together = 1
        parts = parts[:1]
    rows_of: dict[Target, Indices] = {}
    for target, part in parts:
        own = part.reshape(number // together, -1)
        rows_of[target] = np.concatenate([rows_of[target], own], 1) if target in rows_of else own
    columns = np.arange(number * width, dtype=np.int64).reshape(number // together, -1)
    return Parts.of("heads", output, columns, rows_of, places, together, int(len(parts) > 1))


def _neurons(targets: list[Target], config: Any, keep_shapes: bool) -> Parts | None:
    """The neurons of an MLP or expert: some of its layers map hidden states to features, and a
    later one maps them back.
    """
    hidden = int(config.hidden_size)
    routed = targets[0].layer.expert is not None
    output = next((each for each in reversed(targets[1:]) if each.matrix.rows == hidden), None)
    if output is None or (not routed and _NARROW * output.matrix.columns <= hidden):
        return None
    width = output.matrix.columns
    each = np.arange(width, dtype=np.int64)[:, None]
    rows: dict[Target, Indices] = {}
    for target in targets[: targets.index(output)]:
        if target.matrix.columns == hidden and target.matrix.rows == width:
            rows[target] = each
        elif (
            target.matrix.columns == hidden
            and target.matrix.rows == 2 * width
            and target.layer.leaf in _HALVES
            and not routed
        ):
            rows[target] = np.concatenate([each, each + width], 1)
    if not rows:
        return None
    # A number of routed experts: of DeepSeek, GLM-4 MoE.
    shared = getattr(config, "n_shared_experts", None)
    routed_width = getattr(config, "moe_intermediate_size", None)
    is_multiple = (
        isinstance(shared, int) and isinstance(routed_width, int) and width == shared * routed_width
    )
    role = output.layer.role
    if is_multiple and "shared_expert" in role and not keep_shapes:
        routed_role = role.replace("shared_experts", "experts.*")
        return Parts.of("neurons", output, each, rows, multiple_of=routed_role)
    return Parts.of("neurons", output, each, rows)


def part_changes(model: UnitModel, kept: Sequence[Indices]) -> Changes:
    """The fields of config.json that change; arguments and errors are those of `config_changes`."""
    stored = model.checkpoint.config
    text = model.skeleton.config.get_text_config()
    changes = Changes()

    def put(name: str, value: Any) -> None:
        path = field_path(model.skeleton, stored, name)
        if (stored[path[0]] if len(path) > 1 else stored).get(path[-1]) != value:
            changes[path] = value

    if model.per_layer:
        return _own_widths(model, kept)
    widths = {units.role: len(stays) for units, stays in zip(model.units, kept, strict=True)}
    for units in model.units:
        if units.multiple_of:
            put("n_shared_experts", widths[units.role] // widths[units.multiple_of])
    roles: dict[str, list[tuple[Parts, int]]] = {}
    for units, stays in zip(model.units, kept, strict=True):
        if len(stays) < len(units) and isinstance(units, Parts):
            roles.setdefault(units.role, []).append((units, len(stays)))
    # neurons, then heads.
    for role, members in sorted(roles.items(), key=lambda each: each[1][0][0].kind, reverse=True):
        units, stay = members[0]
        if units.kind == "heads":
            put("num_attention_heads", stay * units.heads)
            if units.keys:
                put(next((name for name in _KEY_HEADS if hasattr(text, name)), _KEY_HEADS[0]), stay)
            put("head_dim", units.columns.shape[1] // units.heads)
            continue
        if units.multiple_of:
            continue
        names = next(names for word, names in _WIDTHS if word in role)
        for name in names:
            before = getattr(text, name, 0)
            if isinstance(before, list) and len(units) in before:
                by_block = {each.block: stays for each, stays in members}
                put(name, [by_block.get(number, value) for number, value in enumerate(before)])
                break
            # of LFM2.
            adjusts = name == "intermediate_size" and getattr(
                text, "block_auto_adjust_ff_dim", False
            )
            # None: left to the default of the model.
            if before is None or before == len(units) or adjusts:
                put(name, stay)
                if adjusts:
                    put("block_auto_adjust_ff_dim", False)
                break
        else:
            raise _no_number(units)
    changed = [units for members in roles.values() for units, _ in members]
    _check_shapes(model, kept, changes, changed)
    return changes


def _own_widths(model: UnitModel, kept: Sequence[Indices]) -> Changes:
    """`per_layer_config`, which transformers defines: number of a layer -> fields that differ."""
    stored = model.checkpoint.config
    text = model.skeleton.config.get_text_config()
    fields: dict[str, dict[str, int]] = {}
    changes = Changes()
    for units, stays in zip(model.units, kept, strict=True):
        assert isinstance(units, Parts)
        own = fields.setdefault(str(units.block), {})
        if units.kind == "heads":
            own["num_attention_heads"] = len(stays) * units.heads
            if units.keys:
                own["num_key_value_heads"] = len(stays)
            path = field_path(model.skeleton, stored, "head_dim")
            changes[path] = units.columns.shape[1] // units.heads
            # Else transformers' check of the number for all layers fails.
            path = field_path(model.skeleton, stored, "allow_global_per_layer_attribute_access")
            changes[path] = True
            continue
        names = next(names for word, names in _WIDTHS if word in units.role)
        name = next((name for name in names if getattr(text, name, None) == len(units)), None)
        if name is None:
            raise _no_number(units)
        own[name] = len(stays)
    changes[field_path(model.skeleton, stored, "per_layer_config")] = fields
    _check_shapes(model, kept, changes, model.units)
    return changes


def _check_shapes(
    model: UnitModel, kept: Sequence[Indices], changes: Changes, changed: Sequence[Units]
) -> None:
    """Raise UserError unless transformers' model of the changed config.json has the shapes that
    are left.
    """
    shapes = smaller_model(model.skeleton, model.checkpoint.config, changes)
    if shapes is None:
        raise _no_number(changed[0])
    for name, shape in _smaller_shapes(model, kept).items():
        if shapes.get(name) != shape:
            owner = next(
                (each for each in changed if name in {t.layer.parameter for t in each.targets}),
                changed[0],
            )
            raise _no_number(owner, f" (its model would need another {name})")


def _no_number(units: Units, why: str = "") -> UserError:
    return UserError(
        f"config.json has no number for the {units.kind} of {units.role} in this form{why}. Keep "
        "all shapes and set the removed ones to zero: --keep-shapes."
    )


def _smaller_shapes(model: UnitModel, kept: Sequence[Indices]) -> dict[str, Shape]:
    """The shape of every parameter of transformers' model after the removal."""
    wanted = dict(model.architecture.shapes)
    for units, stays in zip(model.units, kept, strict=True):
        gone = len(units) - len(stays)
        assert isinstance(units, Parts)
        for target in units.targets:
            layer = target.layer
            expert = target.layer.expert
            if expert is not None and expert.expert > 0:
                continue  # all experts have the width of the first
            rows = gone * units.rows[target].shape[1] if target in units.rows else 0
            columns = gone * units.columns.shape[1] if target is units.output else 0
            transposed = layer.transposed if expert is None else expert.transposed
            *stack, first, second = wanted[layer.parameter]
            first, second = (
                (first - columns, second - rows) if transposed else (first - rows, second - columns)
            )
            wanted[layer.parameter] = (*stack, first, second)
            bias = f"{layer.name}.bias"
            if expert is None and bias in wanted:
                wanted[bias] = (wanted[bias][0] - rows,)
    return wanted
