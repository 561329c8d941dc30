"""The row kernel for CUDA, in Triton: scores, their keys and their sums, and how many of a row are kept.

A score becomes an integer key that orders as it does (the bits of a non-negative float). Sums are added up in the order that
`selection.sums` defines: a vector of 64 lanes goes along the row, then it is folded in halves.

Why the bits are those of the reference although a compiler may contract a * b + c: every product that something is added to is
exact in float64: score * score (48 bits), ties * score (24 bits, and as many as the ties need), score * power of two. All other
operations are single IEEE ones, division included (div.rn.f64), and float32 products keep subnormals (mul.f32, no .ftz).
"""

import triton
import triton.language as tl

from emp_llm.selection import sums as order
from emp_llm.selection.hill import RELATIVE_TOLERANCE

LANES = tl.constexpr(order.LANES)
_TOLERANCE = tl.constexpr(RELATIVE_TOLERANCE)
_ABOVE_ONE = tl.constexpr(1 + RELATIVE_TOLERANCE)
# What is between a float64 and the float32 (or float16) whose bits it holds in its upper part: the exponents' biases.
_SCALE32, _UNSCALE32 = tl.constexpr(2.0**896), tl.constexpr(2.0**-896)
_SCALE16, _UNSCALE16 = tl.constexpr(2.0**1008), tl.constexpr(2.0**-1008)


@triton.jit
def row_bits(row, at, columns, EVEN: tl.constexpr = False):
    """The bits of the weights at some columns, as int32; 0 behind the end of the row, where EVEN says that none are."""
    if EVEN:
        bits = tl.load(row + at)
    else:
        bits = tl.load(row + at, mask=at < columns, other=0)
    return bits.to(tl.int32)


@triton.jit
def magnitude_bits(bits, KIND: tl.constexpr):
    """All bits of weights but the sign."""
    if KIND == "float32":
        bits = bits & 0x7FFFFFFF
    else:
        bits = bits & 0x7FFF
    return bits


@triton.jit
def keys_of(bits, norms, at, columns, KIND: tl.constexpr, NORMS: tl.constexpr, EVEN: tl.constexpr = False):
    """The keys of the scores of some columns' weights: the bits of |w|, or of |w| * norm in float32."""
    key = magnitude_bits(bits, KIND)
    if NORMS:
        if KIND == "bfloat16":
            value = (key << 16).to(tl.float32, bitcast=True)
        elif KIND == "float16":
            value = key.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            value = key.to(tl.float32, bitcast=True)
        if EVEN:
            norm = tl.load(norms + at)
        else:
            norm = tl.load(norms + at, mask=at < columns, other=0.0)
        key = (value * norm).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return key


@triton.jit
def row_keys(row, norms, at, columns, KIND: tl.constexpr, NORMS: tl.constexpr, EVEN: tl.constexpr = False):
    """The keys at some columns; 0 behind the end of the row, where EVEN says that none are."""
    return keys_of(row_bits(row, at, columns, EVEN), norms, at, columns, KIND, NORMS, EVEN)


@triton.jit
def is_less(keys, least):
    """-1 where keys are less, else 0, by arithmetic: comparisons that are added up become bit masks, at twice the cost."""
    return (keys - least) >> 31


@triton.jit
def unscaled(key, KIND: tl.constexpr, NORMS: tl.constexpr):
    """The scores as float64, but for a power of two: their bits, moved to where float64 has exponent and fraction.

    Subnormal scores come out as subnormal float64 numbers, so nothing is lost. Sums of these are the sums of the scores but
    for that power: an addition rounds to the same 53 bits, and where float64 is subnormal every score is a multiple of its
    smallest number, so both are exact.
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
    if KIND == "float16" and not NORMS:
        value = value * _SCALE16
    else:
        value = value * _SCALE32
    return value


@triton.jit
def key_near(score, KIND: tl.constexpr, NORMS: tl.constexpr):
    """The key of a float64 score, rounded down: the inverse of `unscaled` and `scaled`, as int64."""
    if NORMS or KIND == "float32":
        key = (score * _UNSCALE32).to(tl.int64, bitcast=True) >> 29
    elif KIND == "bfloat16":
        key = (score * _UNSCALE32).to(tl.int64, bitcast=True) >> 45
    else:
        key = (score * _UNSCALE16).to(tl.int64, bitcast=True) >> 42
    return key


@triton.jit
def fold(first, second):
    """The sums of two vectors of 64 lanes, each in halves: a reduction of two numbers is one addition."""
    both = tl.join(first, second)
    both = tl.sum(tl.reshape(both, [2, 32, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 16, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 8, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 4, 2]), 0)
    both = tl.sum(tl.reshape(both, [2, 2, 2]), 0)
    return tl.split(tl.sum(both, 0))


@triton.jit
def sums(row, norms, columns, KIND: tl.constexpr, NORMS: tl.constexpr, EVEN: tl.constexpr):
    """sum s, sum s^2 and the largest key of a row; EVEN: the columns are a multiple of 64."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    power = tl.zeros([LANES], tl.float64)
    largest = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, columns, LANES, loop_unroll_factor=4):
        key = row_keys(row, norms, start + lane, columns, KIND, NORMS, EVEN)
        score = scaled(unscaled(key, KIND, NORMS), KIND, NORMS)
        total += score
        power += score * score
        largest = tl.maximum(largest, key)
    total_sum, power_sum = fold(total, power)
    return total_sum, power_sum, tl.max(largest, 0)


@triton.jit
def number_of(total, power, size):
    """N_eff, as `Moments.number`; where the rounding there meets a half, both neighbours are too far away to count."""
    number = tl.where(total == 0.0, size, total * total / tl.where(total == 0.0, 1.0, power))
    nearest = tl.floor(number + 0.5)
    number = tl.where(tl.abs(number - nearest) <= nearest * _TOLERANCE, nearest, number)
    return tl.minimum(tl.maximum(number, 1.0), size)


@triton.jit
def kept_count(number, total, size):
    """clip(floor(number), 1, N), as `keep_counts`; N for a row of zeros."""
    count = tl.minimum(tl.maximum(tl.floor(number * _ABOVE_ONE), 1.0), size)
    return tl.where(total == 0.0, size, count).to(tl.int32)
