"""Units: the attention heads and MLP neurons of a language model, as rows and columns of its matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from emp_llm.models.layers import Layer

Indices = NDArray[np.int64]
UnitKind = Literal["heads", "neurons"]


@dataclass(frozen=True, eq=False)
class Units:
    """The heads of one attention, or the neurons of one MLP or expert.

    Attributes:
        kind, block: what they are, and the number of their decoder block.
        output: the layer that reads them (o_proj, down_proj).
        columns: inputs of `output` that belong to each unit, shape (units, columns).
        rows: layer -> outputs that belong to each unit, shape (units, rows).
        places: number of the group of heads that share keys and values, shape (units,); all 0 if units are taken from all.
        heads: attention heads in a unit; 0 for neurons.
        keys: heads of keys and values in a unit: 0 if a unit is a query head among others of the same keys.
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

    def rows_of(self, layer: Layer, chosen: Indices) -> Indices:
        """The outputs of a layer that belong to chosen units, in ascending order."""
        return np.unique(self.rows[layer][chosen])

    def columns_of(self, chosen: Indices) -> Indices:
        """The inputs of `output` that belong to chosen units, in ascending order."""
        return np.unique(self.columns[chosen])


def grouped(heads: Units) -> Units:
    """Units of whole groups: the query heads that share keys and values, with these keys and values."""
    groups = [np.flatnonzero(heads.places == place) for place in np.unique(heads.places)]
    if len({len(group) for group in groups}) != 1:
        raise ValueError("the groups of heads differ in size")
    return Units(
        kind="heads",
        block=heads.block,
        output=heads.output,
        columns=np.stack([heads.columns_of(group) for group in groups]),
        rows={layer: np.stack([heads.rows_of(layer, group) for group in groups]) for layer in heads.rows},
        places=np.zeros(len(groups), dtype=np.int64),
        heads=heads.heads * len(groups[0]),
        keys=1,
    )


def queries(heads: Units) -> Units:
    """Units of single query heads: only the rows that no other head has. Keys and values that heads share stay."""
    rows = {}
    for layer, each in heads.rows.items():
        taken, times = np.unique(each, return_counts=True)
        own = np.isin(each, taken[times == 1])
        counts = own.sum(1)
        if counts[0] and (counts == counts[0]).all():
            rows[layer] = each[own].reshape(len(each), -1)
    alone = len(np.unique(heads.places)) == len(heads)
    return Units(
        heads.kind,
        heads.block,
        heads.output,
        heads.columns,
        rows,
        np.zeros(len(heads), dtype=np.int64) if alone else heads.places,
        heads.heads,
        int(alone),
    )


def of_kinds(every: Sequence[Units], kinds: Sequence[UnitKind]) -> list[Units]:
    """The units of these kinds, in the model's order."""
    return [units for units in every if units.kind in kinds]
