"""Second round of the row kernel for CPUs, compiled by numba: each row is cut and written while it is in the cache.

The sums of `cpu_scores` give the number of weights to keep, unless the rule fixes it. `cpu_search` finds the cut. Then the row
is written.
"""

from typing import Any

import numpy as np
from numba import njit

from emp_llm.selection.arithmetic.definitions import LANES, RELATIVE_TOLERANCE
from emp_llm.selection.kernels.cpu_lanes import add_masses
from emp_llm.selection.kernels.cpu_scores import Array, float_of, fold, keys32, value16
from emp_llm.selection.kernels.cpu_search import COUNTED, above16, end_of_ties, kth16, kth32


@njit(nogil=True, cache=True)
def _write(row: Array, keys: Array, key: Any, end: Any) -> None:
    """Keep the weights whose keys are larger than `key`, and those before `end` whose keys equal it."""
    before, keys_before = row[:end], keys[:end]
    for j in range(before.size):
        if keys_before[j] < key:
            before[j] = 0
    after, keys_after = row[end:], keys[end:]
    for j in range(after.size):
        if keys_after[j] <= key:
            after[j] = 0


@njit(nogil=True, cache=True)
def _write_pattern(row: Array, keys: Array, n: Any, m: Any, places: Array, ahead: Array) -> None:
    """Keep the n largest of every m weights, the first among equal ones: those with fewer than n weights of their m ahead.

    For each distance, all pairs of keys at this distance are compared along the row.

    Args:
        places: position of each weight within its m, so that only weights of the same m are compared.
        ahead: scratch memory: how many weights of its m are ahead of each weight.
    """
    ahead[:] = 0
    for distance in range(1, m):
        left, right, last = keys[: keys.size - distance], keys[distance:], np.uint16(m - distance)
        ahead_of_right = ahead[distance:]
        for j in range(left.size):
            ahead_of_right[j] = np.uint16(ahead_of_right[j] + np.uint16((places[j] < last) & (left[j] >= right[j])))
        for j in range(left.size):
            ahead[j] = np.uint16(ahead[j] + np.uint16((places[j] < last) & (right[j] > left[j])))
    for j in range(row.size):
        if ahead[j] >= n:
            row[j] = 0


@njit(nogil=True, cache=True)
def _places(size: Any, m: Any) -> Array:
    places = np.empty(size if m else 0, np.uint16)
    for j in range(places.size):
        places[j] = np.uint16(j % m)
    return places


@njit(nogil=True, cache=True)
def _zeros(row: Array, magnitude: Any) -> Any:
    """The number of weights that are zero. `magnitude`: a mask of all bits but the sign, in the type of the weights."""
    zeros = 0
    for start in range(0, row.size, COUNTED):
        part = row[start : start + COUNTED]
        counted = np.uint16(0)
        for j in range(part.size):
            counted = np.uint16(counted + np.uint16((part[j] & magnitude) == 0))
        zeros += np.int64(counted)
    return zeros


@njit(nogil=True, cache=True)
def _score(key: Any, wide: Any, shift: Any, scale: Any) -> Any:
    return np.float64(float_of(np.uint32(key)) if wide else value16(np.uint16(key), shift, scale))


@njit(nogil=True, cache=True)
def _masses(keys: Array, kept: Array, nu_key: Any, wide: Any, shift: Any, scale: Any, lanes: Array, above: Array) -> None:
    """Lane sums: of the kept scores (`kept` is not 0 for them) into `lanes`, of the scores above `nu_key` into `above`."""
    lanes[:] = 0.0
    above[:] = 0.0
    whole = keys.size // LANES * LANES
    add_masses(keys, kept, nu_key, whole, shift, scale, lanes, above)
    for j in range(keys.size - whole):
        value = _score(keys[whole + j], wide, shift, scale)
        lanes[j] += value if kept[whole + j] != 0 else 0.0
        above[j] += value if keys[whole + j] > nu_key else 0.0


@njit(nogil=True, cache=True)
def _floor(value: Any) -> Any:
    """As `counts.floor`."""
    return np.floor(value * (1 + RELATIVE_TOLERANCE))


@njit(nogil=True, cache=True)
def _number(total: Any, power: Any, columns: Any) -> Any:
    """As `Moments.number` of order 2."""
    if total == 0:
        return np.float64(columns)
    number = total * total / power
    nearest = np.rint(number)
    if abs(number - nearest) <= RELATIVE_TOLERANCE * nearest:
        number = nearest
    return min(max(number, 1.0), np.float64(columns))


@njit(nogil=True, cache=True)
def _count_of(number: Any, total: Any, beta: Any, columns: Any) -> Any:
    """As `counts.keep_counts`."""
    if total == 0:
        return np.int64(columns)
    return np.int64(min(max(_floor(beta * number), 1.0), np.float64(columns)))


