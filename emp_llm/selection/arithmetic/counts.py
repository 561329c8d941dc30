"""From the moments of a group to the number of scores kept, and to their share of the mass."""

import math

import torch
from torch import Tensor

from emp_llm.selection.arithmetic.definitions import RELATIVE_TOLERANCE, check_beta
from emp_llm.selection.arithmetic.hill import Moments
from emp_llm.selection.arithmetic.masks import Threshold, key_values, masked_scores
from emp_llm.selection.arithmetic.sums import sum_rows


def keep_counts(moments: Moments, beta: float = 1.0) -> Tensor:
    """clip(floor(beta * N_eff), 1, N) of each group: int64, shape (groups,). A group of zeros keeps all N, at any beta.

    Raises:
        ValueError: beta is not a positive finite number.
    """
    check_beta(beta)
    counts = floor(beta * moments.number()).clamp(min=1.0)
    counts = torch.where(moments.total == 0, math.inf, counts)
    return counts.minimum(moments.size.double()).long()


def floor(values: Tensor) -> Tensor:
    """Floor of float64 values. A value below an integer by no more than rounding error counts as that integer."""
    return torch.floor(values * (1 + RELATIVE_TOLERANCE))


def kept_share(keys: Tensor, dtype: torch.dtype, threshold: Threshold, moments: Moments) -> Tensor:
    """The share of each row's sum |s| that a threshold keeps: float64, shape (rows,); 1 for a row of zeros.

    Args:
        keys: of the scores, from `order_keys`, shape (rows, columns).
        dtype: of the scores.
        threshold, moments: of the rows.
    """
    (above,) = sum_rows(masked_scores(keys, keys > threshold.key, dtype), lambda s: s)
    cut = key_values(threshold.key, dtype)
    mass = (above + threshold.ties[:, 0] * cut[:, 0]) / moments.mass
    return torch.where(moments.total == 0, 1.0, mass).clamp(max=1.0)
