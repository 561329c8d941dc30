"""The row kernel for CPUs, compiled by numba: it prunes rows with the bits of the reference, and needs no torch.

Threads share the rows in two rounds. `sums` adds up the scores. `cut16` or `cut32` then sets the number of weights that a row
keeps, finds the cut, and writes the row while it is in the cache.

Scores and their squares are summed in the order of `reference.sum_rows`: 64 lanes, then halves. The compiler must not reorder
them, so there is no fastmath. (Squares of 32-bit floats are exact in float64, so contraction cannot change a bit.)

All compiled code is in this file; its constants are those of `rule`.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from emp_llm.common.compiled import compiler_of
from emp_llm.common.machine import available_cores
from emp_llm.selection import rule as constants
from emp_llm.selection.rule import LANES, RELATIVE_TOLERANCE, KeepRule, NonFiniteError, RowFigures

Array = np.ndarray[Any, Any]
compiled = compiler_of(__file__, str(constants.__file__))

# Vector loops, in LLVM's IR: numba's own loops would keep the lanes in memory. The 64 lanes of a row are one vector of float64,
# which LLVM splits into registers. Every operation is one IEEE operation in the order of the definition.

AT_ONCE = 32  # 16-bit keys that `equal` compares at a time
_I32, _FLOAT, _DOUBLE = ir.IntType(32), ir.FloatType(), ir.DoubleType()


def _vector(element: Any, size: int = LANES) -> Any:
    return ir.VectorType(element, size)


def _splat(builder: Any, value: Any, size: int = LANES) -> Any:
    kind = _vector(value.type, size)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(_vector(_I32, size), None))


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value=value).data


def _load(builder: Any, pointer: Any, index: Any, element: Any, size: int = LANES) -> Any:
    place = builder.bitcast(builder.gep(pointer, [index]), _vector(element, size).as_pointer())
    return builder.load(place, align=element.width // 8)


def _scores(builder: Any, keys: Any, shift: Any, scale: Any) -> Any:
    """The scores, in float64, of a vector of keys. 16-bit keys are shifted and scaled as in `value16`."""
    if keys.type.element.width == 32:
        return builder.fpext(builder.bitcast(keys, _vector(_FLOAT)), _vector(_DOUBLE))
    bits = builder.shl(builder.zext(keys, _vector(_I32)), _splat(builder, shift))
    values = builder.fmul(builder.bitcast(bits, _vector(_FLOAT)), _splat(builder, scale))
    return builder.fpext(values, _vector(_DOUBLE))


def _pass(builder: Any, whole: Any, lanes: list[Any], step: Callable[[Any], list[Any]]) -> None:
    """Add the vectors `step(start)` to the `lanes` in memory, for start = 0, 64, ... below `whole`."""
    zero = ir.Constant(whole.type, 0)
    places = [builder.bitcast(pointer, _vector(_DOUBLE).as_pointer()) for pointer in lanes]
    before, loop = builder.block, builder.append_basic_block("loop")
    body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
    initial = [builder.load(place, align=8) for place in places]
    builder.branch(loop)
    builder.position_at_end(loop)
    start = builder.phi(whole.type)
    totals = [builder.phi(_vector(_DOUBLE)) for _ in lanes]
    builder.cbranch(builder.icmp_signed("<", start, whole), body, after)
    builder.position_at_end(body)
    sums = [builder.fadd(total, term) for total, term in zip(totals, step(start), strict=True)]
    next_start = builder.add(start, ir.Constant(whole.type, LANES))
    builder.branch(loop)
    start.add_incoming(zero, before)
    start.add_incoming(next_start, builder.block)
    for total, first, following in zip(totals, initial, sums, strict=True):
        total.add_incoming(first, before)
        total.add_incoming(following, builder.block)
    builder.position_at_end(after)
    for total, place in zip(totals, places, strict=True):
        builder.store(total, place, align=8)


@intrinsic
def add_scores(typing: Any, keys: Any, whole: Any, shift: Any, scale: Any, first: Any, second: Any) -> Any:
    """Add the scores of keys[j], keys[j + 64], ... to first[j], and their squares to second[j].

    Only the first `whole` keys are added; `whole` is a multiple of 64. The sign bits of 16-bit keys are ignored. first, second:
    float64, shape (64,).
    """
    signature = types.void(keys, types.int64, types.uint32, types.float32, first, second)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        data = _data(context, builder, kinds[0], arguments[0])
        lanes = [_data(context, builder, kinds[i], arguments[i]) for i in (4, 5)]
        element = ir.IntType(kinds[0].dtype.bitwidth)

        def step(start: Any) -> list[Any]:
            vector = _load(builder, data, start, element)
            if element.width == 16:
                vector = builder.and_(vector, _splat(builder, ir.Constant(element, 0x7FFF)))
            scores = _scores(builder, vector, arguments[2], arguments[3])
            return [scores, builder.fmul(scores, scores)]

        _pass(builder, arguments[1], lanes, step)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_masses(
    typing: Any, keys: Any, kept: Any, least: Any, whole: Any, shift: Any, scale: Any, first: Any, second: Any
) -> Any:
    """As `add_scores`, but add the scores whose `kept` is not 0 to first, and those whose keys are above `least` to second."""
    signature = types.void(keys, kept, keys.dtype, types.int64, types.uint32, types.float32, first, second)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        data, kept_data = (_data(context, builder, kinds[i], arguments[i]) for i in (0, 1))
        lanes = [_data(context, builder, kinds[i], arguments[i]) for i in (6, 7)]
        element, other = (ir.IntType(kinds[i].dtype.bitwidth) for i in (0, 1))
        zeros = ir.Constant(_vector(_DOUBLE), None)

        def step(start: Any) -> list[Any]:
            vector = _load(builder, data, start, element)
            scores = _scores(builder, vector, arguments[4], arguments[5])
            is_kept = builder.icmp_unsigned("!=", _load(builder, kept_data, start, other), ir.Constant(_vector(other), None))
            is_above = builder.icmp_unsigned(">", vector, _splat(builder, arguments[2]))
            return [builder.select(is_kept, scores, zeros), builder.select(is_above, scores, zeros)]

        _pass(builder, arguments[3], lanes, step)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def equal(typing: Any, keys: Any, start: Any, value: Any) -> Any:
    """A uint32 whose bit j is 1 if keys[start + j] == value. The keys have 16 bits, and all 32 must lie within the array."""
    signature = types.uint32(keys, types.int64, types.uint16)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature.args[0], arguments[0])
        vector = _load(builder, data, arguments[1], ir.IntType(16), AT_ONCE)
        return builder.bitcast(builder.icmp_unsigned("==", vector, _splat(builder, arguments[2], AT_ONCE)), _I32)

    return signature, codegen


@intrinsic
def trailing_zeros(typing: Any, bits: Any) -> Any:
    """The number of 0 bits below the lowest 1 of a uint32 other than 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1)), ir.IntType(64))

    return types.int64(types.uint32), codegen


