"""The second round of the row kernel for CPUs, compiled by numba: the cut of a row, and its write, while it lies in cache.

`scores.sums` adds up scores; here the sums say how many stay, if the budget has not said it before. The k-th largest key of
each row is found by bisection on its bits, 16 at a time: the inner loop compares 16-bit integers with one number and counts,
which processors do 16 or 32 at once; then the row is written.
"""

from typing import Any

import numpy as np
from numba import njit

from emp_llm.selection.hill import RELATIVE_TOLERANCE
from emp_llm.selection.kernels.lanes import AT_ONCE, add_masses, equal, trailing_zeros
from emp_llm.selection.kernels.scores import Array, float_of, fold, keys32, value16
from emp_llm.selection.sums import LANES

_COUNTED = 1 << 15  # how many comparisons a 16-bit counter can take


@njit(nogil=True, cache=True)
def _count(keys: Array, least: Any) -> Any:
    """How many of some 16-bit keys are `least` or more."""
    counted = 0
    for start in range(0, keys.size, _COUNTED):
        part = keys[start : start + _COUNTED]
        some = np.uint16(0)
        for j in range(part.size):
            some = np.uint16(some + np.uint16(part[j] >= least))
        counted += np.int64(some)
    return counted


@njit(nogil=True, cache=True)
def _kth16(keys: Array, k: Any, guess: Any) -> Any:
    """The k-th largest of some 16-bit keys. From a guess (the key of the row before is a good one) it takes 3 or 4 counts."""
    low, high = 0, 1 << 16  # k keys or more are `low` or larger, fewer are `high` or larger
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
def _above16(keys: Array, key: Any) -> Any:
    return 0 if key == np.uint16(0xFFFF) else _count(keys, np.uint16(key + np.uint16(1)))


@njit(nogil=True, cache=True)
def _kth32(keys: Array, high: Array, low: Array, k: Any, guess: Any) -> Any:
    """The k-th largest of 32-bit keys, and how many are larger; `high`: their upper halves, `low`: room for as many.

    `guess`: a key whose upper half may be near.
    """
    upper = _kth16(high, k, np.uint32(guess) >> np.uint32(16))
    above = _above16(high, upper)
    some = 0
    whole = keys.size // AT_ONCE * AT_ONCE
    for start in range(0, whole, AT_ONCE):
        found = equal(high, start, upper)
        while found:
            low[some] = np.uint16(keys[start + trailing_zeros(found)] & np.uint32(0xFFFF))
            some += 1
            found = np.uint32(found & np.uint32(found - np.uint32(1)))
    for j in range(whole, keys.size):
        if high[j] == upper:
            low[some] = np.uint16(keys[j] & np.uint32(0xFFFF))
            some += 1
    lower = _kth16(low[:some], k - above, 1 << 15)
    above += _above16(low[:some], lower)
    return np.uint32((np.uint32(upper) << np.uint32(16)) | np.uint32(lower)), above


@njit(nogil=True, cache=True)
def _end_of_ties(keys: Array, key: Any, ties: Any) -> Any:
    """Where the first `ties` keys that equal `key` have been passed."""
    if ties == 0:
        return 0
    step = 256
    for start in range(0, keys.size, step):
        part = keys[start : start + step]
        some = np.uint16(0)
        for j in range(part.size):
            some = np.uint16(some + np.uint16(part[j] == key))
        if np.int64(some) < ties:
            ties -= np.int64(some)
            continue
        for j in range(part.size):
            ties -= np.int64(part[j] == key)
            if ties == 0:
                return start + j + 1
    return keys.size


@njit(nogil=True, cache=True)
def _write(row: Array, keys: Array, key: Any, end: Any) -> None:
    """Keep what is larger than `key`, and what equals it before `end`."""
    before, keys_before = row[:end], keys[:end]
    for j in range(before.size):
        if keys_before[j] < key:
            before[j] = 0
    after, keys_after = row[end:], keys[end:]
    for j in range(after.size):
        if keys_after[j] <= key:
            after[j] = 0


@njit(nogil=True, cache=True)
def _write_pattern(row: Array, keys: Array, n: Any, m: Any, places: Array, before: Array) -> None:
    """Keep the n largest of every m, among equal ones the first: those that fewer than n of their m come before.

    Neighbours at each distance are compared along the whole row at once; `places` (each weight's place among its m) tells
    which are of the same m, and `before` is room for the counts.
    """
    before[:] = 0
    for distance in range(1, m):
        left, right, last = keys[: keys.size - distance], keys[distance:], np.uint16(m - distance)
        after = before[distance:]
        for j in range(left.size):
            after[j] = np.uint16(after[j] + np.uint16((places[j] < last) & (left[j] >= right[j])))
        for j in range(left.size):
            before[j] = np.uint16(before[j] + np.uint16((places[j] < last) & (right[j] > left[j])))
    for j in range(row.size):
        if before[j] >= n:
            row[j] = 0


