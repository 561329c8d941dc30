"""First round of the row kernel for CPUs, compiled by numba: scores and their sums, with the same bits as the reference.

Scores and their squares are summed in the order that `arithmetic.sums` defines (64 lanes, then halves). The compiler must not
reorder them, so there is no fastmath. (Squares of 32-bit floats are exact in float64, so contraction cannot change a bit.)

numba's cache watches only the file of a compiled function. After a change here or in `cpu_lanes`, delete this folder's
__pycache__, or other files keep the old code that was inlined into them.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from emp_llm.selection.arithmetic.definitions import LANES
from emp_llm.selection.kernels.cpu_lanes import add_scores

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
    """|w| in float32, exactly, from the bits of a 16-bit weight; shift 16, scale 1 for bfloat16; 13, 2^112 for float16."""
    return float_of(np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << shift)) * scale


@njit(nogil=True, cache=True)
def fold(lanes: Array) -> Any:
    """The sum of 64 lanes, folded in halves, in place."""
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] = lanes[j] + lanes[j + half]
        half //= 2
    return lanes[0]


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def sums(weights: Array, norms: Array, shift: Any, scale: Any, total: Array, power: Array) -> None:
    """sum s and sum s^2 of each row, as in `sum_rows`. `total` is not finite where a score is NaN or infinite.

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


@njit(nogil=True, cache=True)
def _infinite16(row: Array) -> Any:
    """Whether float16 weights hold infinity or NaN. `value16` turns these into finite numbers, unlike those of bfloat16."""
    largest = np.uint16(0)
    for j in range(row.size):
        largest = max(largest, np.uint16(row[j] & np.uint16(0x7FFF)))
    return largest >= np.uint16(0x7C00)
