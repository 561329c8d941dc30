"""The row kernel for CPUs, compiled by numba: it prunes rows with the bits of the reference, and
needs no torch.

Threads share the rows in two rounds. `sums` adds up the scores. `cut` then finds the cut of each
row for the number of weights that it keeps, and writes the row while it is in the cache.

Scores and their squares are summed in the order of `reference.sum_rows`: 64 lanes, then halves. The
compiler must not reorder them, so there is no fastmath. (Squares of 32-bit floats are exact in
float64, so contraction cannot change a bit.)

numba keeps the machine code on disk until this file changes, so all compiled code is in this file.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from emp_llm.common.machine import available_cores
from emp_llm.selection.rule import LANES, KeepRule, RowFigures, mass_share, row_counts

Array = np.ndarray[Any, Any]
compiled = njit(nogil=True, cache=True)

# Vector loops, in LLVM's IR: numba's own loops would keep the lanes in memory. The 64 lanes of a
# row are one vector of float64, which LLVM splits into registers. Every operation is one IEEE
# operation in the order of the definition.

AT_ONCE = 32  # 16-bit keys that `equal` compares at a time
_I32 = ir.IntType(32)
_FLOAT = ir.FloatType()
_DOUBLE = ir.DoubleType()


def _vector(element: Any, size: int = LANES) -> Any:
    return ir.VectorType(element, size)


def _splat(builder: Any, value: Any, size: int = LANES) -> Any:
    type_ = _vector(value.type, size)
    single = builder.insert_element(ir.Constant(type_, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        single, ir.Constant(type_, ir.Undefined), ir.Constant(_vector(_I32, size), None)
    )


def _data(context: Any, builder: Any, type_: Any, value: Any) -> Any:
    return context.make_array(type_)(context, builder, value=value).data


def _load_vector(builder: Any, pointer: Any, index: Any, element: Any, size: int = LANES) -> Any:
    place = builder.bitcast(builder.gep(pointer, [index]), _vector(element, size).as_pointer())
    return builder.load(place, align=element.width // 8)


def _scores_of_keys(builder: Any, keys: Any, shift: Any, scale: Any) -> Any:
    """The scores, in float64, of a vector of keys. 16-bit keys are shifted and scaled as in
    `_value`.
    """
    if keys.type.element.width == 32:
        return builder.fpext(builder.bitcast(keys, _vector(_FLOAT)), _vector(_DOUBLE))
    bits = builder.shl(builder.zext(keys, _vector(_I32)), _splat(builder, shift))
    values = builder.fmul(builder.bitcast(bits, _vector(_FLOAT)), _splat(builder, scale))
    return builder.fpext(values, _vector(_DOUBLE))


def _pass(builder: Any, whole: Any, lanes: list[Any], step: Callable[[Any], list[Any]]) -> None:
    """Add the vectors `step(start)` to the `lanes` in memory, for start = 0, 64, ... below
    `whole`.
    """
    zero = ir.Constant(whole.type, 0)
    places = [builder.bitcast(pointer, _vector(_DOUBLE).as_pointer()) for pointer in lanes]
    before = builder.block
    loop = builder.append_basic_block("loop")
    body = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
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
def add_scores(
    typing: Any, keys: Any, whole: Any, shift: Any, scale: Any, first: Any, second: Any
) -> Any:
    """Add the scores of keys[j], keys[j + 64], ... to first[j], and their squares to second[j].

    Only the first `whole` keys are added; `whole` is a multiple of 64. The sign bits of 16-bit keys
    are ignored. first, second: float64, shape (64,).
    """
    signature = types.void(keys, types.int64, types.uint32, types.float32, first, second)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        types_ = signature.args
        data = _data(context, builder, types_[0], arguments[0])
        lanes = [_data(context, builder, types_[i], arguments[i]) for i in (4, 5)]
        element = ir.IntType(types_[0].dtype.bitwidth)

        def step(start: Any) -> list[Any]:
            vector = _load_vector(builder, data, start, element)
            if element.width == 16:  # bits of weights, with their signs; 32-bit keys have none
                vector = builder.and_(vector, _splat(builder, ir.Constant(element, 0x7FFF)))
            scores = _scores_of_keys(builder, vector, arguments[2], arguments[3])
            return [scores, builder.fmul(scores, scores)]

        _pass(builder, arguments[1], lanes, step)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_masses(
    typing: Any,
    keys: Any,
    kept: Any,
    least: Any,
    whole: Any,
    shift: Any,
    scale: Any,
    first: Any,
    second: Any,
) -> Any:
    """As `add_scores`, but add the scores whose `kept` is not 0 to first, and those whose keys
    are above `least` to second.
    """
    signature = types.void(
        keys, kept, keys.dtype, types.int64, types.uint32, types.float32, first, second
    )

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        types_ = signature.args
        data, kept_data = (_data(context, builder, types_[i], arguments[i]) for i in (0, 1))
        lanes = [_data(context, builder, types_[i], arguments[i]) for i in (6, 7)]
        element, other = (ir.IntType(types_[i].dtype.bitwidth) for i in (0, 1))
        zeros = ir.Constant(_vector(_DOUBLE), None)

        def step(start: Any) -> list[Any]:
            vector = _load_vector(builder, data, start, element)
            scores = _scores_of_keys(builder, vector, arguments[4], arguments[5])
            is_kept = builder.icmp_unsigned(
                "!=",
                _load_vector(builder, kept_data, start, other),
                ir.Constant(_vector(other), None),
            )
            is_above = builder.icmp_unsigned(">", vector, _splat(builder, arguments[2]))
            return [builder.select(is_kept, scores, zeros), builder.select(is_above, scores, zeros)]

        _pass(builder, arguments[3], lanes, step)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def equal(typing: Any, keys: Any, start: Any, value: Any) -> Any:
    """A uint32 whose bit j is 1 if keys[start + j] == value. The keys have 16 bits, and all 32
    must lie within the array.
    """
    signature = types.uint32(keys, types.int64, types.uint16)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature.args[0], arguments[0])
        vector = _load_vector(builder, data, arguments[1], ir.IntType(16), AT_ONCE)
        return builder.bitcast(
            builder.icmp_unsigned("==", vector, _splat(builder, arguments[2], AT_ONCE)), _I32
        )

    return signature, codegen


@intrinsic
def trailing_zeros(typing: Any, bits: Any) -> Any:
    """The number of 0 bits below the lowest 1 of a uint32 other than 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(
            builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1)), ir.IntType(64)
        )

    return types.int64(types.uint32), codegen


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


