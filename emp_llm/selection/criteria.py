"""Statistics of each input feature of a layer over the calibration tokens.

A statistic is the total of batches of tokens, turned into a value at the end. Totals are combined
over batches, ranks and the runs of an interrupted calibration. Calibration, activations files and
criteria know statistics by name, from `STATISTICS`; only this file knows what they are. No torch is
imported before a statistic is computed.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


# Criteria: the importance of each weight. A criterion is a value, a function with a name.
#
# The function takes the weights of a layer, shape (outputs, inputs), and the statistics of its
# inputs. It returns scores of the same shape. The dtype of the scores decides ties: the dtype of
# the weights for magnitude, float32 or wider for wanda.


Score = Callable[..., "Tensor"]
_PIECE = 1 << 20  # weights in float64 at a time


@dataclass(frozen=True)
class InputStatistics:
    """The inputs of a layer over the calibration tokens.

    Attributes:
        norms: of each input feature j, float32, shape (inputs,): ||X_j||_2, or sqrt(sum_t x_tj^2 /
            ||y_t||^2), relative to the layer's outputs y_t.
        tokens: number of tokens; None if unknown.
        others: the further statistics that a criterion reads, by name, float32, shape (inputs,).
    """

    norms: "Tensor"
    tokens: int | None = None
    others: "Mapping[str, Tensor]" = field(default_factory=dict)


@dataclass(frozen=True)
class Criterion:
    """A criterion.

    Attributes:
        name: in methods.
        score: takes the weights, the `InputStatistics` if `takes_inputs`, and each of `statistics`
            by name; returns the scores.
        takes_inputs: whether it is given the norms and the number of tokens.
        statistics: names of those that it is given beside them, of `selection.criteria`.
        whole: it is given whole matrices, because it may compare rows; the others get chunks of
            rows.
    """

    name: str
    score: Score
    takes_inputs: bool = False
    statistics: tuple[str, ...] = ()
    whole: bool = False

    @property
    def calibrated(self) -> bool:
        """Whether it needs statistics of the inputs."""
        return self.takes_inputs or bool(self.statistics)

    def of(self, weight: "Tensor", inputs: InputStatistics | None) -> "Tensor":
        """The scores of a matrix, or of a chunk of its rows."""
        if not self.calibrated:
            return self.score(weight)
        assert inputs is not None
        others = {name: inputs.others[name] for name in self.statistics}
        return self.score(weight, *([inputs] * self.takes_inputs), **others)


def magnitude(weight: "Tensor") -> "Tensor":
    """|W_ij|, in the shape and dtype of the weight."""
    return weight.abs()


def wanda(weight: "Tensor", inputs: InputStatistics | None) -> "Tensor":
    """|W_ij| * ||X_j||_2.

    Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023.

    Args:
        weight: shape (outputs, inputs).
        inputs: with float32 norms of shape (inputs,).

    Returns:
        float32 (float64 for a float64 weight), shape (outputs, inputs). Only the product is
        rounded.

    Raises:
        ValueError: no norms, or norms of another shape.
    """
    import torch

    norms = _norms_of(inputs, weight.shape[-1])
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype).abs() * norms.to(weight.device, dtype)


def ria(weight: "Tensor", inputs: InputStatistics | None) -> "Tensor":
    """(|W_ij| / sum_j |W_ij| + |W_ij| / sum_i |W_ij|) * ||X_j||^0.5.

    Relative importance and activations (Zhang et al., "Plug-and-Play: An Efficient Post-training
    Pruning Method for Large Language Models", 2024).

    Args:
        weight: shape (outputs, inputs), the whole matrix. Shares of a row or column of zeros are
            zero.
        inputs: with float32 norms of shape (inputs,).

    Returns:
        float32 (float64 for a float64 weight), shape (outputs, inputs), rounded from float64.

    Raises:
        ValueError: no norms, or norms of another shape.
    """
    import torch

    from emp_llm.selection.reference import sum_rows

    norms = _norms_of(inputs, weight.shape[-1])
    factors = norms.to(weight.device).double().sqrt()
    size = weight.abs()
    sums = (sum_rows(matrix)[0] for matrix in (size, size.T))
    of_rows, of_columns = (total.where(total > 0, 1.0) for total in sums)
    scores = torch.empty(
        weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device
    )
    step = max(1, _PIECE // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        piece = size[first : first + step].double()
        shares = piece / of_rows[first : first + step, None] + piece / of_columns
        scores[first : first + step] = shares * factors
    return scores


def _norms_of(inputs: InputStatistics | None, columns: int) -> "Tensor":
    """The norms; ValueError unless there are any, of shape (columns,)."""
    if inputs is None:
        raise ValueError("the criterion needs the norms of the layer's inputs")
    shape = tuple(inputs.norms.shape)
    if shape != (columns,):
        raise ValueError(
            f"norms have shape {shape}; weights with {columns} inputs need ({columns},)"
        )
    return inputs.norms


def _no_score(*_: object) -> "Tensor":
    raise ValueError("the scores of this criterion are given, not computed")


MAGNITUDE = Criterion("magnitude", magnitude)
WANDA = Criterion("wanda", wanda, takes_inputs=True)
RIA = Criterion("ria", ria, takes_inputs=True, whole=True)
# The scores come from the user.
GIVEN = Criterion("scores", _no_score, whole=True)


def own_criterion(function: Score, name: str | None = None) -> Criterion:
    """A criterion of the user's own.

    Args:
        function: `score(weight)`, or `score(weight, inputs)` if it needs a calibration. `weight`
            has the shape (outputs, inputs) and the dtype of the model, `inputs` is an
            `InputStatistics`. Arguments after a `*` are further statistics by name: `score(weight,
            *, variance)`. It returns one finite score per weight; the largest are kept. Scores
            below zero need a score map (`Own.score_map`).
        name: letters, digits and underscores; None: the name of the function.

    Raises:
        ValueError: the name is no identifier, or the function takes other arguments.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise ValueError(
            f"a criterion's name consists of letters, digits and underscores, got {name!r}"
        )
    parameters = inspect.signature(function).parameters.values()
    required = [argument for argument in parameters if argument.default is argument.empty]
    positional = [
        argument
        for argument in required
        if argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    statistics = tuple(
        argument.name for argument in required if argument.kind == argument.KEYWORD_ONLY
    )
    if not 1 <= len(positional) <= 2:
        raise ValueError(
            f"the criterion {name} must take the arguments (weight) or (weight, inputs)"
        )
    unknown = next((name for name in statistics if name not in STATISTICS), None)
    if unknown is not None:
        raise ValueError(
            f"the criterion {name} asks for {unknown}, which is no statistic of the inputs; there "
            f"are {', '.join(STATISTICS)}"
        )
    return Criterion(name, function, len(positional) == 2, statistics, whole=True)


def shift(scores: "Tensor", dim: int | tuple[int, ...] = -1) -> "Tensor":
    """s - min s over `dim`: signed scores, where negative means "remove", become non-negative
    and keep their order.
    """
    return scores - scores.amin(dim, keepdim=True)


def exponential(scores: "Tensor", dim: int | tuple[int, ...] = -1) -> "Tensor":
    """exp(s - max s) over `dim`, the paper's other map. The factor exp(-max s) prevents overflow
    and cancels in omega.
    """
    return (scores - scores.amax(dim, keepdim=True)).exp()
