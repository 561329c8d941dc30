"""The guarantee of the effective number: a lower bound on the effective mass (theorem 4.2 of the paper)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.selection.arithmetic.definitions import RELATIVE_TOLERANCE


def mass_bound(n_eff: NDArray[Any] | float, size: NDArray[Any] | float) -> NDArray[np.float64]:
    """The tight lower bound on s_eff, with nu = floor(N_eff) and N = size (theorem 4.2; order 2 only).

    nu/N + (N-nu)/N * sqrt((N-nu-1) / ((nu+1)(N-1))) for 2 <= nu < N; 1/2 for nu = 1; 1 for nu = N.

    Args:
        n_eff: the effective number of each group, not floored.
        size: the number of scores in each group; broadcast with `n_eff`.

    Returns:
        float64, the broadcast shape of the arguments.
    """
    nu = np.floor(np.asarray(n_eff, dtype=np.float64) * (1 + RELATIVE_TOLERANCE))
    n = np.asarray(size, dtype=np.float64)
    inner = np.maximum(n - nu - 1, 0) / ((nu + 1) * np.maximum(n - 1, 1))
    bound = nu / n + (n - nu) / n * np.sqrt(inner)
    bound = np.where(nu <= 1, 0.5, bound)
    return np.where(nu >= n, 1.0, bound)
