"""The two loops of `bits` that numpy lacks, compiled by numba. No branch depends on a word, because zeros are unpredictable."""

from typing import Any

import numpy as np

from emp_llm.common.compiled import compiler_of

compiled = compiler_of(__file__)


@compiled
def compress(words: Any, values: Any) -> Any:
    """Copy the words that are not zero to the beginning of `values`, which is longer than `words` by at least one.

    Returns:
        Their number.
    """
    kept = 0
    for j in range(words.size):
        values[kept] = words[j]
        kept += np.int64(words[j] != 0)
    return kept


@compiled
def expand(mask: Any, values: Any, words: Any) -> None:
    """The inverse of `compress`: fill `words` from a mask of uint64 that has as many bits set as there are values."""
    one, used, whole = np.uint64(1), 0, 0
    while whole < words.size // 64 and used + 64 <= values.size:
        bits = mask[whole]
        for j in range(64):
            bit = (bits >> np.uint64(j)) & one
            words[64 * whole + j] = values[used] * bit
            used += np.int64(bit)
        whole += 1
    for j in range(64 * whole, words.size):  # the loop above reads a value even for a zero; at the end none may be left to read
        words[j] = 0
        if (mask[j // 64] >> np.uint64(j % 64)) & one:
            words[j] = values[used]
            used += 1
