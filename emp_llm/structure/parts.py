"""What heads and neurons share: they are rows and columns of layers, one of which reads them.

magnitude: of a head ||W_O[:, h]||_F, the norm of its columns in the output projection; of a neuron
    the product of the norms of its rows and of its column, ||gate row|| * ||up row|| * ||down
    column||.
wanda: the same, with every column of the last matrix multiplied by the norm ||X_j||_2 of its input.
taylor: sum over tokens and columns of |dL/dY * Y|, with Y the inputs of the last matrix (the heads'
    outputs, the activations of the neurons) and L the loss of the next token.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import SAVE_AGAIN
from emp_llm.common.errors import RefusedError, UserError, shorten_list
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.layers import Layer, Purpose, Shape
from emp_llm.structure.scores import taylor_sums
from emp_llm.structure.units import Changes, Cuts, Indices, Scores, Squares, UnitModel, Units
from emp_llm.update.update import Update
from emp_llm.walk.moved import UpdatedWeights
from emp_llm.walk.update import update_model


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
        return cls(
            name=output.name,
            role=layer.role,
            block=layer.block or 0,
            places=np.zeros(len(columns), dtype=np.int64) if places is None else places,
            least=1,
            targets=[*rows, output],
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
        units = [parts for parts in all_parts if parts is not None]
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

    @classmethod
    def differ_in_number(cls, config: Any) -> bool:
        return isinstance(getattr(config, "intermediate_size", 0), list)

    @property
    def collected_shape(self) -> tuple[int, ...]:
        return (self.output.matrix.columns,)

    @property
    def calibrated(self) -> list[Layer]:
        return [self.output.layer]

    def score_of_weights(self, squares: Squares, norms: Scores | None) -> Scores:
        of_columns = squares(self.output.matrix, 0)
        if norms is not None:
            of_columns = of_columns * norms**2
        return np.sqrt(of_columns[self.columns].sum(1))  # type: ignore[no-any-return]

    @classmethod
    def sums(
        cls, runner: BlockwiseModel, units: Sequence[Units], tokens: Tensor, batch_size: int
    ) -> dict[str, Tensor]:
        return taylor_sums(runner, units, tokens, batch_size)

    def score_of_sums(self, criterion: str, sums: Scores) -> Scores:
        return sums[self.columns].sum(1)  # type: ignore[no-any-return]

    def cut(self, model: UnitModel, kept: Indices, cuts: Cuts) -> None:
        gone = self.gone(kept)
        tables = [(self.output, self.columns, 1)]
        tables += [(target, rows, 0) for target, rows in self.rows.items()]
        for target, table, dimension in tables:
            matrix = target.matrix
            removed = table[gone].ravel()
            stored = matrix.stored
            # A transposed matrix is stored with its inputs first.
            place = 1 - dimension if matrix.transposed else dimension
            cuts.leave_out(stored.name, matrix.expert, stored.shape[-2:], place, removed)
            bias = model.architecture.stored_names.get(f"{target.name}.bias")
            if dimension == 0 and bias is not None and matrix.expert is None:
                cuts.leave_out(bias, None, (matrix.rows,), 0, removed)

    @classmethod
    def config_changes(cls, model: UnitModel, kept: Sequence[Indices]) -> Changes:
        units = Parts.among(model.units)
        changes = _one_width(model, units, kept)
        shapes = model.shapes_with(changes)
        fewer = [parts for parts, stays in zip(units, kept, strict=True) if len(stays) < len(parts)]
        if shapes is None:
            raise fewer[0].no_field()
        for name, shape in _smaller_shapes(model, units, kept).items():
            if shapes.get(name) != shape:
                owner = next(
                    (
                        parts
                        for parts in fewer
                        if name in {target.layer.parameter for target in parts.targets}
                    ),
                    fewer[0],
                )
                raise owner.no_field(f" (its model would need another {name})")
        return changes

    @abstractmethod
    def fields(self, config: Any, stays: Mapping[int, int]) -> dict[str, Any]:
        """The fields of a text config that hold the number of units, with their new values.

        Args:
            stays: number of a block -> how many units of this role stay there; at least of this
                one, and of all that lose some if the config has a number for each block.

        Raises:
            UserError: no field has the number.
        """

    def no_field(self, why: str = "") -> RefusedError:
        """The error if config.json cannot say these numbers of units."""
        return RefusedError(
            f"config.json cannot say these numbers of {self.kind} of {self.role}{why}. Give "
            "another amount, or keep all shapes and set the removed ones to zero: --keep-shapes."
        )

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


def _one_width(model: UnitModel, units: Sequence[Parts], kept: Sequence[Indices]) -> Changes:
    """The fields of config.json that hold the number of units of all layers."""
    config = model.checkpoint.config
    changes = Changes()

    def put(name: str, value: Any) -> None:
        path = model.path(name)
        if (config[path[0]] if len(path) > 1 else config).get(path[-1]) != value:
            changes[path] = value

    widths = {parts.role: len(stays) for parts, stays in zip(units, kept, strict=True)}
    first: dict[str, Parts] = {}
    numbers: dict[str, dict[int, int]] = {}
    for parts, stays in zip(units, kept, strict=True):
        if parts.multiple_of:
            put("n_shared_experts", len(stays) // widths[parts.multiple_of])
        elif len(stays) < len(parts):
            first.setdefault(parts.role, parts)
            numbers.setdefault(parts.role, {})[parts.block] = len(stays)
    # Neurons, then heads.
    for role, parts in sorted(first.items(), key=lambda item: item[1].kind, reverse=True):
        for name, value in parts.fields(model.config, numbers[role]).items():
            put(name, value)
    return changes


def _smaller_shapes(
    model: UnitModel, units: Sequence[Parts], kept: Sequence[Indices]
) -> dict[str, Shape]:
    """The shape of every parameter of transformers' model after the removal."""
    shapes = dict(model.architecture.shapes)
    for parts, stays in zip(units, kept, strict=True):
        gone = len(parts) - len(stays)
        for target in parts.targets:
            layer = target.layer
            expert = layer.expert
            if expert is not None and expert.expert > 0:
                continue  # all experts have the width of the first
            rows = gone * parts.rows[target].shape[1] if target in parts.rows else 0
            columns = gone * parts.columns.shape[1] if target is parts.output else 0
            transposed = layer.transposed if expert is None else expert.transposed
            less = (columns, rows) if transposed else (rows, columns)
            *stack, first, second = shapes[layer.parameter]
            shapes[layer.parameter] = (*stack, first - less[0], second - less[1])
            bias = f"{layer.name}.bias"
            if expert is None and bias in shapes:
                shapes[bias] = (shapes[bias][0] - rows,)
    return shapes
