"""What heads and neurons share: they are rows and columns of layers, one of which reads them.

magnitude: of a head ||W_O[:, h]||_F, the norm of its columns in the output projection; of a neuron
    the product of the norms of its rows and of its column, ||gate row|| * ||up row|| * ||down
    column||.
wanda: the same, with every column of the last matrix multiplied by the norm ||X_j||_2 of its input.
taylor: sum over tokens and columns of |dL/dY * Y|, with Y the inputs of the last matrix (the heads'
    outputs, the activations of the neurons) and L the loss of the next token (Molchanov et al.
    2019, arXiv 1906.10771).
fisher: the same sum of (dL/dY * Y)^2, the diagonal of the empirical Fisher information of a factor
    of each Y (Theis et al. 2018, arXiv 1801.05787, with tokens as examples).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import SAVE_AGAIN
from emp_llm.common.errors import RefusedError, UserError, shorten_list
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.layers import (
    ATTENTION_OUTPUTS,
    GATE_AND_UP,
    HEAD_NORMS,
    JOINED,
    JOINED_BY_GROUP,
    QUERY_KEY_VALUE,
    Layer,
    Purpose,
)
from emp_llm.options.recipe import BY_GRADIENTS, Recipe
from emp_llm.structure.choice import gradient_sums
from emp_llm.structure.units import Changes, Cuts, Indices, Scores, Squares, UnitModel, Units
from emp_llm.update.update import Update
from emp_llm.walk.update import update_model
from emp_llm.walk.updated import UpdatedWeights


@dataclass(frozen=True, eq=False)
class Parts(Units):
    """The heads of one attention, or the neurons of one MLP or expert: rows and columns of layers.

    Attributes:
        layers: the kind of the layers in which they are found.
        missing: what a model without them has not.
        output: the layer that reads them (o_proj, down_proj).
        columns: inputs of `output` that belong to each unit, shape (units, columns).
        rows: layer -> outputs that belong to each unit, shape (units, rows).
    """

    refusal = (
        "config.json cannot say these numbers of {units.kind} of {units.role}{why}. {another}Keep "
        "all shapes and set the removed ones to zero: --keep-shapes."
    )
    layers: ClassVar[Purpose]
    missing: ClassVar[str]

    output: Target
    columns: Indices
    rows: dict[Target, Indices]

    @classmethod
    def of(
        cls,
        output: Target,
        columns: Indices,
        rows: dict[Target, Indices],
        places: Indices | None = None,
        **more: Any,
    ) -> Self:
        """The units that a layer reads; arguments are the attributes."""
        layer = output.layer
        places = np.zeros(len(columns), dtype=np.int64) if places is None else places
        return cls(
            name=output.name,
            role=layer.role,
            block=layer.block or 0,
            places=places,
            fewest=len(np.unique(places)),
            targets=[*rows, output],
            collected_shape=(output.matrix.columns,),
            output=output,
            columns=columns,
            rows=rows,
            **more,
        )

    @classmethod
    def find(cls, model: UnitModel, blocks: str | None) -> list[Self]:
        architecture = model.architecture
        structure = model.structure
        folder = model.checkpoint.folder
        further = list(architecture.further_blocks)
        if further and not structure.keep_shapes:
            raise UserError(
                f"{folder}: transformers does not load {shorten_list(further)}, which have the "
                "shapes of a decoder block. They would not fit config.json after --structure "
                f"{structure.units}. Add --keep-shapes, or remove them first: {SAVE_AGAIN}."
            )
        if getattr(model.skeleton.config, "is_heterogeneous", False):
            raise UserError(
                f"{folder}: its layers differ in width already. --structure takes models whose "
                "layers are alike; prune the dense model again, or give --structure layers."
            )
        stored = {target.layer: target for target in architecture.select("all-linear", tower="all")}
        # Of a block: its MLPs, then its experts.
        groups: dict[tuple[int, bool, str], list[Target]] = {}
        for layer in architecture.layers:
            if layer.block is None or layer.tower != "language" or layer.purpose != cls.layers:
                continue
            if layer.grouped:
                raise UserError(
                    f"{layer.name} is block-diagonal: each group of rows has inputs of its own, so "
                    f"--structure {cls.kind} cannot cut it. Use --structure layers or experts."
                )
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
            group = (layer.block, layer.expert is not None, cls._owner(layer))
            groups.setdefault(group, []).append(stored[layer])
        in_order = sorted(groups.items(), key=lambda item: item[0][:2])
        all_parts = [cls._of_layers(layers, model) for _, layers in in_order]
        by_block = isinstance(getattr(model.config, "intermediate_size", 0), list)
        units = [replace(parts, by_block=by_block) for parts in all_parts if parts is not None]
        if not units:
            name = type(model.skeleton).__name__
            raise UserError(f"--structure {cls.kind}: {name} has {cls.missing}.")
        if not structure.keep_shapes:
            _check_stacks(model, units)
        return units

    @staticmethod
    @abstractmethod
    def _owner(layer: Layer) -> str:
        """What the layers of one attention or MLP of a block have in common."""

    @classmethod
    @abstractmethod
    def _of_layers(cls, targets: list[Target], model: UnitModel) -> Self | None:
        """The units of some layers of a block; None if they cannot be told apart."""

    def score_of_weights(self, squares: Squares, norms: Scores | None) -> Scores:
        of_columns = squares(self.output.matrix, 0)
        if norms is not None:
            of_columns = of_columns * norms**2
        return np.sqrt(of_columns[self.columns].sum(1))  # type: ignore[no-any-return]

    @classmethod
    def sums(
        cls,
        runner: BlockwiseModel,
        units: Sequence[Units],
        tokens: Tensor,
        batch_size: int,
        recipe: Recipe,
    ) -> dict[str, Tensor]:
        return gradient_sums(runner, units, tokens, batch_size, recipe.name == "fisher")

    def score_of_sums(self, criterion: str, sums: Scores) -> Scores:
        return sums[self.columns].sum(1)  # type: ignore[no-any-return]

    @classmethod
    def cut(cls, model: UnitModel, kept: Mapping[Units, Indices], remove: bool) -> Cuts:
        all_parts = {parts: kept[parts] for parts in Parts.among(kept)}
        cuts = Cuts(remove, shapes=model.shapes())
        for parts, stays in all_parts.items():
            parts._leave_out(model, stays, cuts)
        if remove:
            cuts.configs.append(_one_width(model, all_parts))
        return cuts

    def _leave_out(self, model: UnitModel, kept: Indices, cuts: Cuts) -> None:
        gone = self.gone(kept)
        tables = [(self.output, self.columns, 1)]
        tables += [(target, rows, 0) for target, rows in self.rows.items()]
        for target, table, dimension in tables:
            matrix = target.matrix
            layer = target.layer
            expert = layer.expert
            removed = table[gone].ravel()
            stored = matrix.stored
            # A transposed matrix is stored with its inputs first.
            place = 1 - dimension if matrix.transposed else dimension
            cuts.leave_out(stored.name, matrix.expert, stored.shape[-2:], place, removed)
            if expert is None or expert.expert == 0:  # all experts have the width of the first
                transposed = layer.transposed if expert is None else expert.transposed
                place = 1 - dimension if transposed else dimension
                cuts.shorten(layer.parameter, place - 2, len(removed))
            bias = f"{target.name}.bias"
            if dimension == 0 and expert is None and bias in cuts.shapes:
                cuts.shorten(bias, 0, len(removed))
            stored_bias = model.architecture.stored_names.get(bias)
            if dimension == 0 and stored_bias is not None and matrix.expert is None:
                cuts.leave_out(stored_bias, None, (matrix.rows,), 0, removed)

    @abstractmethod
    def fields(self, config: Any, stays: Mapping[int, int]) -> dict[str, Any]:
        """The fields of a text config that hold the number of units, with their new values.

        Args:
            stays: number of a block -> how many units of this role stay there; at least of this
                one, and of all that lose some if the config has a number for each block.

        Raises:
            UserError: no field has the number.
        """

    def fitted(self, kept: Indices) -> dict[Target, Indices]:
        unread = self.columns[self.gone(kept)].ravel()
        return {self.output: unread} if len(unread) else {}

    @classmethod
    def refit(
        cls,
        kept: Mapping[Units, Indices],
        model: PreTrainedModel,
        tokens: Tensor,
        update: Update,
        updated: UpdatedWeights,
        **options: Any,
    ) -> None:
        unread: dict[Target, Indices] = {}
        for units, stays in kept.items():
            unread |= units.fitted(stays)

        def mask_of(target: Target) -> Tensor:
            read = torch.ones(target.matrix.columns, dtype=torch.bool)
            read[unread[target]] = False
            return read.expand(target.matrix.rows, -1)

        update_model(model, list(unread), tokens, update, updated, mask_of=mask_of, **options)

    def without(self, model: PreTrainedModel, kept: Indices) -> AbstractContextManager[Any]:
        return nullcontext()


def _check_stacks(model: UnitModel, units: Sequence[Parts]) -> None:
    """Raise UserError if some matrices of a stack are of no unit (LongCat-Flash has a gate for
    experts that do nothing): one width for all of them is impossible.
    """
    found: dict[str, set[int]] = {}
    for parts in units:
        for target in parts.targets:
            if (expert := target.layer.expert) is not None:
                found.setdefault(expert.parameter, set()).add(expert.expert)
    for parameter, experts in found.items():
        every = model.architecture.shapes[parameter][0]
        if len(experts) < every:
            raise UserError(
                f"{parameter}: only {len(experts)} of its {every} experts have {units[0].kind} "
                "that can be removed, and all need one width. Add --keep-shapes, which sets the "
                "removed ones to zero."
            )


def _one_width(model: UnitModel, kept: Mapping[Parts, Indices]) -> Changes:
    """The fields of config.json that hold the number of units of all layers."""
    config = model.checkpoint.config
    changes = Changes()

    def put(name: str, value: Any) -> None:
        path = model.path(name)
        if (config[path[0]] if len(path) > 1 else config).get(path[-1]) != value:
            changes[path] = value

    widths = {parts.role: len(stays) for parts, stays in kept.items()}
    first: dict[str, Parts] = {}
    numbers: dict[str, dict[int, int]] = {}
    for parts, stays in kept.items():
        if parts.multiple_of:
            width = max(1, widths[parts.multiple_of])  # none stay in a damaged record alone
            put("n_shared_experts", len(stays) // width)
        elif len(stays) < len(parts):
            first.setdefault(parts.role, parts)
            numbers.setdefault(parts.role, {})[parts.block] = len(stays)
    # Neurons, then heads.
    for role, parts in sorted(first.items(), key=lambda item: item[1].kind, reverse=True):
        for name, value in parts.fields(model.config, numbers[role]).items():
            put(name, value)
    return changes


# MLP neurons, of experts too.
#
# A neuron is known by shapes alone: one layer of an MLP maps hidden states to features, or to
# features and gates, and a later one maps the features back.


# A part narrower than this share of the hidden states is a low-rank connection, not an MLP.
_NARROW = 4
# Fields that hold the number of neurons, by a word in the name of the MLP; the first that has the
# number is taken.
_WIDTHS = (
    ("shared_expert", ("shared_expert_intermediate_size",)),
    ("experts", ("moe_intermediate_size", "intermediate_size")),
    ("", ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")),
)


@dataclass(frozen=True, eq=False)
class Neurons(Parts):
    """The neurons of one MLP or expert."""

    kind = "neurons"
    layers = "mlp"
    rounded = True
    remedy = (
        "Its MLP stores gates and features in another order than is known here. Please report the "
        "class of the model."
    )
    missing = (
        "no MLP whose neurons can be told apart (a layer that reads one activation for each neuron)"
    )

    @staticmethod
    def _owner(layer: Layer) -> str:
        return layer.name.rpartition(".")[0]

    @classmethod
    def _of_layers(cls, targets: list[Target], model: UnitModel) -> Self | None:
        hidden = int(model.config.hidden_size)
        routed = targets[0].layer.expert is not None
        output = next(
            (target for target in reversed(targets[1:]) if target.matrix.rows == hidden), None
        )
        if output is None or (not routed and _NARROW * output.matrix.columns <= hidden):
            return None
        width = output.matrix.columns
        columns = np.arange(width, dtype=np.int64)[:, None]
        rows: dict[Target, Indices] = {}
        for target in targets[: targets.index(output)]:
            if target.matrix.columns != hidden:
                continue
            joined = target.layer.leaf in GATE_AND_UP and not routed
            if target.matrix.rows == width:
                rows[target] = columns
            elif target.matrix.rows == 2 * width and joined:
                rows[target] = np.concatenate([columns, columns + width], 1)
        if not rows:
            return None
        multiple_of = ""
        role = output.layer.role
        # A number of routed experts: of DeepSeek, GLM-4 MoE.
        shared = getattr(model.config, "n_shared_experts", None)
        routed_width = getattr(model.config, "moe_intermediate_size", None)
        if isinstance(shared, int) and isinstance(routed_width, int):
            is_multiple = width == shared * routed_width and "shared_expert" in role
            if is_multiple and not model.structure.keep_shapes:
                multiple_of = _role_of_experts(model, role)
        return cls.of(output, columns, rows, multiple_of=multiple_of)

    def check(self, recipe: Recipe) -> None:
        """Raise UserError if a recipe does not fit these neurons."""
        layer = self.output.layer
        assert recipe.structure is not None
        multiple = recipe.structure.width_multiple
        if layer.routed and recipe.name in BY_GRADIENTS:
            raise UserError(
                f"{self.name}: --method {recipe.method} does not reach experts. Use --method "
                "wanda or magnitude."
            )
        if layer.routed and multiple and multiple * self.output.matrix.itemsize % 16:
            needed = 16 // self.output.matrix.itemsize
            raise UserError(
                f"--width-multiple {multiple}: the products of all experts at once need a width "
                f"that is a multiple of {needed} in this dtype. Give {needed}, or a multiple of it."
            )

    def score_of_weights(self, squares: Squares, norms: Scores | None) -> Scores:
        score = super().score_of_weights(squares, norms)
        for target, rows in self.rows.items():
            score = score * np.sqrt(squares(target.matrix, 1))[rows].prod(1)
        return score

    def collected(self, feature: Callable[[str], Tensor | None]) -> Scores:
        if self.output.layer.routed and feature(self.name) is None:  # it saw no token
            return np.zeros(self.output.matrix.columns)
        return super().collected(feature)

    def fields(self, config: Any, stays: Mapping[int, int]) -> dict[str, Any]:
        number = stays[self.block]
        for name in next(names for word, names in _WIDTHS if word in self.role):
            width = getattr(config, name, 0)
            if isinstance(width, list) and len(self) in width:
                return {name: [stays.get(block, value) for block, value in enumerate(width)]}
            # LFM2 derives the width from this number.
            derives = name == "intermediate_size" and getattr(
                config, "block_auto_adjust_ff_dim", False
            )
            if derives:
                return {name: number, "block_auto_adjust_ff_dim": False}
            if width is None or width == len(self):  # None: left to the default of the model
                return {name: number}
        raise RefusedError(self.refusal.format(units=self, why="", another=""))


def _role_of_experts(model: UnitModel, shared: str) -> str:
    """The role of the neurons of routed experts beside shared ones, given the role of theirs. A
    checkpoint may name the layers of the two in other words (down_proj and w2).
    """
    before, _, leaf = shared.partition("shared_experts")
    architecture = model.architecture
    hidden = int(model.config.hidden_size)
    outputs = [
        layer.role
        for layer in architecture.layers
        if layer.expert is not None
        and layer.role.startswith(f"{before}experts.")
        and architecture.experts[layer.name].rows == hidden
    ]
    same = f"{before}experts.*{leaf}"
    return same if same in outputs or not outputs else outputs[-1]


# Attention heads.
#
# A head is known by `num_attention_heads`, its output layer (o_proj, out_proj, c_proj, dense) and
# the layers that make queries, keys and values, apart or in one matrix. What is not so named or
# shaped is refused.


_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, eq=False)
class Heads(Parts):
    """The heads of one attention; with shared keys and values, a unit may be a group of them.

    Attributes:
        heads: query heads in a unit.
        keys: heads of keys and values in a unit.
    """

    kind = "heads"
    layers = "attention"
    missing = (
        "no attention whose heads can be told apart (each head must have outputs of its own in "
        "layers of usual names)"
    )

    remedy = (
        "Its attention may depend on the number of heads; add --keep-shapes. Or it stores queries, "
        "keys and values in another order than is known here."
    )
    remedy_of_zeros = (
        "It stores queries, keys and values in another order than is known here, so its heads "
        "cannot be pruned. Please report the class of the model, and use --structure neurons."
    )

    refusal = Parts.refusal.replace("Keep", "Use --structure neurons, or keep")

    heads: int
    keys: int

    @staticmethod
    def _owner(layer: Layer) -> str:
        return ""

    @classmethod
    def _of_layers(cls, targets: list[Target], model: UnitModel) -> Self | None:
        by_leaf = {target.layer.leaf: target for target in targets}
        output = next((by_leaf[leaf] for leaf in ATTENTION_OUTPUTS if leaf in by_leaf), None)
        number = getattr(model.config, "num_attention_heads", None)
        if output is None or not isinstance(number, int) or output.matrix.columns % number:
            return None
        width = output.matrix.columns // number  # of a head
        made = _queries_keys_values(by_leaf, number, width)
        if made is None:
            return None
        module = output.name.rpartition(".")[0]
        # A norm over all heads needs all of them.
        sizes = [rows.size for _, rows in made[:2]]
        for norm in HEAD_NORMS:
            size = math.prod(model.architecture.shapes.get(f"{module}.{norm}.weight", ()))
            if number > 1 and size != width and size in sizes:
                return None
        keys = len(made[1][1])
        places = np.zeros(keys, dtype=np.int64)
        together = number // keys
        # Keys and values belong to all heads, so that they stay.
        if keys == 1 < number:
            places = np.arange(number) // together
            together = 1
            made = made[:1]
        units = number // together
        rows_of: dict[Target, Indices] = {}
        for target, rows in made:
            rows = rows.reshape(units, -1)
            before = rows_of.get(target, rows[:, :0])
            rows_of[target] = np.concatenate([before, rows], 1)
        columns = np.arange(number * width, dtype=np.int64).reshape(units, -1)
        keys_in_unit = int(len(made) > 1)
        noun = f"groups of {together} heads" if together > 1 else ""
        return cls.of(
            output, columns, rows_of, places, heads=together, keys=keys_in_unit, noun=noun
        )

    def fields(self, config: Any, stays: Mapping[int, int]) -> dict[str, Any]:
        number = stays[self.block]
        fields = {"num_attention_heads": number * self.heads}
        if self.keys:
            name = next((name for name in _KEY_HEADS if hasattr(config, name)), _KEY_HEADS[0])
            fields[name] = number
        return fields | {"head_dim": self.columns.shape[1] // self.heads}

    def kept_outputs(
        self, model: PreTrainedModel, kept: Indices, run: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The logits of a pass, and the outputs of the kept heads, shape (tokens, heads, columns),
        where a wrong order of heads shows.

        Args:
            model: the dense model, or the smaller one.
            run: passes a prompt through it, and returns the logits.
        """
        columns = torch.from_numpy(self.columns)
        inputs: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.append(args[0].float().cpu().flatten(0, -2))

        with model.get_submodule(self.output.layer.name).register_forward_pre_hook(note):
            logits = run()
        heads = columns[torch.from_numpy(kept)]
        if inputs[0].shape[-1] == columns.numel():  # all shapes are kept
            return logits, inputs[0][:, heads]
        return logits, inputs[0].reshape(-1, *heads.shape)