@njit(nogil=True, cache=True)
def _share(total: Any, above: Any, ties: Any, value: Any) -> Any:
    """As `counts.kept_share` of the floor(N_eff) largest scores."""
    return 1.0 if total == 0 else min(1.0, (above + np.float64(ties) * value) / total)


@njit(nogil=True, cache=True)
def cut16(
    weights: Array,
    shift: Any,
    scale: Any,
    beta: Any,
    n: Any,
    m: Any,
    total: Array,
    power: Array,
    counts: Array,
    zeros: Array,
    kept_mass: Array,
    n_eff: Array,
    s_eff: Array,
) -> None:
    """Keep the largest |w| of each row of 16-bit weights; set the others to zero, in place.

    Args:
        weights, shift, scale, total, power: as for `sums`; uint16.
        beta: keep floor(beta * N_eff) of a row; 0: keep as many as `counts` says.
        n, m: keep n of every m; m is 0 for the other rules.
        counts: int64, shape (rows,): how many weights are kept; an output if beta is not 0.
        zeros: int64, shape (rows,), an output: how many weights of the row are now zero.
        kept_mass, n_eff, s_eff: float64, shape (rows,), outputs.
    """
    columns = weights.shape[1]
    keys = np.empty(columns, np.uint16)
    first, second = np.empty(LANES), np.empty(LANES)
    places = _places(columns, m)
    ahead = np.empty_like(places)
    guess = np.uint16(1 << 14)
    for r in range(weights.shape[0]):
        row = weights[r]
        for j in range(columns):
            keys[j] = row[j] & np.uint16(0x7FFF)
        n_eff[r] = _number(total[r], power[r], columns)
        nu = _count_of(n_eff[r], total[r], 1.0, columns)
        if beta != 0:
            counts[r] = _count_of(n_eff[r], total[r], beta, columns)
        k = counts[r]
        guess = nu_key = kth16(keys, nu, guess)
        nu_above = above = above16(keys, nu_key)
        key = nu_key
        if m:
            _write_pattern(row, keys, np.uint16(n), m, places, ahead)
        else:
            if k != nu:
                key = kth16(keys, k, nu_key)
                above = above16(keys, key)
            _write(row, keys, key, end_of_ties(keys, key, k - above))
        _masses(keys, row, nu_key, False, shift, scale, first, second)
        kept_mass[r] = fold(first)
        s_eff[r] = _share(total[r], fold(second), nu - nu_above, _score(nu_key, False, shift, scale))
        zeros[r] = _zeros(row, np.uint16(0x7FFF)) if m or key == 0 else columns - k


@njit(nogil=True, cache=True)
def cut32(
    weights: Array,
    norms: Array,
    shift: Any,
    scale: Any,
    beta: Any,
    n: Any,
    m: Any,
    total: Array,
    power: Array,
    counts: Array,
    zeros: Array,
    kept_mass: Array,
    n_eff: Array,
    s_eff: Array,
) -> None:
    """As `cut16`, for float32 scores: |w| * norm, or, without norms, |w| of 32-bit weights."""
    columns = weights.shape[1]
    keys = np.empty(columns, np.uint32)
    high, low = np.empty(columns, np.uint16), np.empty(columns, np.uint16)
    first, second = np.empty(LANES), np.empty(LANES)
    places = _places(columns, m)
    ahead = np.empty_like(places)
    guess = np.uint32(1 << 30)
    for r in range(weights.shape[0]):
        row = weights[r]
        keys32(row, norms, shift, scale, keys)
        for j in range(columns):
            high[j] = np.uint16(keys[j] >> np.uint32(16))
        n_eff[r] = _number(total[r], power[r], columns)
        nu = _count_of(n_eff[r], total[r], 1.0, columns)
        if beta != 0:
            counts[r] = _count_of(n_eff[r], total[r], beta, columns)
        k = counts[r]
        nu_key, nu_above = kth32(keys, high, low, nu, guess)
        guess = nu_key
        key, above = nu_key, nu_above
        if m:
            _write_pattern(row, keys, np.uint16(n), m, places, ahead)
        else:
            if k != nu:
                key, above = kth32(keys, high, low, k, nu_key)
            _write(row, keys, key, end_of_ties(keys, key, k - above))
        _masses(keys, row, nu_key, True, shift, scale, first, second)
        kept_mass[r] = fold(first)
        s_eff[r] = _share(total[r], fold(second), nu - nu_above, _score(nu_key, True, shift, scale))
        if m or key == 0:
            zeros[r] = _zeros(row, weights.dtype.type(0x7FFFFFFF if weights.itemsize == 4 else 0x7FFF))
        else:
            zeros[r] = columns - k
