"""Packed rows written densely, in LLVM IR: as words, or as float32 numbers for a matrix product."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from emp_llm.runtime.kernels import WORD_COLUMNS
from emp_llm.runtime.kernels.instructions import Instructions
from emp_llm.runtime.kernels.ir_tools import FLOAT, I16, I32, count, floats, number, store, vector, zeros
from emp_llm.runtime.kernels.row_loops import RowLoops


class DenseRows(RowLoops):
    """Writes rows densely, with all columns of their mask words: results[row - base, column], shape (rows, results_stride).

    Args:
        dtype, how: as for `RowLoops`.
        as_floats: float32 numbers; otherwise the words of the weights.
    """

    def __init__(self, dtype: str, how: Instructions | None, as_floats: bool) -> None:
        super().__init__(dtype, how)
        self.as_floats = as_floats or dtype == "F32"

    def fast(self, builder: Any, first: Any, last: Any) -> None:
        """A vector at a time."""
        self.each(builder, first, last, 1, self._spread)

    def _spread(self, builder: Any, row: Any) -> None:
        how, start = self.how, self._start(builder, row)
        assert how is not None

        def word(b: Any, at: Any, bits: list[Any], places: list[Any], _: list[Any]) -> Sequence[Any]:
            for chunk in range(WORD_COLUMNS // how.chunk):
                column = b.add(b.mul(at, number(WORD_COLUMNS)), number(chunk * how.chunk))
                columns = self._columns(b, *self.chunk(b, bits[0], places[0], chunk))
                store(b, columns, self.task["results"], b.add(start, column))
            return []

        self.mask_words(builder, [row], [], word)

    def _columns(self, builder: Any, values: Any, at: Any, bits: Any) -> Any:
        """The columns of a chunk as they are stored, in their order."""
        how = self.how
        assert how is not None
        if self.as_floats:
            parts = how.floats(builder, values, at, bits, self.dtype)
            if not how.paired:
                return parts[0]
            order = [part * how.lanes + lane for lane in range(how.lanes) for part in (0, 1)]  # even and odd in turn
            return builder.shuffle_vector(*parts, ir.Constant(vector(I32, how.chunk), order))
        words = how.words(builder, values, at, bits, self.dtype)
        if how.paired:
            return builder.bitcast(words, vector(I16, how.chunk))
        return builder.trunc(words, vector(I16, how.lanes))

    def plain(self, builder: Any, row: Any) -> None:
        """Zeros, then one word at a time."""
        start = self._start(builder, row)
        kind: Any = FLOAT if self.as_floats else self.word

        def clear(b: Any, column: Any, _: list[Any]) -> Sequence[Any]:
            store(b, zeros(vector(kind, 8)), self.task["results"], b.add(start, column))
            return []

        count(builder, number(0), builder.mul(self.task["words"], number(WORD_COLUMNS)), 8, [], clear)

        def put(b: Any, column: Any, word: Any, _: list[Any]) -> Sequence[Any]:
            value = floats(b, word, self.dtype) if self.as_floats else b.trunc(word, self.word)
            store(b, value, self.task["results"], b.add(start, column))
            return []

        self.set_bits(builder, row, [], put)

    def _start(self, builder: Any, row: Any) -> Any:
        return builder.mul(builder.sub(row, self.task["base"]), self.task["results_stride"])
