"""Attention heads.

A head is known by `num_attention_heads`, its output layer (o_proj, out_proj, c_proj, dense) and the
layers that make queries, keys and values, apart or in one matrix. What is not so named or shaped is
refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.models.architecture import Target
from emp_llm.models.layers import Layer
from emp_llm.models.names import (
    ATTENTION_OUTPUTS,
    HEAD_NORMS,
    JOINED,
    JOINED_BY_GROUP,
    QUERY_KEY_VALUE,
)
from emp_llm.structure.parts import Parts
from emp_llm.structure.units import Indices, UnitModel

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
        return cls.of(output, columns, rows_of, places, heads=together, keys=keys_in_unit)

    @property
    def noun(self) -> str:
        return f"groups of {self.heads} heads" if self.heads > 1 else self.kind

    @property
    def scored(self) -> list[Target]:
        return [self.output]

    def fields(self, config: Any, stays: Mapping[int, int]) -> dict[str, Any]:
        number = stays[self.block]
        fields = {"num_attention_heads": number * self.heads}
        if self.keys:
            name = next((name for name in _KEY_HEADS if hasattr(config, name)), _KEY_HEADS[0])
            fields[name] = number
        return fields | {"head_dim": self.columns.shape[1] // self.heads}

    def kept_outputs(
        self, model: PreTrainedModel, kept: Indices, run: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        if len(kept) == len(self):
            return None
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