# Keys, scores and their sums. A key is an integer in the order of the scores: the bits of |w|, or,
# with norms, of the float32 number |w| * norm. The form of weights or keys, (magnitude, shift,
# scale), says which numbers their bits are.

F32 = (0x7FFFFFFF, 0, 1.0)
FORMS = {"BF16": (0x7FFF, 16, 1.0), "F16": (0x7FFF, 13, 2.0**112), "F32": F32}


@compiled
def _value(bits: Any, form: Any) -> Any:
    """|w| in float32, exactly, from the bits of w."""
    magnitude, shift, scale = form
    return float_of(
        np.uint32((np.uint32(bits) & np.uint32(magnitude)) << np.uint32(shift))
    ) * np.float32(scale)


@compiled
def _fill(keys: Array, row: Array, norms: Array, form: Any) -> None:
    """The keys of a row. Without norms, which are then empty, they have the type of the weights;
    with norms they are uint32.
    """
    if norms.size:
        for j in range(row.size):
            keys[j] = bits_of(_value(row[j], form) * norms[j])
    else:
        for j in range(row.size):
            keys[j] = row[j] & keys.dtype.type(form[0])


@compiled
def _fold(lanes: Array) -> Any:
    """The sum of 64 lanes, folded in halves, in place."""
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half //= 2
    return lanes[0]


@compiled
def _masses(keys: Array, form: Any, kept: Array, least: Any, first: Array, second: Array) -> Any:
    """The sums of the scores whose `kept` is not 0, and of those whose keys are above `least`;
    lanes as for `sums`.
    """
    first[:] = 0.0
    second[:] = 0.0
    whole = keys.size // LANES * LANES
    add_masses(keys, kept, least, whole, form[1], form[2], first, second)
    for j in range(keys.size - whole):
        value = np.float64(_value(keys[whole + j], form))
        first[j] += value if kept[whole + j] != 0 else 0.0
        second[j] += value if keys[whole + j] > least else 0.0
    return _fold(first), _fold(second)


@compiled
def sums(weights: Array, norms: Array, form: Any, like: Array, total: Array, power: Array) -> None:
    """sum s and sum s^2 of each row, in the order of `reference.sum_rows`. `total` is not finite
    where a score is not.

    Args:
        weights: the bits, uint16 or uint32, shape (rows, columns).
        norms: float32, shape (columns,); empty for magnitude.
        form: of the weights.
        like: shape (0,), of the type of the keys.
        total, power: float64, shape (rows,), outputs.
    """
    keys = np.empty(weights.shape[1], like.dtype)
    first = np.empty(LANES)
    second = np.empty(LANES)
    whole = keys.size // LANES * LANES
    key_form = F32 if norms.size else form
    for r in range(weights.shape[0]):
        if norms.size or keys.itemsize == 4:
            _fill(keys, weights[r], norms, form)
        else:
            keys = weights[r].view(like.dtype)  # signs are ignored
        first[:] = 0.0
        second[:] = 0.0
        add_scores(keys, whole, key_form[1], key_form[2], first, second)
        for j in range(keys.size - whole):
            value = np.float64(_value(keys[whole + j], key_form))
            first[j] += value
            second[j] += value * value
        total[r] = np.nan if form[1] == 13 and _infinite16(weights[r]) else _fold(first)
        power[r] = _fold(second)


