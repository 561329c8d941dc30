"""The row kernel for CUDA, in Triton: the pruning of a row, and the programs `prune_kernel` and `check_kernel` for `cuda`.

A program reads a row three times: for the sums, for the cut, and for the masses and the write. Only the first read comes from
memory. The others come from the caches, because `cuda` limits the number of rows in progress.
"""

import triton
import triton.language as tl

from emp_llm.selection.kernels.cuda_scores import (
    LANES,
    fold,
    kept_count,
    keys_of,
    magnitude_bits,
    number_of,
    row_bits,
    row_keys,
    scaled,
    sums,
    unscaled,
)
from emp_llm.selection.kernels.cuda_search import end_of_ties, guess_key, search

# Kinds of budget: floor(N_eff) of a row, floor(beta * N_eff), given counts, N of every M.
EFFECTIVE, BETA, GIVEN, PATTERN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _pattern(row, norms, at, columns, n, M: tl.constexpr, KIND: tl.constexpr, NORMS: tl.constexpr):
    """Whether the key at each of these columns is among the n largest of its M; among equal keys the first counts as larger."""
    key = row_keys(row, norms, at, columns, KIND, NORMS)
    first = at // M * M
    ahead = at * 0
    for place in range(M):
        other = row_keys(row, norms, first + place, columns, KIND, NORMS)
        ahead += ((other > key) | ((other == key) & (first + place < at))).to(tl.int32)
    return ahead < n


@triton.jit
def _masses(
    row,
    out,
    norms,
    columns,
    cut,
    end,
    nu_key,
    n,
    M: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    ALIGNED: tl.constexpr,
    OUT_OF_PLACE: tl.constexpr,
):
    """The sums of the kept scores, and of those larger than `nu_key`. OUT_OF_PLACE: also write the kept weights to `out`."""
    lane = tl.arange(0, LANES)
    kept = tl.zeros([LANES], tl.float64)
    above = tl.zeros([LANES], tl.float64)
    for start in tl.range(0, columns, LANES, loop_unroll_factor=4):
        at = start + lane
        bits = row_bits(row, at, columns, ALIGNED)
        key = keys_of(bits, norms, at, columns, KIND, NORMS, ALIGNED)
        if M > 0:
            keep = _pattern(row, norms, at, columns, n, M, KIND, NORMS)
        else:
            keep = key >= tl.where(at < end, cut, cut + 1)
        if OUT_OF_PLACE:
            bits = tl.where(keep, bits, 0).to(out.dtype.element_ty)
            if ALIGNED:
                tl.store(out + at, bits)
            else:
                tl.store(out + at, bits, mask=at < columns)
        kept += unscaled(tl.where(keep, key, 0), KIND, NORMS)
        above += unscaled(tl.where(key > nu_key, key, 0), KIND, NORMS)
    kept_sum, above_sum = fold(kept, above)
    return scaled(kept_sum, KIND, NORMS), scaled(above_sum, KIND, NORMS)


