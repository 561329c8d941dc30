"""How a processor puts the values of a row back to their columns: by AVX-512 with VBMI2, AVX-512 or AVX2.

A mask word has the bits of 64 columns. Instructions take it in chunks: they load as many values as a chunk may hold,
spread them over the lanes whose bits are set, and leave zero in the others. Loads may reach past the values of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from emp_llm.runtime.kernels.ir_tools import (
    I1,
    I8,
    I16,
    I32,
    I64,
    WORD_BITS,
    fetch,
    floats,
    intrinsic,
    number,
    splat,
    vector,
    zeros,
)

LONGEST_LOAD = 32  # values that one load reads


@dataclass(frozen=True)
class Instructions:
    """One set of instructions.

    Attributes:
        name: of the set.
        features: names in LLVM of what a processor needs for it.
        lanes: float32 numbers in a vector.
        chunk: columns that are spread at once: `lanes`, or twice as many.
        dtypes: of weights that it supports.
        words: (builder, address of the values, position, bits from the chunk on, dtype) -> the words of a chunk's columns, in a
            vector of 32 bits for each column, or for each pair of columns.
    """

    name: str
    features: tuple[str, ...]
    lanes: int
    chunk: int
    dtypes: tuple[str, ...]
    words: Callable[[Any, Any, Any, Any, str], Any]

    @property
    def paired(self) -> bool:
        """Whether words come in pairs, each in 32 bits."""
        return self.chunk > self.lanes

    def floats(self, builder: Any, values: Any, at: Any, bits: Any, dtype: str) -> list[Any]:
        """As `words`, in vectors of float32; of pairs, the even columns in one and the odd ones in another."""
        words = self.words(builder, values, at, bits, dtype)
        if not self.paired:
            return [floats(builder, words, dtype)]
        kind = vector(ir.FloatType(), self.lanes)
        even, odd = builder.shl(words, splat(I32, self.lanes, 16)), builder.and_(words, splat(I32, self.lanes, 0xFFFF0000))
        return [builder.bitcast(even, kind), builder.bitcast(odd, kind)]


def _chunk_bits(builder: Any, bits: Any, lanes: int) -> Any:
    return builder.bitcast(builder.trunc(bits, ir.IntType(lanes)), vector(I1, lanes))


def _values(builder: Any, values: Any, at: Any, lanes: int, dtype: str) -> Any:
    """The next values, extended with zeros to 32 bits."""
    element = ir.IntType(WORD_BITS[dtype])
    words = fetch(builder, values, at, vector(element, lanes))
    return words if WORD_BITS[dtype] == 32 else builder.zext(words, vector(I32, lanes))


def _expand(builder: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """By vpexpandd."""
    words = _values(builder, values, at, 16, dtype)
    arguments = [words, zeros(words.type), _chunk_bits(builder, bits, 16)]
    return intrinsic(builder, "llvm.x86.avx512.mask.expand.v16i32", words.type, arguments)


def _expand_pairs(builder: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """By vpexpandw: 32 words of 16 bits, two in each lane of 32 bits."""
    words = fetch(builder, values, at, vector(I16, 32))
    arguments = [words, zeros(words.type), _chunk_bits(builder, bits, 32)]
    spread = intrinsic(builder, "llvm.x86.avx512.mask.expand.v32i16", words.type, arguments)
    return builder.bitcast(spread, vector(I32, 16))


def _permute(builder: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """By vpermd, with the places of the values from a table for the 256 masks of eight columns."""
    words, lanes = _values(builder, values, at, 8, dtype), vector(I32, 8)
    byte = builder.and_(bits, number(255))
    places = builder.zext(fetch(builder, _table(builder.module), builder.mul(byte, number(8)), vector(I8, 8)), lanes)
    moved = intrinsic(builder, "llvm.x86.avx2.permd", lanes, [words, places])
    single = builder.insert_element(ir.Constant(lanes, ir.Undefined), builder.trunc(byte, I32), ir.Constant(I32, 0))
    everywhere = builder.shuffle_vector(single, ir.Constant(lanes, ir.Undefined), zeros(lanes))
    own = builder.and_(everywhere, ir.Constant(lanes, [1 << lane for lane in range(8)]))
    return builder.select(builder.icmp_unsigned("!=", own, zeros(lanes)), moved, zeros(lanes))


def _table(module: Any) -> Any:
    """For each mask of eight bits, and each bit of it: the number of set bits below."""
    if "places" not in module.globals:
        table = [(mask & ((1 << bit) - 1)).bit_count() for mask in range(256) for bit in range(8)]
        kind = ir.ArrayType(I8, len(table))
        places = ir.GlobalVariable(module, kind, "places")
        places.linkage, places.global_constant, places.initializer = "internal", True, ir.Constant(kind, table)
    return module.globals["places"]


_ALL = ("BF16", "F16", "F32")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "bmi", "popcnt")
# The fastest first.
INSTRUCTIONS = (
    Instructions("avx512vbmi2", (*_AVX512, "avx512vbmi2"), 16, 32, ("BF16",), _expand_pairs),
    Instructions("avx512", _AVX512, 16, 16, _ALL, _expand),
    Instructions("avx2", ("avx2", "fma", "f16c", "bmi", "popcnt"), 8, 8, _ALL, _permute),
)


def ones(builder: Any, bits: Any) -> Any:
    """The number of set bits of a mask word."""
    return intrinsic(builder, "llvm.ctpop.i64", I64, [bits])
