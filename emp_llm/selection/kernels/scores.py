"""The first round of the row kernel for CPUs, compiled by numba: scores and their sums, in the reference's bits.

Scores and their squares are added up in the order that `selection.sums` defines (64 lanes, then halves). Nothing may be
reordered by the compiler: no fastmath. (Squares of 32-bit floats are exact in float64, so contraction could change nothing.)

numba's cache looks at the file of a function alone: after a change here or in `lanes`, delete this folder's __pycache__, or
what had been inlined elsewhere stays as it was.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from emp_llm.selection.kernels.lanes import add_scores
from emp_llm.selection.sums import LANES

Array = np.ndarray[Any, Any]


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


@njit(nogil=True, cache=True)
def value16(bits: Any, shift: Any, scale: Any) -> Any:
    """|w| as float32 of the bits of a 16-bit weight: shift 16, scale 1 for bfloat16; 13 and 2^112 for float16, exactly."""
    return float_of(np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << shift)) * scale


@njit(nogil=True, cache=True)
def fold(lanes: Array) -> Any:
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] = lanes[j] + lanes[j + half]
        half //= 2
    return lanes[0]


@njit(nogil=True, cache=True)
def keys32(row: Array, norms: Array, shift: Any, scale: Any, keys: Array) -> None:
    """Keys of |w| * norm (or |w| of 32-bit weights, where there are no norms): the bits of the float32 scores."""
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


@njit(nogil=True, cache=True)
def sums(weights: Array, norms: Array, shift: Any, scale: Any, total: Array, power: Array) -> None:
    """sum s and sum s^2 of each row, as `sum_rows` adds them; NaN in `total` where a weight is NaN or infinite.

    Args:
        weights: bits, uint16 or uint32, shape (rows, columns).
        norms: float32, shape (columns,), or empty for magnitude.
        total, power: float64, shape (rows,): filled.
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


@njit(nogil=True, cache=True)
def _infinite16(row: Array) -> Any:
    """Whether float16 weights hold infinity or NaN, which look finite to `value16`; bfloat16 ones come out as such."""
    largest = np.uint16(0)
    for j in range(row.size):
        largest = max(largest, np.uint16(row[j] & np.uint16(0x7FFF)))
    return largest >= np.uint16(0x7C00)
