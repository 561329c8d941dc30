"""Criteria: the importance of each weight. A new criterion is one function here and one line in CRITERIA.

A criterion takes a block of weight rows, shape (outputs, inputs), and the norms of their inputs. It returns non-negative scores
of the same shape. Their dtype decides ties: the dtype of the weights for magnitude, float32 or wider for wanda.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


def magnitude(weight: "Tensor", norms: "Tensor | None" = None) -> "Tensor":
    """|W_ij|, in the shape and dtype of the weight. The norms are not used."""
    return weight.abs()


def wanda(weight: "Tensor", norms: "Tensor | None") -> "Tensor":
    """|W_ij| * ||X_j||_2 (Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023).

    Args:
        weight: shape (outputs, inputs).
        norms: float32, shape (inputs,): the 2-norm of each input feature over all calibration tokens.

    Returns:
        float32 (float64 for a float64 weight), shape (outputs, inputs). Only the product is rounded.

    Raises:
        ValueError: no norms, or norms of another shape.
    """
    import torch

    norms = check_norms(norms, weight.shape[-1])
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype).abs() * norms.to(weight.device, dtype)


def check_norms(norms: "Tensor | None", inputs: int) -> "Tensor":
    """Return the norms; raise ValueError unless their shape is (inputs,)."""
    if norms is None:
        raise ValueError("the wanda criterion needs the norms of the layer's inputs")
    if tuple(norms.shape) != (inputs,):
        raise ValueError(f"norms have shape {tuple(norms.shape)}; weights with {inputs} inputs need ({inputs},)")
    return norms


class Criterion(NamedTuple):
    """A criterion: its function, and whether it needs the norms of a calibration."""

    score: "Callable[[Tensor, Tensor | None], Tensor]"
    needs_norms: bool


CRITERIA = {
    "magnitude": Criterion(magnitude, needs_norms=False),
    "wanda": Criterion(wanda, needs_norms=True),
}


def shift(scores: "Tensor", dim: int | tuple[int, ...] = -1) -> "Tensor":
    """s - min s over `dim`: signed scores, where negative means "remove", become non-negative and keep their order."""
    return scores - scores.amin(dim, keepdim=True)


def exponential(scores: "Tensor", dim: int | tuple[int, ...] = -1) -> "Tensor":
    """exp(s - max s) over `dim`, the paper's other map. The factor exp(-max s) prevents overflow and cancels in omega."""
    return (scores - scores.amax(dim, keepdim=True)).exp()
