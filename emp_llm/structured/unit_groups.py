"""Units: the neurons of a linear layer, the filters of a convolution; and the places in a model where each of them is found."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

# The layers whose outputs are units: `weight` has one row for each.
UNIT_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

Axis = Literal["outputs", "inputs", "channels"]
Cuts = dict[str, dict[Axis, list[int]]]


@dataclass(frozen=True)
class UnitPlace:
    """A place where a model holds something of each unit of a group.

    Attributes:
        module: name of the module.
        axis: "outputs": rows of a weight and entries of its bias; "inputs": columns of a weight; "channels": entries of a
            normalisation, or of a PReLU.
        positions: int64, the positions on the axis.
        units: int64, the same shape: the unit of the group at each position.
    """

    module: str
    axis: Axis
    positions: Tensor
    units: Tensor


@dataclass(frozen=True)
class UnitGroup:
    """Units that are kept or pruned together: those of one layer, or of layers whose outputs are added.

    Attributes:
        name: of its first layer.
        size: number of units.
        places: all places that hold something of a unit.
    """

    name: str
    size: int
    places: tuple[UnitPlace, ...]

    @property
    def layers(self) -> list[str]:
        """The layers whose outputs the units are."""
        return [place.module for place in self.places if place.axis == "outputs"]

    def score(self, scores: dict[str, Tensor]) -> Tensor:
        """The score of each unit: the sum of its scores in the layers; float64, shape (size,)."""
        total = torch.zeros(self.size, dtype=torch.float64)
        for place in self.places:
            if place.axis == "outputs":
                total.index_add_(0, place.units, scores[place.module][place.positions])
        return total


def unit_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model whose outputs are units, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, UNIT_LAYERS)}


def unit_count(module: nn.Module) -> int:
    """The number of a layer's units."""
    each: Any = module
    return int(each.weight.shape[0])


def is_depthwise(module: nn.Module) -> bool:
    """Whether a convolution applies one filter to each channel."""
    each: Any = module
    return isinstance(module, CONVOLUTIONS) and each.groups == each.in_channels == each.out_channels > 1


def unit_kind(module: nn.Module) -> str:
    """The name of a layer's units."""
    return "neurons" if isinstance(module, nn.Linear) else "filters"


def own_group(name: str, size: int, batch_norm: str | None) -> UnitGroup:
    """The units of a layer alone, with the batch normalisation that reads them."""
    every = torch.arange(size)
    places = [UnitPlace(name, "outputs", every, every)]
    if batch_norm is not None:
        places.append(UnitPlace(batch_norm, "channels", every, every))
    return UnitGroup(name, size, tuple(places))


def cuts_of(groups: Iterable[UnitGroup], masks: Iterable[Tensor]) -> Cuts:
    """What the masks of groups remove: module -> axis -> positions in ascending order.

    Args:
        masks: one for each group: bool, shape (size,), true where a unit is kept.
    """
    cuts: Cuts = {}
    for group, mask in zip(groups, masks, strict=True):
        for place in group.places:
            removed = place.positions[~mask[place.units]].tolist()
            if removed:
                axes = cuts.setdefault(place.module, {})
                axes[place.axis] = sorted({*axes.get(place.axis, []), *removed})
    return cuts
