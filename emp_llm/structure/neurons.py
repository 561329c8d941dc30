"""MLP neurons, of experts too.

A neuron is known by shapes alone: one layer of an MLP maps hidden states to features, or to
features and gates, and a later one maps the features back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.models.layers import Layer
from emp_llm.models.names import GATE_AND_UP
from emp_llm.options.recipe import Recipe
from emp_llm.structure.parts import Parts
from emp_llm.structure.units import Indices, Scores, Squares, UnitModel

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
        layer = self.output.layer
        assert recipe.structure is not None
        multiple = recipe.structure.width_multiple
        if layer.routed and recipe.name == "taylor":
            raise UserError(
                f"{self.name}: --method taylor does not reach experts. Use --method "
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
        raise self.no_field()


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
