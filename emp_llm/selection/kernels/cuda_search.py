"""The row kernel for CUDA, in Triton: the cut of a row.

To find the k-th largest key, the kernel repeatedly counts the keys that are a probe or more. Each count narrows the interval
that holds the k-th largest. So the first guess affects the number of counts, and never the result.
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
    """The number of keys of a row that are `least` or more; `least` >= 1. WHOLE: `keys` holds the row; else it is reread."""
    if WHOLE:
        count = BLOCK + tl.sum(is_less(keys, least), 0)
    else:
        less = tl.zeros([BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            part = row_keys(row, norms, start + tl.arange(0, BLOCK), columns, KIND, NORMS)
            less += is_less(part, least)
        count = (columns + BLOCK - 1) // BLOCK * BLOCK + tl.sum(less, 0)
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
    """The smallest key that is `least` or more, or `otherwise` if that is smaller; `least` >= 1."""
    if WHOLE:
        smallest = tl.where(keys >= least, tl.minimum(keys, otherwise), otherwise)
    else:
        smallest = tl.zeros([BLOCK], tl.int32) + otherwise
        for start in range(0, columns, BLOCK):
            part = row_keys(row, norms, start + tl.arange(0, BLOCK), columns, KIND, NORMS)
            smallest = tl.where(part >= least, tl.minimum(smallest, part), smallest)
    return tl.min(smallest, 0)


@triton.jit
def guess_key(total, k, columns, KIND: tl.constexpr, NORMS: tl.constexpr):
    """An estimate of the key of the k-th largest score, from a normal distribution of the weights."""
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
    """The k-th largest key, the number of larger keys, and the number of keys as large or larger.

    At all times `reach` keys are `low` or more, `above` keys are `high` or more, and reach >= k > above (or k = above = 0).
    """
    low, high = largest * 0, largest + 1
    reach, above = low + columns, low
    if NORMS or KIND == "float32":
        unit = 65536.0  # the distance between two neighbouring bfloat16 numbers
    elif KIND == "bfloat16":
        unit = 1.0
    else:
        unit = 8.0
    # The change of the probe for each key that a count is off, from a normal distribution of the weights.
    pace = 768.0 * unit / columns + (low * 0).to(tl.float32)
    interpolations = low
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
        elif low == 0 or high > largest:  # ever longer strides from the guess, until the cut lies between two probes
            stride = tl.minimum(tl.abs(count - k).to(tl.float32) * pace + 2.0 * unit, 268435456.0).to(tl.int32)
            stride = tl.minimum(stride, gap >> 1)
            probe = tl.where(low == 0, high - stride, low + stride)
            pace = pace * 4.0
        else:  # linear interpolation between the two probes; every third time bisection, in case the counts are not linear
            share = (reach - k).to(tl.float32) / (reach - above).to(tl.float32)
            interpolations += 1
            step = tl.where(interpolations % 3 == 0, gap >> 1, (gap.to(tl.float32) * share + 0.5).to(tl.int32))
            probe = low + tl.minimum(tl.maximum(step, 1), gap - 1)
    return low, above, reach


@triton.jit
def _ties(keys, key):
    """The number of keys that equal `key` in each group of 64 columns."""
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
    """The column after the first `ties` keys that equal `key`. More than `ties` keys equal it."""
    # Ties in the groups of 64 columns that end before `ties` is reached, and the number of these groups.
    passed = ties * 0
    whole = ties * 0
    if WHOLE:
        reached = tl.cumsum(_ties(keys, key), 0)
        passed = tl.max(tl.where(reached < ties, reached, 0), 0)
        whole = tl.sum((reached < ties).to(tl.int32), 0)
    else:
        at = tl.arange(0, BLOCK)
        before = ties * 0
        for start in range(0, columns, BLOCK):
            part = row_keys(row, norms, start + at, columns, KIND, NORMS)
            block_ties = _ties(tl.where(start + at < columns, part, -1), key)
            reached = tl.cumsum(block_ties, 0) + before
            passed = tl.maximum(passed, tl.max(tl.where(reached < ties, reached, 0), 0))
            whole += tl.sum((reached < ties).to(tl.int32), 0)
            before += tl.sum(block_ties, 0)
    last = whole * LANES + tl.arange(0, LANES)
    tied = (row_keys(row, norms, last, columns, KIND, NORMS) == key) & (last < columns)
    reached = tl.cumsum(tied.to(tl.int32), 0) + passed
    return tl.where(ties == 0, 0, whole * LANES + tl.sum((reached < ties).to(tl.int32), 0) + 1)
