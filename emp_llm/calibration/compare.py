"""The difference of two activations files: the effect of another device, dtype, batch size or text on the norms."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from emp_llm.calibration.activations import Activations
from emp_llm.common.tables import table
from emp_llm.common.wording import count_of


@dataclass(frozen=True)
class NormsDifference:
    """The differences between the norms of two activations files, layer by layer.

    Attributes:
        layers: name -> the largest and the mean relative difference |a - b| / max(a, b) over its inputs (0 where both are 0),
            for each layer in both files, the worst layer first.
        relative: the same for the norms relative to the outputs, for each layer that has them in both files.
        only: layers in only one of the two, or with different numbers of inputs.
        about: differences in their origin: field, value in the first file, value in the second.
    """

    layers: dict[str, tuple[float, float]]
    relative: dict[str, tuple[float, float]]
    only: list[str]
    about: list[tuple[str, str, str]]

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return _overall(self.layers)[0]

    @property
    def mean(self) -> float:
        """The mean over layers of their mean relative differences."""
        return _overall(self.layers)[1]


def compare_norms(first: Path, second: Path) -> NormsDifference:
    """Compare two activations files.

    Raises:
        UserError: one is missing, or is not an activations file.
    """
    a, b = Activations.load(first), Activations.load(second)
    layers, only = _differences(a.input_of.keys(), b.input_of.keys(), a.norm, b.norm)
    relative, _ = _differences(
        a.relative.keys(), b.relative.keys(), lambda layer: a.norm(layer, True), lambda layer: b.norm(layer, True)
    )
    one, other = a.about.as_dict(), b.about.as_dict()
    differ = [(field, str(one.get(field)), str(other.get(field))) for field in dict.fromkeys([*one, *other])]
    return NormsDifference(layers, relative, only, [entry for entry in differ if entry[1] != entry[2]])


def _differences(
    first: Set[str], second: Set[str], norm_a: Callable[[str], Tensor | None], norm_b: Callable[[str], Tensor | None]
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """The differences of the layers in both files, the worst first; and the other layers."""
    layers: dict[str, tuple[float, float]] = {}
    only = sorted(first ^ second)
    for layer in sorted(first & second):
        a, b = norm_a(layer), norm_b(layer)
        assert a is not None
        assert b is not None
        if a.shape != b.shape:
            only.append(layer)
            continue
        larger = torch.maximum(a, b).double()
        share = torch.where(larger > 0, (a.double() - b.double()).abs() / larger, 0.0)
        layers[layer] = (float(share.max()), float(share.mean()))
    return dict(sorted(layers.items(), key=lambda item: -item[1][0])), only


def _overall(layers: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """The largest of the differences, and the mean of their means."""
    means = [mean for _, mean in layers.values()]
    return max((largest for largest, _ in layers.values()), default=0.0), sum(means) / len(means) if means else 0.0


def difference_table(difference: NormsDifference) -> str:
    """A table of the ten layers that differ most, and a line for all layers."""
    rows = [["layer", "largest", "mean"]]
    rows += [[name, f"{largest:.3g}", f"{mean:.3g}"] for name, (largest, mean) in list(difference.layers.items())[:10]]
    lines = [table(rows)] if difference.layers else []
    lines.append(
        f"relative differences of the norms of {count_of(len(difference.layers), 'layer')}: {difference.largest:.3g} at most, "
        f"{difference.mean:.3g} on average"
    )
    if difference.relative:
        largest, mean = _overall(difference.relative)
        count = count_of(len(difference.relative), "layer")
        lines.append(f"of the norms relative to the outputs of {count}: {largest:.3g} at most, {mean:.3g} on average")
    if difference.only:
        names = ", ".join(difference.only[:3])
        lines.append(f"only in one file, or with another number of inputs: {count_of(len(difference.only), 'layer')} ({names})")
    lines += [f"{field}: {first[:60]} | {second[:60]}" for field, first, second in difference.about]
    return "\n".join(lines)
