"""The row kernel for CUDA, in Triton: where a row is cut.

The k-th largest key is found by counting how many keys reach a probe. Every answer narrows the interval it can be in, so the
first guess decides how many counts it takes and never what is found.
"""

import triton
import triton.language as tl

from emp_llm.selection.kernels.cuda_scores import LANES, is_less, key_near, row_keys


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
def guess_key(total, k, columns, KIND: tl.constexpr, NORMS: tl.constexpr):
    """About the key of the k-th largest score, were the weights normally distributed."""
    share = (columns - k).to(tl.float64) / columns
    return key_near(total / columns * share * 1.6, KIND, NORMS)


@triton.jit
def search(
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
    if NORMS or KIND == "float32":
        unit = 65536.0  # as far from number to number as two neighbours in bfloat16
    elif KIND == "bfloat16":
        unit = 1.0
    else:
        unit = 8.0
    # How many keys to go for each count that a probe is off, were the weights normally distributed.
    pace = 768.0 * unit / columns + (low * 0).to(tl.float32)
    turn = low
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
        gap = high - low
        if reach == k:
            probe = low + 1
        elif low == 0 or high > largest:  # longer and longer strides from the guess, until the cut lies between two probes
            stride = tl.minimum(tl.abs(count - k).to(tl.float32) * pace + 2.0 * unit, 268435456.0).to(tl.int32)
            stride = tl.minimum(stride, gap >> 1)
            probe = tl.where(low == 0, high - stride, low + stride)
            pace = pace * 4.0
        else:  # where a straight line between the two would have it; every third time halfway, should they not be that straight
            share = (reach - k).to(tl.float32) / (reach - above).to(tl.float32)
            turn += 1
            line = tl.where(turn % 3 == 0, gap >> 1, (gap.to(tl.float32) * share + 0.5).to(tl.int32))
            probe = low + tl.minimum(tl.maximum(line, 1), gap - 1)
    return low, above, reach


@triton.jit
def _ties(keys, key):
    """How many of some keys equal `key`, for every 64 columns."""
    tied = (keys == key).to(tl.int32)
    return tl.sum(tl.reshape(tied, [tied.shape[0] // LANES, LANES]), 1)


@triton.jit
def end_of_ties(
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
