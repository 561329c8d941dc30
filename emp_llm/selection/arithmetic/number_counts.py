"""From effective numbers to the number of scores kept, in numpy: for kernels without torch, and for one N_eff at many betas."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.selection.arithmetic.definitions import RELATIVE_TOLERANCE


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