@triton.jit
def _write(
    row,
    norms,
    columns,
    cut,
    end,
    n,
    M: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Set to zero, in place, the weights that are not kept."""
    # A chunk holds whole groups of M, so that none reads weights that another has written.
    length: tl.constexpr = CHUNK // M * M if M > 0 else CHUNK
    for start in range(0, columns, length):
        at = start + tl.arange(0, CHUNK)
        bits = row_bits(row, at, columns)
        if M > 0:
            keep = _pattern(row, norms, at, columns, n, M, KIND, NORMS)
            tl.debug_barrier()  # every thread has read its neighbours
        else:
            key = keys_of(bits, norms, at, columns, KIND, NORMS)
            keep = key >= tl.where(at < end, cut, cut + 1)
        inside = at < columns
        if length != CHUNK:
            inside = inside & (at < start + length)
        tl.store(row + at, tl.where(keep, bits, 0).to(row.dtype.element_ty), mask=inside)


@triton.jit
def _kept_zeros(row, norms, columns, end, n, M: tl.constexpr, KIND: tl.constexpr, NORMS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the kept weights are zero. Used where scores of zero are kept: those before `end`, or those of a pattern."""
    count = tl.zeros([CHUNK], tl.int32)
    for start in range(0, columns, CHUNK):
        at = start + tl.arange(0, CHUNK)
        zero = magnitude_bits(row_bits(row, at, columns), KIND) == 0
        if M > 0:
            keep = (at < columns) & _pattern(row, norms, at, columns, n, M, KIND, NORMS)
        else:
            keep = at < end
        count += (zero & keep).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _count(counts, columns, beta, n, number, nu, total, size, BUDGET: tl.constexpr, M: tl.constexpr):
    """The number of weights of a row that its budget keeps."""
    k = nu
    if BUDGET == BETA:
        k = kept_count(beta.to(tl.int64).to(tl.float64, bitcast=True) * number, total, size)
    elif BUDGET == GIVEN:
        k = tl.load(counts).to(tl.int32)
    elif BUDGET == PATTERN:
        k = nu * 0 + columns // M * n
    return k


@triton.jit
def _effective_share(above_nu, nu, nu_above, nu_key, total, KIND: tl.constexpr, NORMS: tl.constexpr):
    """s_eff, the share of a row's mass in its nu largest scores; `above_nu` is the mass of those larger than `nu_key`."""
    share = above_nu + (nu - nu_above).to(tl.float64) * scaled(unscaled(nu_key, KIND, NORMS), KIND, NORMS)
    return tl.where(total == 0.0, 1.0, tl.minimum(share / tl.where(total == 0.0, 1.0, total), 1.0))


@triton.jit
def _prune_row(
    row,
    out,
    norms,
    counts,
    flag,
    integers,
    floats,
    rows,
    columns,
    beta,
    n,
    BUDGET: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    OUT_OF_PLACE: tl.constexpr,
):
    """Prune one row. `counts`, `integers` and `floats` point to the entries of this row."""
    total, power, largest = sums(row, norms, columns, KIND, NORMS, ALIGNED)
    if largest >= TOP:
        tl.store(flag, 1)
    else:
        size = tl.full([], 0.0, tl.float64) + columns
        number = number_of(total, power, size)
        nu = kept_count(number, total, size)
        if WHOLE:
            at = tl.arange(0, BLOCK)
            keys = tl.where(at < columns, row_keys(row, norms, at, columns, KIND, NORMS), -1)
        else:
            keys = 0
        nu_guess = guess_key(total, nu, columns, KIND, NORMS)
        nu_key, nu_above, reach = search(keys, nu, nu_guess, largest, row, norms, columns, KIND, NORMS, BLOCK, WHOLE)
        k, cut, above, end = _count(counts, columns, beta, n, number, nu, total, size, BUDGET, M), nu_key, nu_above, nu * 0
        if BUDGET != PATTERN:
            if BUDGET != EFFECTIVE and k != nu:
                guess = guess_key(total, k, columns, KIND, NORMS)
                cut, above, reach = search(keys, k, guess, largest, row, norms, columns, KIND, NORMS, BLOCK, WHOLE)
            end += columns
            if reach > k:
                end = end_of_ties(keys, cut, k - above, row, norms, columns, KIND, NORMS, BLOCK, WHOLE)
        zeros = columns - k
        if M > 0 or cut == 0:
            zeros += _kept_zeros(row, norms, columns, end, n, M, KIND, NORMS, CHUNK)
        kept_mass, above_nu = _masses(row, out, norms, columns, cut, end, nu_key, n, M, KIND, NORMS, ALIGNED, OUT_OF_PLACE)
        if not OUT_OF_PLACE:
            tl.debug_barrier()  # every thread has finished reading the row
            _write(row, norms, columns, cut, end, n, M, KIND, NORMS, CHUNK)
        tl.store(integers, k.to(tl.int64))
        tl.store(integers + rows, zeros.to(tl.int64))
        tl.store(floats, kept_mass)
        tl.store(floats + rows, total)
        tl.store(floats + 2 * rows, number)
        tl.store(floats + 3 * rows, _effective_share(above_nu, nu, nu_above, nu_key, total, KIND, NORMS))


@triton.jit(do_not_specialize=["rows", "beta", "n"])
def prune_kernel(
    weights,
    out,
    norms,
    counts,
    flag,
    integers,
    floats,
    rows,
    columns,
    beta,
    n,
    BUDGET: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    OUT_OF_PLACE: tl.constexpr,
):
    """Prune rows. Do nothing if `flag` is set. Set it for a row that holds NaN or infinity, and do not write that row.

    Args:
        weights, out: int16 or int32, shape (rows, columns): the bits of the weights, and of the result.
        norms: float32, shape (columns,), if NORMS.
        counts: int64, shape (rows,), if BUDGET is GIVEN.
        flag: int32, shape (1,).
        integers: int64, shape (2, rows), an output: kept, zeros.
        floats: float64, shape (4, rows), an output: kept_mass, mass, n_eff, s_eff.
        beta: the bits of a float64, if BUDGET is BETA.
        n, M: of an N:M pattern, else 0.
        KIND: "bfloat16", "float16" or "float32".
        TOP: the key of infinity.
        BLOCK: number of keys read at a time, a power of two, at least 64.
        WHOLE: BLOCK is not less than the columns, so that all keys of a row stay in registers.
        CHUNK: number of weights written at a time in place: a power of two, at least 64 and M.
        ALIGNED: the columns are a multiple of 64.
        OUT_OF_PLACE: `out` does not overlap `weights`; otherwise it is the same memory.
    """
    if tl.load(flag) == 0:
        for index in range(tl.program_id(0), rows, tl.num_programs(0)):
            # From the last row backwards: the cache still holds the rows that `check_kernel` read last.
            place = (rows - 1 - index).to(tl.int64)
            start = place * columns
            _prune_row(
                weights + start, out + start, norms, counts + place, flag, integers + place, floats + place,
                rows, columns, beta, n, BUDGET, M, KIND, NORMS, TOP, BLOCK, WHOLE, CHUNK, ALIGNED, OUT_OF_PLACE,
            )  # fmt: skip


@triton.jit
def check_kernel(
    weights,
    norms,
    flag,
    columns,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set `flag` if the scores of a row hold NaN or infinity. One program for each row; arguments as for `prune_kernel`."""
    row = weights + tl.program_id(0).to(tl.int64) * columns
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        largest = tl.maximum(largest, row_keys(row, norms, start + tl.arange(0, BLOCK), columns, KIND, NORMS))
    if tl.max(largest, 0) >= TOP:
        tl.store(flag, 1)
