"""The report of pruned units: what each layer lost, what was left alone and why, parameters and FLOPs before and after."""

from dataclasses import dataclass

from torch import Tensor

from emp_llm.common.tables import number_cell, percent_cell, table
from emp_llm.structured.unit_groups import Cuts
from emp_llm.structured.unit_selection import UnitNumbers


@dataclass(frozen=True)
class LayerUnits:
    """The units of a layer.

    Attributes:
        kind: "neurons" or "filters".
        units, kept: their number before and after.
        group: the first of the layers that are coupled with it; its own name, if it is that or alone.
        numbers: effective number and mass of its group; None if the units of all groups compete.
    """

    kind: str
    units: int
    kept: int
    group: str
    numbers: UnitNumbers | None


@dataclass(frozen=True)
class UnitReport:
    """The effect of `prune_units`.

    Attributes:
        layers: name -> the units of each pruned layer.
        left: name -> why the units of a layer were left alone.
        masks: name -> bool, shape (units,), true where a unit was kept, for each pruned layer.
        cuts: module -> axis -> positions removed, for `zero_units` and `remove_units`; it can be written as JSON.
        numbers: effective number and mass of all units, if they compete; else None.
        saved: groups that would have lost all units, and kept their largest.
        removed: whether units were removed; else they are zero.
        parameters, flops: (before, after) with the units removed. After is None with coupled="alone", which only zeroes.
            FLOPs are those of one call with the example; a multiplication and an addition count as two.
        difference: largest difference between outputs with units removed and zeroed, on the example, relative to the largest
            output; None with coupled="alone".
    """

    layers: dict[str, LayerUnits]
    left: dict[str, str]
    masks: dict[str, Tensor]
    cuts: Cuts
    numbers: UnitNumbers | None
    saved: list[str]
    removed: bool
    parameters: tuple[int, int | None]
    flops: tuple[int, int | None]
    difference: float | None

    @property
    def units(self) -> int:
        """Number of units of all groups; those of coupled layers count once."""
        return sum(layer.units for name, layer in self.layers.items() if layer.group == name)

    @property
    def kept(self) -> int:
        """Number of units kept, of `units`."""
        return sum(layer.kept for name, layer in self.layers.items() if layer.group == name)

    @property
    def sparsity(self) -> float:
        """The share of the units of all groups that was pruned."""
        return (self.units - self.kept) / self.units

    def __str__(self) -> str:
        rows = [["layer", "units", "kept", "removed %", "N_eff", "s_eff %", "coupled with"]]
        for name, layer in self.layers.items():
            numbers = layer.numbers
            n_eff, s_eff = (None, None) if numbers is None else (numbers.n_eff, numbers.s_eff)
            share = percent_cell(1 - layer.kept / layer.units)
            coupled = "" if layer.group == name else layer.group
            rows.append(
                [name, f"{layer.units} {layer.kind}", str(layer.kept), share, number_cell(n_eff), percent_cell(s_eff), coupled]
            )
        lines = [table(rows), ""]
        if self.numbers is not None:
            lines.append(f"All units compete: N_eff {self.numbers.n_eff:.3f} of {self.numbers.size}.")
        lines += [f"{name} kept its largest unit, which the rule would have removed." for name in self.saved]
        for what, (before, after) in (("parameters", self.parameters), ("FLOPs", self.flops)):
            if after is None:
                lines.append(f"{what}: {before:,}, unchanged: units are zero, not removed.")
            else:
                rest = "" if self.removed else " if they were removed"
                lines.append(f"{what}: {before:,} -> {after:,} ({after / before:.1%}){rest}")
        lines += [f"left alone: {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines)
