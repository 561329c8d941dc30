"""By how much two activations files differ: what another device, dtype, batch size or text does to the norms."""

from dataclasses import dataclass
from pathlib import Path

import torch

from emp_llm.models.activations import Activations


@dataclass(frozen=True)
class NormsDifference:
    """The differences between the norms of two activations files, layer by layer.

    Attributes:
        layers: of each layer that both have, the largest and the mean relative difference |a - b| / max(a, b) of its inputs
            (0 where both are 0), the worst layer first.
        only: layers that only one of the two has, or has with another number of inputs.
        about: fields of what made them that differ: the field, of the first, of the second.
    """

    layers: dict[str, tuple[float, float]]
    only: list[str]
    about: list[tuple[str, str, str]]

    @property
    def largest(self) -> float:
        """The largest relative difference of all."""
        return max((largest for largest, _ in self.layers.values()), default=0.0)

    @property
    def mean(self) -> float:
        """The mean over layers of their mean relative differences."""
        means = [mean for _, mean in self.layers.values()]
        return sum(means) / len(means) if means else 0.0


def compare_norms(first: Path, second: Path) -> NormsDifference:
    """Compare two activations files.

    Raises:
        UserError: one is missing, or not an activations file.
    """
    a, b = Activations.load(first), Activations.load(second)
    layers: dict[str, tuple[float, float]] = {}
    only = sorted(a.input_of.keys() ^ b.input_of.keys())
    for layer in sorted(a.input_of.keys() & b.input_of.keys()):
        mine, theirs = a.norm(layer), b.norm(layer)
        assert mine is not None
        assert theirs is not None
        if mine.shape != theirs.shape:
            only.append(layer)
            continue
        larger = torch.maximum(mine, theirs).double()
        relative = torch.where(larger > 0, (mine.double() - theirs.double()).abs() / larger, 0.0)
        layers[layer] = (float(relative.max()), float(relative.mean()))
    worst_first = dict(sorted(layers.items(), key=lambda item: -item[1][0]))
    fields = [*a.about, *(field for field in b.about if field not in a.about)]
    differ = [(field, str(a.about.get(field)), str(b.about.get(field))) for field in fields]
    return NormsDifference(worst_first, only, [entry for entry in differ if entry[1] != entry[2]])