# Scores and their sums.


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The float32 with these bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """The bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@compiled
def value16(bits: Any, shift: Any, scale: Any) -> Any:
    """|w| in float32, exactly, from the bits of a 16-bit weight; shift 16, scale 1 for bfloat16; 13, 2^112 for float16."""
    return float_of(np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << shift)) * scale


@compiled
def fold(lanes: Array) -> Any:
    """The sum of 64 lanes, folded in halves, in place."""
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] = lanes[j] + lanes[j + half]
        half //= 2
    return lanes[0]


@compiled
def keys32(row: Array, norms: Array, shift: Any, scale: Any, keys: Array) -> None:
    """The keys of |w| * norm, or, without norms, of |w| of 32-bit weights: the bits of the float32 scores."""
    if row.itemsize == 4:
        if norms.size:
            for j in range(row.size):
                keys[j] = bits_of(float_of(np.uint32(row[j] & np.uint32(0x7FFFFFFF))) * norms[j])
        else:
            for j in range(row.size):
                keys[j] = np.uint32(row[j] & np.uint32(0x7FFFFFFF))
    else:
        for j in range(row.size):
            keys[j] = bits_of(value16(row[j], shift, scale) * norms[j])


@compiled
def sums(weights: Array, norms: Array, shift: Any, scale: Any, total: Array, power: Array) -> None:
    """sum s and sum s^2 of each row, in the order of `reference.sum_rows`. `total` is not finite where a score is not.

    Args:
        weights: the bits, uint16 or uint32, shape (rows, columns).
        norms: float32, shape (columns,); empty for magnitude.
        shift, scale: as for `value16`.
        total, power: float64, shape (rows,), outputs.
    """
    rows, columns = weights.shape
    whole = columns // LANES * LANES
    first, second = np.empty(LANES), np.empty(LANES)
    narrow = weights.itemsize == 2 and norms.size == 0
    keys = np.empty(0 if narrow else columns, np.uint32)
    for r in range(rows):
        row = weights[r]
        first[:] = 0.0
        second[:] = 0.0
        if narrow:
            add_scores(row, whole, shift, scale, first, second)
            for j in range(columns - whole):
                value = np.float64(value16(row[whole + j], shift, scale))
                first[j] += value
                second[j] += value * value
        else:
            keys32(row, norms, shift, scale, keys)
            add_scores(keys, whole, shift, scale, first, second)
            for j in range(columns - whole):
                value = np.float64(float_of(keys[whole + j]))
                first[j] += value
                second[j] += value * value
        total[r] = np.nan if shift == 13 and _infinite16(row) else fold(first)
        power[r] = fold(second)


@compiled
def _infinite16(row: Array) -> Any:
    """Whether float16 weights hold infinity or NaN. `value16` turns these into finite numbers, unlike those of bfloat16."""
    largest = np.uint16(0)
    for j in range(row.size):
        largest = max(largest, np.uint16(row[j] & np.uint16(0x7FFF)))
    return largest >= np.uint16(0x7C00)


# The k-th largest key of a row, and the end of its ties. Bisection finds 16 bits of the key at a time: its inner loop counts
# the 16-bit integers that are at least a candidate, 16 or 32 of them at once.

COUNTED = 1 << 15  # comparisons for each 16-bit counter, few enough not to overflow it


@compiled
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


@compiled
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


@compiled
def above16(keys: Array, key: Any) -> Any:
    """The number of 16-bit keys that are larger than `key`."""
    return 0 if key == np.uint16(0xFFFF) else _count(keys, np.uint16(key + np.uint16(1)))


@compiled
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


@compiled
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


# The cut of each row.


@compiled
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


@compiled
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


@compiled
def _places(size: Any, m: Any) -> Array:
    places = np.empty(size if m else 0, np.uint16)
    for j in range(places.size):
        places[j] = np.uint16(j % m)
    return places


@compiled
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


@compiled
def _score(key: Any, wide: Any, shift: Any, scale: Any) -> Any:
    return np.float64(float_of(np.uint32(key)) if wide else value16(np.uint16(key), shift, scale))


@compiled
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


@compiled
def _floor(value: Any) -> Any:
    """Floor; a value below an integer by no more than rounding error counts as that integer."""
    return np.floor(value * (1 + RELATIVE_TOLERANCE))


@compiled
def _number(total: Any, power: Any, columns: Any) -> Any:
    """N_eff = (sum s)^2 / sum s^2, the number of order 2 of `reference.Moments`."""
    if total == 0:
        return np.float64(columns)
    number = total * total / power
    nearest = np.rint(number)
    if abs(number - nearest) <= RELATIVE_TOLERANCE * nearest:
        number = nearest
    return min(max(number, 1.0), np.float64(columns))


@compiled
def _count_of(number: Any, total: Any, beta: Any, columns: Any) -> Any:
    """clip(floor(beta * N_eff), 1, N); N for a row of zeros. The rule of `rule.counts_at`."""
    if total == 0:
        return np.int64(columns)
    return np.int64(min(max(_floor(beta * number), 1.0), np.float64(columns)))


@compiled
def _share(total: Any, above: Any, ties: Any, value: Any) -> Any:
    """s_eff, the share of the floor(N_eff) largest scores."""
    return 1.0 if total == 0 else min(1.0, (above + np.float64(ties) * value) / total)


@compiled
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


@compiled
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


# Threads.

# A shift and a factor for each dtype. The bits of |w|, shifted left, are the bits of a float32; this number times the factor is
# |w| (see `value16`).
_SHIFTS = {"BF16": (16, 1.0), "F16": (13, 2.0**112), "F32": (0, 1.0)}
_PIECE = 1 << 18  # weights in each piece of work


def prune_words(words: Array, dtype: str, norms: Array | None, rule: KeepRule) -> RowFigures:
    """Set to zero, in place, the weights of each row that a rule does not keep.

    Args:
        words: the bits of the weights, uint16 or uint32, shape (rows, columns), contiguous, not empty.
        dtype: of the weights: "BF16", "F16" or "F32".
        norms: float32, shape (columns,), for the criterion wanda; None: magnitude.
        rule: how many weights of each row to keep.

    Returns:
        Figures of the rows, as arrays.

    Raises:
        NonFiniteError: scores hold NaN or infinity; nothing is pruned.
    """
    rows, columns = words.shape
    # abs: the sign of a norm of -0.0 would become the highest bit of a key.
    factors = np.empty(0, np.float32) if norms is None else np.abs(norms)
    shift, scale = np.uint32(_SHIFTS[dtype][0]), np.float32(_SHIFTS[dtype][1])
    total, power, kept_mass, n_eff, s_eff = np.empty((5, rows))
    counts, zeros = np.empty((2, rows), np.int64)

    _in_parallel(rows, columns, lambda part: sums(words[part], factors, shift, scale, total[part], power[part]))
    if not np.isfinite(total).all():
        raise NonFiniteError("scores hold NaN or infinity")
    if rule.counts is not None:
        counts[:] = rule.counts
    outputs = (total, power, counts, zeros, kept_mass, n_eff, s_eff)
    beta, (n, m) = rule.beta or 0.0, rule.pattern or (0, 0)
    if rule.pattern is not None:
        counts[:] = columns // m * n

    def cut(part: slice) -> None:
        own = [output[part] for output in outputs]
        if norms is None and words.itemsize == 2:
            cut16(words[part], shift, scale, beta, n, m, *own)
        else:
            cut32(words[part], factors, shift, scale, beta, n, m, *own)

    _in_parallel(rows, columns, cut)
    return RowFigures(counts, zeros, kept_mass, total, n_eff, s_eff)


def _in_parallel(rows: int, columns: int, work: Callable[[slice], Any]) -> None:
    """Share rows among threads. A free thread takes the next piece; this thread starts without waiting for the others."""
    step = max(1, _PIECE // columns)
    parts = iter([slice(first, min(first + step, rows)) for first in range(0, rows, step)])

    def work_on_parts() -> None:
        for part in parts:
            work(part)

    helpers = min(_threads(), -(-rows // step)) - 1
    others = [_pool(helpers).submit(work_on_parts) for _ in range(helpers)]
    work_on_parts()
    for other in others:
        if not other.cancel():
            other.result()


def _threads() -> int:
    """The number of threads that torch uses, or would use if it were loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdigit() and int(requested):
        return int(requested)
    return available_cores()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-rows")
