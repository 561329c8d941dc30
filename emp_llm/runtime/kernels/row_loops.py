"""What the loops of the CPU kernel share, in LLVM IR: tasks in parts, the walk over the set bits of a row, chunks of columns.

A task is an array of numbers of 64 bits, in the order of `TASK`. Threads call the same function with the same task; each takes
the next part of the rows until none is left, so a delayed thread takes fewer. A row is always computed in the same order, so
results do not depend on the number of threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from emp_llm.runtime.kernels import WORD_COLUMNS
from emp_llm.runtime.kernels.instructions import Instructions, ones
from emp_llm.runtime.kernels.ir_tools import (
    FLOAT,
    I1,
    I8,
    I32,
    I64,
    WORD_BITS,
    ask_for,
    count,
    fetch,
    intrinsic,
    loop,
    number,
)

# next: the number of the next part, which threads raise; parts: their number; bounds: address of the first row of each part
# and the end of the last; values, mask: addresses; offsets: address of the position of each row's first value; words: mask
# words of a row; safe: rows before this one are followed by enough values for the widest load; inputs, results: addresses,
# and numbers from one row of each to the next; base: the row that is the first of the results.
TASK = (
    "next",
    "parts",
    "bounds",
    "values",
    "mask",
    "offsets",
    "words",
    "safe",
    "inputs",
    "inputs_stride",
    "results",
    "results_stride",
    "base",
)
_AHEAD = 4096  # bytes of values to ask for in advance


class RowLoops(ABC):
    """Writes a function "run" that does one thing with each row.

    Args:
        dtype: of the weights: "BF16", "F16" or "F32".
        how: the instructions of the processor; None: plain loops over the set bits.
    """

    def __init__(self, dtype: str, how: Instructions | None) -> None:
        self.dtype, self.how = dtype, how
        self.word = ir.IntType(WORD_BITS[dtype])
        self.task: dict[str, Any] = {}

    @abstractmethod
    def fast(self, builder: Any, first: Any, last: Any) -> None:
        """Do the rows first to last - 1 by the instructions; loads may reach past their values."""

    @abstractmethod
    def plain(self, builder: Any, row: Any) -> None:
        """Do one row, a set bit at a time."""

    def module(self) -> ir.Module:
        """The module of the function. Each call takes parts of its task until none is left."""
        module = ir.Module("rows")
        run = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), "run")
        builder = ir.IRBuilder(run.append_basic_block("entry"))
        addresses = {"bounds": I64, "values": self.word, "mask": I64, "offsets": I64, "inputs": FLOAT, "results": I8}
        for place, name in enumerate(TASK):
            value = builder.load(builder.gep(run.args[0], [number(place)]))
            kind = addresses.get(name)
            self.task[name] = value if kind is None else builder.inttoptr(value, kind.as_pointer())

        def take(b: Any) -> Any:
            return b.atomic_rmw("add", run.args[0], number(1), "monotonic")

        def part(b: Any, values: list[Any]) -> Sequence[Any]:
            first, end = (fetch(b, self.task["bounds"], b.add(values[0], number(more)), I64) for more in (0, 1))
            self._rows(b, first, end)
            return [take(b)]

        loop(builder, lambda b, values: b.icmp_signed("<", values[0], self.task["parts"]), [take(builder)], part)
        builder.ret_void()
        return module

    def _rows(self, builder: Any, first: Any, last: Any) -> None:
        middle = first
        if self.how is not None:
            safe = self.task["safe"]
            end = builder.select(builder.icmp_signed("<", safe, last), safe, last)
            middle = builder.select(builder.icmp_signed("<", end, first), first, end)
            self.fast(builder, first, middle)
        self.each(builder, middle, last, 1, self.plain)

    @staticmethod
    def each(builder: Any, first: Any, last: Any, step: int, work: Callable[[Any, Any], None]) -> None:
        """`work(builder, row)` for every `step`-th row."""

        def body(b: Any, row: Any, _: list[Any]) -> Sequence[Any]:
            work(b, row)
            return []

        count(builder, first, last, step, [], body)

    def mask_words(
        self,
        builder: Any,
        rows: Sequence[Any],
        initial: Sequence[Any],
        body: Callable[[Any, Any, list[Any], list[Any], list[Any]], Sequence[Any]],
    ) -> list[Any]:
        """Walk some rows together: `values = body(builder, at, bits, places, values)` for each place `at` of a mask word.

        `bits` and `places` hold, for each row, its mask word there and the position of the first value of that word.
        """
        starts = [fetch(builder, self.task["offsets"], row, I64) for row in rows]
        masks = [builder.mul(row, self.task["words"]) for row in rows]

        def word(b: Any, at: Any, values: list[Any]) -> Sequence[Any]:
            places, carried = values[: len(rows)], values[len(rows) :]
            bits = [fetch(b, self.task["mask"], b.add(mask, at), I64) for mask in masks]
            for place in places:
                ask_for(b, self.task["values"], b.add(place, number(_AHEAD * 8 // WORD_BITS[self.dtype])), self.word)
            following = body(b, at, bits, places, carried)
            return [*(b.add(place, ones(b, mask)) for place, mask in zip(places, bits, strict=True)), *following]

        return count(builder, number(0), self.task["words"], 1, [*starts, *initial], word)[len(rows) :]

    def chunk(self, builder: Any, bits: Any, place: Any, chunk: int) -> tuple[Any, Any, Any]:
        """Address of the values, position of a chunk's first value, and the bits from the chunk on, for a mask word."""
        assert self.how is not None
        first = chunk * self.how.chunk
        below = ones(builder, builder.and_(bits, number((1 << first) - 1)))
        return self.task["values"], builder.add(place, below), builder.lshr(bits, number(first))

    def set_bits(
        self, builder: Any, row: Any, initial: Sequence[Any], body: Callable[[Any, Any, Any, list[Any]], Sequence[Any]]
    ) -> list[Any]:
        """`values = body(builder, column, word, values)` for each set bit of a row; `word` is its value in 32 bits."""

        def one_word(b: Any, at: Any, bits: list[Any], places: list[Any], values: list[Any]) -> Sequence[Any]:
            first = b.mul(at, number(WORD_COLUMNS))

            def bit(inner: Any, state: list[Any]) -> Sequence[Any]:
                left, place, *carried = state
                low = intrinsic(inner, "llvm.cttz.i64", I64, [left, ir.Constant(I1, 1)])
                word = fetch(inner, self.task["values"], place, self.word)
                word = word if self.word.width == 32 else inner.zext(word, I32)
                following = body(inner, inner.add(first, low), word, carried)
                return [inner.and_(left, inner.sub(left, number(1))), inner.add(place, number(1)), *following]

            state = [bits[0], places[0], *values]
            return loop(b, lambda i, now: i.icmp_unsigned("!=", now[0], number(0)), state, bit)[2:]

        return self.mask_words(builder, [row], initial, one_word)
