"""The k-th largest key of a row, and the end of its ties, for CPUs; compiled by numba.

Bisection finds 16 bits of the key at a time. Its inner loop counts the 16-bit integers that are at least a candidate; a
processor compares 16 or 32 of them at once.
"""

from typing import Any

import numpy as np
from numba import njit

from emp_llm.selection.kernels.cpu_lanes import AT_ONCE, equal, trailing_zeros
from emp_llm.selection.kernels.cpu_scores import Array

COUNTED = 1 << 15  # comparisons for each 16-bit counter, few enough not to overflow it


@njit(nogil=True, cache=True)
def _count(keys: Array, least: Any) -> Any:
    """The number of 16-bit keys that are `least` or more."""
    total = 0
    for start in range(0, keys.size, COUNTED):
        part = keys[start : start + COUNTED]
        counted = np.uint16(0)
        for j in range(part.size):
            counted = np.uint16(counted + np.uint16(part[j] >= least))
        total += np.int64(counted)
    return total


@njit(nogil=True, cache=True)
def kth16(keys: Array, k: Any, guess: Any) -> Any:
    """The k-th largest of 16-bit keys. With a good guess, such as the key of the row before, it takes 3 or 4 counts."""
    low, high = 0, 1 << 16  # at least k keys are `low` or more; fewer than k are `high` or more
    candidate, step = np.int64(guess), 2
    while high - low > 1:
        if _count(keys, np.uint16(candidate)) >= k:
            low = candidate
            candidate = low + step
        else:
            high = candidate
            candidate = high - step
        if candidate >= high or candidate <= low:
            candidate = (low + high) // 2
        else:
            step *= 4
    return np.uint16(low)


@njit(nogil=True, cache=True)
def above16(keys: Array, key: Any) -> Any:
    """The number of 16-bit keys that are larger than `key`."""
    return 0 if key == np.uint16(0xFFFF) else _count(keys, np.uint16(key + np.uint16(1)))


@njit(nogil=True, cache=True)
def kth32(keys: Array, high: Array, low: Array, k: Any, guess: Any) -> Any:
    """The k-th largest of 32-bit keys, and the number of larger ones.

    Args:
        keys: uint32.
        high: uint16, the upper halves of the keys.
        low: uint16, scratch memory of the same size for lower halves.
        guess: a key whose upper half is near that of the result.
    """
    upper = kth16(high, k, np.uint32(guess) >> np.uint32(16))
    above = above16(high, upper)
    size = 0
    whole = keys.size // AT_ONCE * AT_ONCE
    for start in range(0, whole, AT_ONCE):
        matches = equal(high, start, upper)
        while matches:
            low[size] = np.uint16(keys[start + trailing_zeros(matches)] & np.uint32(0xFFFF))
            size += 1
            matches = np.uint32(matches & np.uint32(matches - np.uint32(1)))
    for j in range(whole, keys.size):
        if high[j] == upper:
            low[size] = np.uint16(keys[j] & np.uint32(0xFFFF))
            size += 1
    lower = kth16(low[:size], k - above, 1 << 15)
    above += above16(low[:size], lower)
    return np.uint32((np.uint32(upper) << np.uint32(16)) | np.uint32(lower)), above


@njit(nogil=True, cache=True)
def end_of_ties(keys: Array, key: Any, ties: Any) -> Any:
    """The index after the first `ties` keys that equal `key`."""
    if ties == 0:
        return 0
    step = 256
    for start in range(0, keys.size, step):
        part = keys[start : start + step]
        counted = np.uint16(0)
        for j in range(part.size):
            counted = np.uint16(counted + np.uint16(part[j] == key))
        if np.int64(counted) < ties:
            ties -= np.int64(counted)
            continue
        for j in range(part.size):
            ties -= np.int64(part[j] == key)
            if ties == 0:
                return start + j + 1
    return keys.size
