"""Helpers to write LLVM IR: vectors, loops, and the words of weights as floating-point numbers."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
WORD_BITS = {"BF16": 16, "F16": 16, "F32": 32}
_BFLOAT_ROUNDING = 0x7FFF


def vector(element: Any, lanes: int) -> Any:
    """The type of a vector."""
    return ir.VectorType(element, lanes)


def number(value: int) -> Any:
    """A constant of 64 bits."""
    return ir.Constant(I64, value)


def splat(element: Any, lanes: int, value: int) -> Any:
    """A constant vector of equal elements."""
    return ir.Constant(vector(element, lanes), [value] * lanes)


def zeros(kind: Any) -> Any:
    """The zero of a type."""
    return ir.Constant(kind, None)


def intrinsic(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Call an intrinsic of LLVM, declared at its first use."""
    module = builder.module
    if name not in module.globals:
        ir.Function(module, ir.FunctionType(result, [argument.type for argument in arguments]), name)
    return builder.call(module.globals[name], arguments)


def fetch(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    """The vector or number of a type at `base[index]`, where the index counts elements; the address need not be aligned."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    place = builder.gep(builder.bitcast(base, element.as_pointer()), [index])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, base: Any, index: Any) -> None:
    """Store a vector or number at `base[index]`, as in `fetch`."""
    element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
    place = builder.gep(builder.bitcast(base, element.as_pointer()), [index])
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)


def ask_for(builder: Any, base: Any, index: Any, element: Any) -> None:
    """Ask for the cache line of `base[index]`. An address outside the array does no harm."""
    place = builder.gep(builder.bitcast(base, element.as_pointer()), [index])
    flags = [ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)]  # read, keep in all caches, data
    intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.bitcast(place, I8.as_pointer()), *flags])


def loop(
    builder: Any,
    proceed: Callable[[Any, list[Any]], Any],
    initial: Sequence[Any],
    body: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """`while proceed(values): values = body(values)`; the builder continues after it.

    Returns:
        The last values.
    """
    before, head = builder.block, builder.append_basic_block("head")
    inside, after = builder.append_basic_block("body"), builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    values = [builder.phi(value.type) for value in initial]
    for phi, value in zip(values, initial, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(proceed(builder, values), inside, after)
    builder.position_at_end(inside)
    following = body(builder, values)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def count(
    builder: Any,
    first: Any,
    last: Any,
    step: int,
    initial: Sequence[Any],
    body: Callable[[Any, Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """`for i in range(first, last, step): values = body(i, values)`; `last - first` must be a multiple of `step`.

    Returns:
        The last values, without i.
    """

    def proceed(b: Any, values: list[Any]) -> Any:
        return b.icmp_signed("<", values[0], last)

    def each(b: Any, values: list[Any]) -> Sequence[Any]:
        return [*_after(b, values[0], step, body(b, values[0], values[1:]))]

    return loop(builder, proceed, [first, *initial], each)[1:]


def _after(builder: Any, index: Any, step: int, values: Sequence[Any]) -> list[Any]:
    return [builder.add(index, number(step)), *values]


def floats(builder: Any, words: Any, dtype: str) -> Any:
    """The float32 numbers of words that were extended with zeros to 32 bits: a vector or one number."""
    lanes = words.type.count if isinstance(words.type, ir.VectorType) else 0
    single, half, narrow = (vector(kind, lanes) if lanes else kind for kind in (FLOAT, HALF, I16))
    if dtype == "BF16":
        shift = splat(I32, lanes, 16) if lanes else ir.Constant(I32, 16)
        return builder.bitcast(builder.shl(words, shift), single)
    if dtype == "F16":
        return builder.fpext(builder.bitcast(builder.trunc(words, narrow), half), single)
    return builder.bitcast(words, single)


def rounded(builder: Any, value: Any, dtype: str) -> Any:
    """A float32 rounded to a dtype, as the type that is stored; halfway cases to even, NaN stays NaN."""
    if dtype == "F32":
        return value
    if dtype == "F16":
        return builder.fptrunc(value, HALF)
    bits = builder.bitcast(value, I32)
    sixteen = ir.Constant(I32, 16)
    odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(I32, 1))
    raised = builder.add(bits, builder.add(odd, ir.Constant(I32, _BFLOAT_ROUNDING)))
    quiet = builder.or_(bits, ir.Constant(I32, 1 << 22))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, raised)
    return builder.trunc(builder.lshr(chosen, sixteen), I16)
