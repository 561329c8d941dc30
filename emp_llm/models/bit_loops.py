"""The two loops of `bits` that numpy has not, compiled by numba: no jump depends on a word, for where zeros stand is random."""

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def compress(words: Any, values: Any) -> Any:
    """Put the words that are not zero at the beginning of `values`, which has room for one more than there are words.

    Returns:
        How many they are.
    """
    kept = 0
    for j in range(words.size):
        values[kept] = words[j]
        kept += np.int64(words[j] != 0)
    return kept


@njit(nogil=True, cache=True)
def expand(mask: Any, values: Any, words: Any) -> None:
    """The inverse: `words` whole, by a mask, uint64, of which as many bits are set as there are values."""
    one, used, whole = np.uint64(1), 0, 0
    while whole < words.size // 64 and used + 64 <= values.size:
        bits = mask[whole]
        for j in range(64):
            bit = (bits >> np.uint64(j)) & one
            words[64 * whole + j] = values[used] * bit
            used += np.int64(bit)
        whole += 1
    for j in range(64 * whole, words.size):  # where there may be no value left to be read
        words[j] = 0
        if (mask[j // 64] >> np.uint64(j % 64)) & one:
            words[j] = values[used]
            used += 1