@compiled
def _infinite16(row: Array) -> Any:
    """Whether float16 weights hold infinity or NaN. `_value` turns these into finite numbers,
    unlike those of bfloat16.
    """
    largest = np.uint16(0)
    for j in range(row.size):
        largest = max(largest, np.uint16(row[j] & np.uint16(0x7FFF)))
    return largest >= np.uint16(0x7C00)


# The k-th largest key of a row, and the end of its ties. Bisection finds 16 bits of the key at a
# time: its inner loop counts the 16-bit integers that are at least a candidate, 16 or 32 of them at
# once.

COUNTED = 1 << 15  # comparisons for each 16-bit counter, few enough not to overflow it


@compiled
def _count(keys: Array, least: Any) -> Any:
    """The number of 16-bit keys that are `least` or more."""
    total = 0
    for start in range(0, keys.size, COUNTED):
        piece = keys[start : start + COUNTED]
        counted = np.uint16(0)
        for j in range(piece.size):
            counted = np.uint16(counted + np.uint16(piece[j] >= least))
        total += np.int64(counted)
    return total


@compiled
def _kth16(keys: Array, k: Any, guess: Any) -> Any:
    """The k-th largest of 16-bit keys, and the number of larger ones. With a good guess it takes
    3 or 4 counts.
    """
    # at least k keys are `low` or more; `above` of them, fewer than k, are `high` or more
    low = 0
    high = 1 << 16
    above = 0
    candidate = np.int64(guess)
    step = 2
    while high - low > 1:
        count = _count(keys, np.uint16(candidate))
        if count >= k:
            low = candidate
            candidate = low + step
        else:
            high = candidate
            above = count
            candidate = high - step
        if candidate >= high or candidate <= low:
            candidate = (low + high) // 2
        else:
            step *= 4
    return np.uint16(low), above


@compiled
def _kth(keys: Array, high: Array, low: Array, k: Any, guess: Any) -> Any:
    """The k-th largest key, and the number of larger ones.

    Args:
        keys: uint16 or uint32.
        high: uint16, the upper halves of 32-bit keys, or the 16-bit keys.
        low: uint16, scratch memory of the same size.
        guess: the upper half of a key near the result.
    """
    upper, above = _kth16(high, k, guess)
    if keys.itemsize == 2:
        return np.uint32(upper), above
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
    lower, ahead = _kth16(low[:size], k - above, 1 << 15)
    return np.uint32((np.uint32(upper) << np.uint32(16)) | np.uint32(lower)), above + ahead


@compiled
def _end_of_ties(keys: Array, key: Any, ties: Any) -> Any:
    """The index after the first `ties` keys that equal `key`."""
    if ties == 0:
        return 0
    step = 256
    for start in range(0, keys.size, step):
        piece = keys[start : start + step]
        counted = np.uint16(0)
        for j in range(piece.size):
            counted = np.uint16(counted + np.uint16(piece[j] == key))
        if np.int64(counted) < ties:
            ties -= np.int64(counted)
            continue
        for j in range(piece.size):
            ties -= np.int64(piece[j] == key)
            if ties == 0:
                return start + j + 1
    return keys.size


# The cut of each row.


@compiled
def _write(row: Array, keys: Array, key: Any, end: Any) -> None:
    """Keep the weights whose keys are larger than `key`, and those before `end` whose keys equal
    it.
    """
    before = row[:end]
    keys_before = keys[:end]
    for j in range(before.size):
        if keys_before[j] < key:
            before[j] = 0
    after = row[end:]
    keys_after = keys[end:]
    for j in range(after.size):
        if keys_after[j] <= key:
            after[j] = 0


@compiled
def _write_pattern(row: Array, keys: Array, n: Any, m: Any, places: Array, ahead: Array) -> None:
    """Keep the n largest of every m weights, the first among equal ones: those with fewer than n
    weights of their m ahead.

    For each distance, all pairs of keys at this distance are compared along the row.

    Args:
        places: position of each weight within its m, so that only weights of the same m are
            compared.
        ahead: scratch memory: how many weights of its m are ahead of each weight.
    """
    ahead[:] = 0
    for distance in range(1, m):
        left = keys[: keys.size - distance]
        right = keys[distance:]
        last = np.uint16(m - distance)
        ahead_of_right = ahead[distance:]
        for j in range(left.size):
            ahead_of_right[j] = np.uint16(
                ahead_of_right[j] + np.uint16((places[j] < last) & (left[j] >= right[j]))
            )
        for j in range(left.size):
            ahead[j] = np.uint16(ahead[j] + np.uint16((places[j] < last) & (right[j] > left[j])))
    for j in range(row.size):
        if ahead[j] >= n:
            row[j] = 0


