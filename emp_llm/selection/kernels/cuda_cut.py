"""The second half of the row kernel for CUDA, in Triton: the cut of a row, and its write; `cuda` launches the kernels here.

The k-th largest key is found by counting how many keys reach a probe. Every answer narrows the interval it can be in, so the
first guess decides how many counts it takes and never what is found.

A program reads a row three times: for the sums, for the cut, for the masses and the write. Only the first comes from memory,
the others from the caches, as long as not too many rows are under way at once (`cuda` sees to that).
"""

import triton
import triton.language as tl

from emp_llm.selection.kernels.cuda_scores import (
    LANES,
    fold,
    is_less,
    kept_count,
    key_near,
    magnitude_bits,
    number_of,
    row_bits,
    row_keys,
    scaled,
    sums,
    unscaled,
)

# floor(N_eff) of a row, floor(beta * N_eff), counts that are given, N of every M.
EFFECTIVE, BETA, GIVEN, PATTERN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _count(
    keys,
    least,
    row,
    norms,
    columns,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """How many keys of a row are `least` (at least 1) or more; `keys` are all of them where WHOLE, else they are read again."""
    if WHOLE:
        count = BLOCK + tl.sum(is_less(keys, least), 0)
    else:
        some = tl.zeros([BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            part = row_keys(row, norms, start + tl.arange(0, BLOCK), columns, KIND, NORMS)
            some += is_less(part, least)
        count = (columns + BLOCK - 1) // BLOCK * BLOCK + tl.sum(some, 0)
    return count


@triton.jit
def _smallest(
    keys,
    least,
    otherwise,
    row,
    norms,
    columns,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The smallest key that is `least` (at least 1) or more, and no more than `otherwise`."""
    if WHOLE:
        some = tl.where(keys >= least, tl.minimum(keys, otherwise), otherwise)
    else:
        some = tl.zeros([BLOCK], tl.int32) + otherwise
        for start in range(0, columns, BLOCK):
            part = row_keys(row, norms, start + tl.arange(0, BLOCK), columns, KIND, NORMS)
            some = tl.where(part >= least, tl.minimum(some, part), some)
    return tl.min(some, 0)


@triton.jit
def _search(
    keys,
    k,
    guess,
    largest,
    row,
    norms,
    columns,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The k-th largest key, how many keys are larger, and how many are as large or larger.

    Throughout, `reach` keys are `low` or more, `above` are `high` or more, and reach >= k > above (or k = above = 0).
    """
    low, high = largest * 0, largest + 1
    reach, above = low + columns, low
    step = low + 8
    if NORMS or KIND == "float32":
        step = step << 16
    probe = tl.minimum(tl.maximum(guess, 1), largest.to(tl.int64)).to(tl.int32)
    while low + 1 < high:
        count = _count(keys, probe, row, norms, columns, KIND, NORMS, BLOCK, WHOLE)
        if count < k:
            above = count
            high = probe
        else:
            reach = count
            low = probe
            if count == k:  # these are the k largest: the smallest of them is the cut
                low = _smallest(keys, probe, high - 1, row, norms, columns, KIND, NORMS, BLOCK, WHOLE)
        # Wider and wider steps from the guess until the cut lies between two probes, then halves.
        half = (high - low) >> 1
        probe = low + half
        if reach == k:
            probe = low + 1
        elif high > largest:
            probe = low + tl.minimum(half, step)
        elif low == 0:
            probe = high - tl.minimum(half, step)
        step = tl.minimum(step * 4, 1 << 28)
    return low, above, reach


@triton.jit
def _ties(keys, key):
    """How many of some keys equal `key`, for every 64 columns."""
    tied = (keys == key).to(tl.int32)
    return tl.sum(tl.reshape(tied, [tied.shape[0] // LANES, LANES]), 1)


@triton.jit
def _end_of_ties(
    keys,
    key,
    ties,
    row,
    norms,
    columns,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The column behind the first `ties` keys that equal `key`, where there are more than these."""
    passed, whole = (
        ties * 0,
        ties * 0,
    )  # ties in the groups of 64 columns that do not reach `ties`, and how many groups these are
    if WHOLE:
        reached = tl.cumsum(_ties(keys, key), 0)
        passed = tl.max(tl.where(reached < ties, reached, 0), 0)
        whole = tl.sum((reached < ties).to(tl.int32), 0)
    else:
        at = tl.arange(0, BLOCK)
        before = ties * 0
        for start in range(0, columns, BLOCK):
            part = row_keys(row, norms, start + at, columns, KIND, NORMS)
            some = _ties(tl.where(start + at < columns, part, -1), key)
            reached = tl.cumsum(some, 0) + before
            passed = tl.maximum(passed, tl.max(tl.where(reached < ties, reached, 0), 0))
            whole += tl.sum((reached < ties).to(tl.int32), 0)
            before += tl.sum(some, 0)
    last = whole * LANES + tl.arange(0, LANES)
    tied = (row_keys(row, norms, last, columns, KIND, NORMS) == key) & (last < columns)
    reached = tl.cumsum(tied.to(tl.int32), 0) + passed
    return tl.where(ties == 0, 0, whole * LANES + tl.sum((reached < ties).to(tl.int32), 0) + 1)


@triton.jit
def _pattern(row, norms, at, columns, n, M: tl.constexpr, KIND: tl.constexpr, NORMS: tl.constexpr):
    """Whether each of some columns is among the n largest of its M, among equal ones the first."""
    key = row_keys(row, norms, at, columns, KIND, NORMS)
    first = at // M * M
    before = at * 0
    for place in range(M):
        other = row_keys(row, norms, first + place, columns, KIND, NORMS)
        before += ((other > key) | ((other == key) & (first + place < at))).to(tl.int32)
    return before < n


@triton.jit
def _masses(
    row,
    norms,
    columns,
    cut,
    end,
    nu_key,
    n,
    M: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The sums of the scores that are kept, and of those larger than `nu_key`."""
    lane = tl.arange(0, LANES)
    kept = tl.zeros([LANES], tl.float64)
    more = tl.zeros([LANES], tl.float64)
    for start in tl.range(0, columns, LANES, loop_unroll_factor=4):
        at = start + lane
        key = row_keys(row, norms, at, columns, KIND, NORMS, EVEN)
        if M > 0:
            keep = _pattern(row, norms, at, columns, n, M, KIND, NORMS)
        else:
            keep = key >= tl.where(at < end, cut, cut + 1)
        kept += unscaled(tl.where(keep, key, 0), KIND, NORMS)
        more += unscaled(tl.where(key > nu_key, key, 0), KIND, NORMS)
    kept_sum, more_sum = fold(kept, more)
    return scaled(kept_sum, KIND, NORMS), scaled(more_sum, KIND, NORMS)


@triton.jit
def _write(
    row,
    out,
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
    """Write the row, zeros where it is not kept; how many weights are zero now. `out` may be `row`."""
    some = tl.zeros([CHUNK], tl.int32)
    length: tl.constexpr = CHUNK // M * M if M > 0 else CHUNK  # whole groups: no chunk reads what another has written
    for start in range(0, columns, length):
        at = start + tl.arange(0, CHUNK)
        bits = row_bits(row, at, columns)
        if M > 0:
            keep = _pattern(row, norms, at, columns, n, M, KIND, NORMS)
            tl.debug_barrier()  # every thread has read its neighbours
        else:
            key = row_keys(row, norms, at, columns, KIND, NORMS)
            keep = key >= tl.where(at < end, cut, cut + 1)
        inside = at < columns
        if length != CHUNK:
            inside = inside & (at < start + length)
            keep = keep & inside
        bits = tl.where(keep, bits, 0)
        tl.store(out + at, bits.to(out.dtype.element_ty), mask=inside)
        some += is_less(0, magnitude_bits(bits, KIND))
    return columns + tl.sum(some, 0)


@triton.jit
def _guess(total, k, columns, KIND: tl.constexpr, NORMS: tl.constexpr):
    """About the key of the k-th largest score, were the weights normally distributed."""
    share = (columns - k).to(tl.float64) / columns
    return key_near(total / columns * share * 1.6, KIND, NORMS)


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
    EVEN: tl.constexpr,
):
    """One row; `counts`, `integers` and `floats` point to what belongs to it."""
    total, power, largest = sums(row, norms, columns, KIND, NORMS, EVEN)
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
        nu_key, nu_above, reach = _search(
            keys, nu, _guess(total, nu, columns, KIND, NORMS), largest, row, norms, columns, KIND, NORMS, BLOCK, WHOLE
        )
        k, cut, above, end = nu, nu_key, nu_above, nu * 0
        if BUDGET == BETA:
            k = kept_count(beta.to(tl.int64).to(tl.float64, bitcast=True) * number, total, size)
        elif BUDGET == GIVEN:
            k = tl.load(counts).to(tl.int32)
        elif BUDGET == PATTERN:
            k = nu * 0 + columns // M * n
        if BUDGET != PATTERN:
            if BUDGET != EFFECTIVE and k != nu:
                guess = _guess(total, k, columns, KIND, NORMS)
                cut, above, reach = _search(keys, k, guess, largest, row, norms, columns, KIND, NORMS, BLOCK, WHOLE)
            end += columns
            if reach > k:
                end = _end_of_ties(keys, cut, k - above, row, norms, columns, KIND, NORMS, BLOCK, WHOLE)
        kept_mass, above_nu = _masses(row, norms, columns, cut, end, nu_key, n, M, KIND, NORMS, EVEN)
        tl.debug_barrier()  # where `out` is `row`, all have read it
        zeros = _write(row, out, norms, columns, cut, end, n, M, KIND, NORMS, CHUNK)
        share = above_nu + (nu - nu_above).to(tl.float64) * scaled(unscaled(nu_key, KIND, NORMS), KIND, NORMS)
        share = tl.where(total == 0.0, 1.0, tl.minimum(share / tl.where(total == 0.0, 1.0, total), 1.0))
        tl.store(integers, k.to(tl.int64))
        tl.store(integers + rows, zeros.to(tl.int64))
        tl.store(floats, kept_mass)
        tl.store(floats + rows, total)
        tl.store(floats + 2 * rows, number)
        tl.store(floats + 3 * rows, share)


@triton.jit(do_not_specialize=["rows", "beta", "n"])
def prune(
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
    EVEN: tl.constexpr,
):
    """Prune rows; nothing if `flag` is set, and set it for a row that holds NaN or infinity, which is not written.

    Args:
        weights, out: int16 or int32, shape (rows, columns): the bits, and where they go; may be the same.
        norms: float32, shape (columns,), where NORMS; counts: int64, shape (rows,), where BUDGET is GIVEN.
        flag: int32, shape (1,).
        integers: int64, shape (2, rows), filled: kept, zeros.
        floats: float64, shape (4, rows), filled: kept_mass, mass, n_eff, s_eff.
        beta: the bits of a float64, for BETA; n, M: for PATTERN, else 0.
        KIND: "bfloat16", "float16" or "float32"; TOP: the key of infinity.
        BLOCK: a power of two, at least 64; WHOLE: no less than the columns, so that the keys of a row are held.
        CHUNK: how much is written at a time: a power of two, at least 64 and M; EVEN: the columns are a multiple of 64.
    """
    if tl.load(flag) == 0:
        for index in range(tl.program_id(0), rows, tl.num_programs(0)):
            # From the last row on: of what `check` has read, that is what the cache still has.
            place = (rows - 1 - index).to(tl.int64)
            start = place * columns
            _prune_row(
                weights + start,
                out + start,
                norms,
                counts + place,
                flag,
                integers + place,
                floats + place,
                rows,
                columns,
                beta,
                n,
                BUDGET,
                M,
                KIND,
                NORMS,
                TOP,
                BLOCK,
                WHOLE,
                CHUNK,
                EVEN,
            )


@triton.jit
def check(
    weights,
    norms,
    flag,
    columns,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set `flag` if the scores of a row hold NaN or infinity; arguments as for `prune`, a program for each row."""
    row = weights + tl.program_id(0).to(tl.int64) * columns
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        largest = tl.maximum(largest, row_keys(row, norms, start + tl.arange(0, BLOCK), columns, KIND, NORMS))
    if tl.max(largest, 0) >= TOP:
        tl.store(flag, 1)
