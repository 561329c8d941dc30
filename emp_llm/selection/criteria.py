"""Criteria: how important is each weight. A new one is one function here and one line in CRITERIA.

A criterion takes a block of weight rows, shape (outputs, inputs), and the norms of its inputs, and gives non-negative scores
of the same shape in the precision that decides: the weight's own for magnitude, at least float32 for wanda.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def magnitude(weight: Tensor, norms: Tensor | None = None) -> Tensor:
    """|W_ij|, in the dtype of the weight; norms are not used."""
    return weight.abs()


def wanda(weight: Tensor, norms: Tensor | None) -> Tensor:
    """|W_ij| * ||X_j||_2 (Sun et al., "A Simple and Effective Pruning Approach for Large Language Models").

    Args:
        weight: shape (outputs, inputs).
        norms: float32, shape (inputs,), the 2-norm of each input feature over all calibration tokens.

    Returns:
        float32 (float64 for a float64 weight), shape (outputs, inputs): one rounding, of the product.
    """
    norms = check_norms(norms, weight.shape[-1])
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype).abs() * norms.to(dtype)


def check_norms(norms: Tensor | None, inputs: int) -> Tensor:
    """The norms; raises ValueError unless they are one for each input, shape (inputs,)."""
    if norms is None:
        raise ValueError("the wanda criterion needs the norms of the layer's inputs")
    if norms.shape != (inputs,):
        raise ValueError(f"norms have shape {tuple(norms.shape)}; weights of {inputs} inputs need ({inputs},)")
    return norms


class Criterion(NamedTuple):
    """A criterion and whether it needs calibration norms."""

    score: Callable[[Tensor, Tensor | None], Tensor]
    needs_norms: bool


CRITERIA = {
    "magnitude": Criterion(magnitude, needs_norms=False),
    "wanda": Criterion(wanda, needs_norms=True),
}


def shift(scores: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """s - min s over `dim`: makes signed scores, where negative means removal, non-negative and keeps their order."""
    return scores - scores.amin(dim, keepdim=True)


def exponential(scores: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """exp(s - max s) over `dim`: the other map of the paper; omega does not change with the factor exp(-max s)."""
    return torch.exp(scores - scores.amax(dim, keepdim=True))
