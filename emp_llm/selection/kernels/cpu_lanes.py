"""Vector loops of the row kernel for CPUs, written in LLVM's IR. numba's own loops would keep the lanes in memory.

The 64 lanes of a row (see `arithmetic.sums`) are one vector of 64 float64 numbers. LLVM splits it into vectors of the
processor's width, which stay in registers along the row. Every operation is a single IEEE operation in the order of the
definition, and no flag allows another order.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from emp_llm.selection.arithmetic.definitions import LANES

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