@compiled
def cut(
    weights: Array,
    norms: Array,
    form: Any,
    like: Array,
    nu: Array,
    counts: Array,
    n: Any,
    m: Any,
    zeros: Array,
    kept_mass: Array,
    nu_mass: Array,
) -> None:
    """Keep the weights of the largest keys of each row; set the others to zero, in place.

    Args:
        weights, norms, form, like: those of `sums`.
        nu, counts: int64, shape (rows,): floor(N_eff) of a row, and how many weights are kept.
        n, m: keep n of every m; m is 0 for the other rules.
        zeros: int64, shape (rows,), an output: how many weights of the row are now zero.
        kept_mass, nu_mass: float64, shape (rows,), outputs: the sums of the kept scores, and of the
            `nu` largest.
    """
    columns = weights.shape[1]
    keys = np.empty(columns, like.dtype)
    key_form = F32 if norms.size else form
    high = np.empty(columns, np.uint16)
    low = np.empty(columns, np.uint16)
    narrow = keys.itemsize == 2
    if narrow:
        high = keys.view(np.uint16)
    first = np.empty(LANES)
    second = np.empty(LANES)
    places = (np.arange(columns if m else 0) % max(m, 1)).astype(np.uint16)
    ahead = np.empty_like(places)
    upper_bits = np.uint32(8 * keys.itemsize - 16)
    guess = np.uint32(1 << 14)
    for r in range(weights.shape[0]):
        row = weights[r]
        _fill(keys, row, norms, form)
        if not narrow:
            for j in range(columns):
                high[j] = np.uint16(keys[j] >> upper_bits)
        nu_bits, nu_above = _kth(keys, high, low, nu[r], guess)
        guess = nu_bits >> upper_bits
        bits = nu_bits
        above = nu_above
        if not m and counts[r] != nu[r]:
            bits, above = _kth(keys, high, low, counts[r], guess)
        nu_key = like.dtype.type(nu_bits)
        key = like.dtype.type(bits)
        if m:
            _write_pattern(row, keys, np.uint16(n), m, places, ahead)
        else:
            _write(row, keys, key, _end_of_ties(keys, key, counts[r] - above))
        kept_mass[r], above_mass = _masses(keys, key_form, row, nu_key, first, second)
        nu_mass[r] = above_mass + np.float64(nu[r] - nu_above) * np.float64(
            _value(nu_key, key_form)
        )
        zeros[r] = columns - counts[r]
        if m or key == 0:  # weights that are kept may be zero
            zeros[r] = 0
            for j in range(columns):
                zeros[r] += (row[j] & weights.dtype.type(form[0])) == 0


# Threads.

_PIECE = 1 << 17  # weights in the smallest piece of work


def prune_words(words: Array, dtype: str, norms: Array | None, rule: KeepRule) -> RowFigures:
    """Set to zero, in place, the weights of each row that a rule does not keep.

    Args:
        words: the bits of the weights, uint16 or uint32, shape (rows, columns), contiguous, not
            empty.
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
    like = np.empty(0, words.dtype if norms is None else np.uint32)
    scores_of = factors, FORMS[dtype], like
    total, power, kept_mass, nu_mass = np.empty((4, rows))
    zeros = np.empty(rows, np.int64)
    _in_parallel(
        rows, columns, lambda chunk: sums(words[chunk], *scores_of, total[chunk], power[chunk])
    )
    n_eff, nu, counts = row_counts(total, power, columns, rule)
    n, m = rule.pattern or (0, 0)

    def cut_chunk(chunk: slice) -> None:
        cut(
            words[chunk],
            *scores_of,
            nu[chunk],
            counts[chunk],
            n,
            m,
            zeros[chunk],
            kept_mass[chunk],
            nu_mass[chunk],
        )

    _in_parallel(rows, columns, cut_chunk)
    return RowFigures(counts, zeros, kept_mass, total, n_eff, mass_share(nu_mass, total))


def _in_parallel(rows: int, columns: int, work: Callable[[slice], Any]) -> None:
    """Share rows among threads, two pieces for each, unless they are few."""
    threads = _threads()
    pieces = 1 if threads == 1 else max(1, min(2 * threads, rows * columns // _PIECE))
    step = -(-rows // pieces)
    chunks = [slice(first, first + step) for first in range(0, rows, step)]
    list(_pool(threads).map(work, chunks) if len(chunks) > 1 else map(work, chunks))


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