def _queries_keys_values(
    by_leaf: Mapping[str, Target], number: int, width: int
) -> list[tuple[Target, Indices]] | None:
    """The layers that make queries, keys and values, and the outputs of each head, shape (heads,
    outputs); None if the layers have other names, or their shapes do not fit.

    Args:
        by_leaf: the layers of an attention, by the last component of their names.
        number: of heads.
        width: of a head.
    """
    joined = next((by_leaf[leaf] for leaf in (*JOINED, *JOINED_BY_GROUP) if leaf in by_leaf), None)
    if joined is not None:
        keys, rest = divmod(joined.matrix.rows - number * width, 2 * width)
        if rest or keys < 1 or number % keys:
            return None
        rows = np.arange(joined.matrix.rows, dtype=np.int64).reshape(-1, width)
        if joined.layer.leaf in JOINED:
            return [(joined, heads) for heads in np.split(rows, [number, number + keys])]
        groups = rows.reshape(keys, number // keys + 2, width)
        queries = groups[:, :-2].reshape(number, width)
        return [(joined, queries), (joined, groups[:, -2]), (joined, groups[:, -1])]
    if not by_leaf.keys() >= set(QUERY_KEY_VALUE):
        return None
    layers = [by_leaf[leaf] for leaf in QUERY_KEY_VALUE]
    query_rows, key_rows, value_rows = (layer.matrix.rows for layer in layers)
    keys, rest = divmod(value_rows, width)
    if rest or keys < 1 or number % keys or query_rows % number or key_rows % keys:
        return None
    return [
        (layer, np.arange(layer.matrix.rows, dtype=np.int64).reshape(count, -1))
        for layer, count in zip(layers, (number, keys, keys), strict=True)
    ]
