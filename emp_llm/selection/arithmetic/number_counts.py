"""From effective numbers to the number of scores kept, in numpy: for kernels without torch, and for one N_eff at many betas."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.selection.arithmetic.definitions import RELATIVE_TOLERANCE

GroupNumbers = tuple[NDArray[Any], NDArray[Any], int]


def beta_keeping(kept: int, groups: Sequence[GroupNumbers]) -> float:
    """The smallest beta at which the groups keep at least as many scores in total as asked for.

    The total grows with beta in steps of one, except where groups of equal N_eff step together. Then the nearer of the totals
    on both sides is chosen, the larger one if they are equally near.

    Args:
        kept: the total, at least the number of groups.
        groups: (n_eff, total, size) as for `counts_at`, at least one with a score above zero.

    Returns:
        A positive finite number.
    """

    def kept_at(beta: float) -> int:
        return sum(int(counts_at(n_eff, total, beta, size).sum()) for n_eff, total, size in groups)

    low, high = 0.0, 1.0  # kept_at(low) < kept <= kept_at(high)
    while kept_at(high) < kept:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if kept_at(middle) >= kept else (middle, high)
    if low > 0 and kept_at(high) - kept > kept - kept_at(low):
        return low
    return high


def counts_at(n_eff: NDArray[Any], total: NDArray[Any], beta: float, size: int) -> NDArray[np.int64]:
    """clip(floor(beta * N_eff), 1, N), and N for a group of zeros, as `counts.keep_counts`.

    Args:
        n_eff: of each group, float64.
        total: sum |s| of each group, or any multiple of it above 0; the shape of `n_eff`.
        beta: a positive finite number.
        size: N, the same for all groups.

    Returns:
        int64, the shape of `n_eff`.
    """
    counts = np.clip(np.floor(beta * n_eff * (1 + RELATIVE_TOLERANCE)), 1.0, float(size))
    return np.where(total == 0, size, counts).astype(np.int64)
