"""Statistics of each input feature of a layer over the calibration tokens.

A statistic is the total of batches of tokens, turned into a value at the end. Totals are combined
over batches, ranks and the runs of an interrupted calibration. Calibration, activations files and
criteria know statistics by name, from `STATISTICS`; only this file knows what they are. No torch is
imported before a statistic is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from emp_llm.common.machine import exact_device, in_float64

if TYPE_CHECKING:
    from torch import Tensor

# Added up at a time; the bits of a matrix product would depend on the number of threads.
_TOKENS = 1024


class LayerCall(NamedTuple):
    """The tokens that one call of a layer saw.

    Attributes:
        inputs: x_tj, floating, shape (tokens, inputs).
        squares: x_tj^2, float32, shape (tokens, inputs).
        outputs: y_t, floating, shape (tokens, outputs).
    """

    inputs: "Tensor"
    squares: "Tensor"
    outputs: "Tensor"


@dataclass(frozen=True)
class Statistic:
    """A statistic of each input feature.

    Attributes:
        name: in files, and as an argument of criteria.
        total: of a batch: float64, on the CPU if the inputs' device has no such numbers; the last
            dimension being the inputs; zeros for no tokens.
        value: from the total of all batches and their number of tokens: shape (inputs,).
        combine: of the totals of two batches.
        by_outputs: it depends on the layer's outputs; others are shared by layers with one input.
        signed: its values may be below zero.
    """

    name: str
    total: "Callable[[LayerCall], Tensor]"
    value: "Callable[[Tensor, int], Tensor]"
    combine: "Callable[[Tensor, Tensor], Tensor]" = lambda one, other: one + other
    by_outputs: bool = False
    signed: bool = False


def _sum(values: "Tensor") -> "Tensor":
    """The sum over the tokens, in float64."""
    import torch

    pieces = torch.split(values, _TOKENS)
    return torch.stack([in_float64(piece).sum(0) for piece in pieces]).sum(0)


def _relative(batch: LayerCall) -> "Tensor":
    """sum_t x_tj^2 / ||y_t||^2 over the tokens whose output is finite and not zero."""
    import torch

    squares = batch.squares
    dtype = torch.promote_types(batch.outputs.dtype, torch.float32)
    norms = in_float64(torch.linalg.vector_norm(batch.outputs, dim=-1, dtype=dtype))
    # An output that is not finite is noticed as the input of the next layer, or as a damaged
    # weight.
    counts = (norms > 0) & torch.isfinite(norms)
    weights = torch.where(counts, norms.square().reciprocal(), 0.0)
    weights = weights.to(exact_device(squares.device))
    # Scaled so that no weight overflows float32; by a power of two, so that the sum is a float32
    # but for its exponent, and sums of batches are exact, as the plain ones are.
    scale = torch.exp2(torch.frexp(weights.sum()).exponent.double())
    scaled = torch.split((weights / scale).float().to(squares.device), _TOKENS)
    pieces = torch.split(squares, _TOKENS)
    sums = [
        in_float64((weight[:, None] * piece).sum(0))
        for weight, piece in zip(scaled, pieces, strict=True)
    ]
    return torch.stack(sums).sum(0) * scale


def _sums_and_squares(batch: LayerCall) -> "Tensor":
    """sum_t x_tj and sum_t x_tj^2, shape (2, inputs)."""
    import torch

    return torch.stack([_sum(batch.inputs), _sum(batch.squares)])


def _variance(moments: "Tensor", tokens: int) -> "Tensor":
    means = moments / max(tokens, 1)
    return (means[1] - means[0].square()).clamp(min=0)


def _largest_input(batch: LayerCall) -> "Tensor":
    sizes = batch.inputs.abs()
    return in_float64(sizes.amax(0) if len(sizes) else sizes.sum(0))


NORM = Statistic(
    "norm",
    # Squares of a batch are summed in float32. float64 holds sums of thousands of these without
    # rounding, so that the norms do not depend on the order of the batches.
    total=lambda batch: in_float64(batch.squares.sum(0)),
    value=lambda total, tokens: total.sqrt(),
)
RELATIVE = Statistic(
    "relative", total=_relative, value=lambda total, tokens: total.sqrt(), by_outputs=True
)
MEAN = Statistic(
    "mean",
    total=lambda batch: _sum(batch.inputs),
    value=lambda total, tokens: total / max(tokens, 1),
    signed=True,
)
VARIANCE = Statistic("variance", total=_sums_and_squares, value=_variance)
MAXIMUM = Statistic(
    "maximum",
    total=_largest_input,
    value=lambda total, tokens: total,
    combine=lambda one, other: one.maximum(other),
)
STATISTICS = {statistic.name: statistic for statistic in (NORM, RELATIVE, MEAN, VARIANCE, MAXIMUM)}