@njit(nogil=True, cache=True)
def _places(size: Any, m: Any) -> Array:
    places = np.empty(size if m else 0, np.uint16)
    for j in range(places.size):
        places[j] = np.uint16(j % m)
    return places


@njit(nogil=True, cache=True)
def _zeros(row: Array, magnitude: Any) -> Any:
    """How many weights are zero; `magnitude`: all bits but the sign, in the type of the weights."""
    zeros = 0
    for start in range(0, row.size, _COUNTED):
        part = row[start : start + _COUNTED]
        some = np.uint16(0)
        for j in range(part.size):
            some = np.uint16(some + np.uint16((part[j] & magnitude) == 0))
        zeros += np.int64(some)
    return zeros


@njit(nogil=True, cache=True)
def _score(key: Any, wide: Any, shift: Any, scale: Any) -> Any:
    return np.float64(float_of(np.uint32(key)) if wide else value16(np.uint16(key), shift, scale))


@njit(nogil=True, cache=True)
def _masses(keys: Array, kept: Array, nu_key: Any, wide: Any, shift: Any, scale: Any, lanes: Array, more: Array) -> None:
    """Lane sums of the scores that are kept (whose `kept` is not 0), and of those larger than `nu_key`."""
    lanes[:] = 0.0
    more[:] = 0.0
    whole = keys.size // LANES * LANES
    add_masses(keys, kept, nu_key, whole, shift, scale, lanes, more)
    for j in range(keys.size - whole):
        value = _score(keys[whole + j], wide, shift, scale)
        lanes[j] += value if kept[whole + j] != 0 else 0.0
        more[j] += value if keys[whole + j] > nu_key else 0.0


@njit(nogil=True, cache=True)
def _floor(value: Any) -> Any:
    """`effective.floor`."""
    return np.floor(value * (1 + RELATIVE_TOLERANCE))


@njit(nogil=True, cache=True)
def _number(total: Any, power: Any, columns: Any) -> Any:
    """`Moments.number` of order 2."""
    if total == 0:
        return np.float64(columns)
    number = total * total / power
    nearest = np.rint(number)
    if abs(number - nearest) <= RELATIVE_TOLERANCE * nearest:
        number = nearest
    return min(max(number, 1.0), np.float64(columns))


@njit(nogil=True, cache=True)
def _count_of(number: Any, total: Any, beta: Any, columns: Any) -> Any:
    """`effective.keep_counts`."""
    if total == 0:
        return np.int64(columns)
    return np.int64(min(max(_floor(beta * number), 1.0), np.float64(columns)))


@njit(nogil=True, cache=True)
def _share(total: Any, above: Any, ties: Any, value: Any) -> Any:
    """`effective.kept_mass` of the floor(N_eff) largest."""
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
    """Keep the largest |w| of every row; the others become zero, in place.

    Args:
        weights, shift, scale, total, power: as for `sums`; uint16.
        beta: floor(beta * N_eff) are kept; 0: as many as `counts` says.
        n, m: n of every m are kept, where m is not 0.
        counts: int64, shape (rows,): how many are kept; filled, if beta is not 0.
        zeros: int64, shape (rows,), filled: how many of the row's weights are zero now.
        kept_mass, n_eff, s_eff: float64, shape (rows,), filled.
    """
    columns = weights.shape[1]
    keys = np.empty(columns, np.uint16)
    first, second = np.empty(LANES), np.empty(LANES)
    places = _places(columns, m)
    before = np.empty_like(places)
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
        guess = nu_key = _kth16(keys, nu, guess)
        nu_above = above = _above16(keys, nu_key)
        key = nu_key
        if m:
            _write_pattern(row, keys, np.uint16(n), m, places, before)
        else:
            if k != nu:
                key = _kth16(keys, k, nu_key)
                above = _above16(keys, key)
            _write(row, keys, key, _end_of_ties(keys, key, k - above))
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
    """As `cut16`, of float32 scores: |w| * norm, or |w| of 32-bit weights, where there are no norms."""
    columns = weights.shape[1]
    keys = np.empty(columns, np.uint32)
    high, low = np.empty(columns, np.uint16), np.empty(columns, np.uint16)
    first, second = np.empty(LANES), np.empty(LANES)
    places = _places(columns, m)
    before = np.empty_like(places)
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
        nu_key, nu_above = _kth32(keys, high, low, nu, guess)
        guess = nu_key
        key, above = nu_key, nu_above
        if m:
            _write_pattern(row, keys, np.uint16(n), m, places, before)
        else:
            if k != nu:
                key, above = _kth32(keys, high, low, k, nu_key)
            _write(row, keys, key, _end_of_ties(keys, key, k - above))
        _masses(keys, row, nu_key, True, shift, scale, first, second)
        kept_mass[r] = fold(first)
        s_eff[r] = _share(total[r], fold(second), nu - nu_above, _score(nu_key, True, shift, scale))
        if m or key == 0:
            zeros[r] = _zeros(row, weights.dtype.type(0x7FFFFFFF if weights.itemsize == 4 else 0x7FFF))
        else:
            zeros[r] = columns - k
