"""The row kernel for CUDA, in Triton: scores, their keys, their sums, and the number of weights of a row to keep.

The key of a score is the bits of its float, read as an integer; keys are in the same order as scores. Sums follow the order
that `arithmetic.sums` defines: a vector of 64 lanes moves along the row, then it is folded in halves.

The bits equal those of the reference although a compiler may contract a * b + c. Every product that enters a sum is exact in
float64: score * score (48 bits), ties * score (24 bits and the bits of the count), score * power of two. All other operations
are single IEEE operations, division included (div.rn.f64), and float32 products keep subnormal numbers (mul.f32 without .ftz).
"""

import triton
import triton.language as tl

from emp_llm.selection.arithmetic import definitions as order
from emp_llm.selection.arithmetic.definitions import RELATIVE_TOLERANCE

LANES = tl.constexpr(order.LANES)
_TOLERANCE = tl.constexpr(RELATIVE_TOLERANCE)
_ABOVE_ONE = tl.constexpr(1 + RELATIVE_TOLERANCE)
# The factor between a float64 and the float32 (or float16) whose bits it holds in its upper part: the biases differ.
_SCALE32, _UNSCALE32 = tl.constexpr(2.0**896), tl.constexpr(2.0**-896)
_SCALE16, _UNSCALE16 = tl.constexpr(2.0**1008), tl.constexpr(2.0**-1008)


@triton.jit
def row_bits(row, at, columns, ALIGNED: tl.constexpr = False):
    """The bits of the weights at the columns `at`, as int32; 0 beyond the end of the row. ALIGNED: no column lies beyond it."""
    if ALIGNED:
        bits = tl.load(row + at)
    else:
        bits = tl.load(row + at, mask=at < columns, other=0)
    return bits.to(tl.int32)


@triton.jit
def magnitude_bits(bits, KIND: tl.constexpr):
    """The bits of weights without the sign."""
    if KIND == "float32":
        bits = bits & 0x7FFFFFFF
    else:
        bits = bits & 0x7FFF
    return bits


@triton.jit
def keys_of(bits, norms, at, columns, KIND: tl.constexpr, NORMS: tl.constexpr, ALIGNED: tl.constexpr = False):
    """The keys of the scores at the columns `at`: the bits of |w|, or of |w| * norm in float32."""
    key = magnitude_bits(bits, KIND)
    if NORMS:
        if KIND == "bfloat16":
            value = (key << 16).to(tl.float32, bitcast=True)
        elif KIND == "float16":
            value = key.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            value = key.to(tl.float32, bitcast=True)
        if ALIGNED:
            norm = tl.load(norms + at)
        else:
            norm = tl.load(norms + at, mask=at < columns, other=0.0)
        key = (value * norm).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return key


@triton.jit
def row_keys(row, norms, at, columns, KIND: tl.constexpr, NORMS: tl.constexpr, ALIGNED: tl.constexpr = False):
    """The keys at the columns `at`; 0 beyond the end of the row. ALIGNED: no column lies beyond it."""
    return keys_of(row_bits(row, at, columns, ALIGNED), norms, at, columns, KIND, NORMS, ALIGNED)


@triton.jit
def is_less(keys, least):
    """-1 where keys are less than `least`, else 0. Arithmetic is cheaper here: sums of comparisons cost twice as much."""
    return (keys - least) >> 31


@triton.jit
def unscaled(key, KIND: tl.constexpr, NORMS: tl.constexpr):
    """The scores in float64 times a power of two: their bits, shifted to the exponent and fraction of a float64.

    Subnormal scores become subnormal float64 numbers, so nothing is lost. Sums of these numbers are the sums of the scores
    times that power: an addition rounds to the same 53 bits, and where float64 is subnormal, all numbers are multiples of the
    smallest one, so both sums are exact.
    """
    wide = key.to(tl.int64)
    if NORMS or KIND == "float32":
        wide = wide << 29
    elif KIND == "bfloat16":
        wide = wide << 45
    else:
        wide = wide << 42
    return wide.to(tl.float64, bitcast=True)


@triton.jit
def scaled(value, KIND: tl.constexpr, NORMS: tl.constexpr):
    """A sum of numbers from `unscaled`, times the power of two that restores the scale of the scores."""
    if KIND == "float16" and not NORMS:
        value = value * _SCALE16
    else:
        value = value * _SCALE32
    return value


@triton.jit
def key_near(score, KIND: tl.constexpr, NORMS: tl.constexpr):
    """The key of a float64 score, rounded down, as int64: the inverse of `unscaled` followed by `scaled`."""
    if NORMS or KIND == "float32":
        key = (score * _UNSCALE32).to(tl.int64, bitcast=True) >> 29
    elif KIND == "bfloat16":
        key = (score * _UNSCALE32).to(tl.int64, bitcast=True) >> 45
    else:
        key = (score * _UNSCALE16).to(tl.int64, bitcast=True) >> 42
    return key


@triton.jit
def fold(first, second):
    """The sums of two vectors of 64 lanes, folded in halves. Each step adds pairs, with one addition for a pair."""
    both = tl.join(first, second)
    both = tl.sum(tl.reshape(both, [2, 32, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 16, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 8, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 4, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 2, 2]), 0)
    return tl.split(tl.sum(both, 0))


@triton.jit
def sums(row, norms, columns, KIND: tl.constexpr, NORMS: tl.constexpr, ALIGNED: tl.constexpr):
    """sum s, sum s^2 and the largest key of a row. ALIGNED: the columns are a multiple of 64."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    power = tl.zeros([LANES], tl.float64)
    largest = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, columns, LANES, loop_unroll_factor=4):
        key = row_keys(row, norms, start + lane, columns, KIND, NORMS, ALIGNED)
        score = scaled(unscaled(key, KIND, NORMS), KIND, NORMS)
        total += score
        power += score * score
        largest = tl.maximum(largest, key)
    total_sum, power_sum = fold(total, power)
    return total_sum, power_sum, tl.max(largest, 0)


@triton.jit
def number_of(total, power, size):
    """N_eff, as `Moments.number`. Halves round another way here, but then no integer is near."""
    number = tl.where(total == 0.0, size, total * total / tl.where(total == 0.0, 1.0, power))
    nearest = tl.floor(number + 0.5)
    number = tl.where(tl.abs(number - nearest) <= nearest * _TOLERANCE, nearest, number)
    return tl.minimum(tl.maximum(number, 1.0), size)


@triton.jit
def kept_count(number, total, size):
    """clip(floor(number), 1, N), as `keep_counts`; N for a row of zeros."""
    count = tl.minimum(tl.maximum(tl.floor(number * _ABOVE_ONE), 1.0), size)
    return tl.where(total == 0.0, size, count).to(tl.int32)
