"""Products of packed rows with a few vectors, written in LLVM IR. No dense row is ever written to memory."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from emp_llm.runtime.kernels import WORD_COLUMNS
from emp_llm.runtime.kernels.instructions import Instructions
from emp_llm.runtime.kernels.ir_tools import FLOAT, fetch, floats, intrinsic, number, rounded, store, vector, zeros
from emp_llm.runtime.kernels.row_loops import RowLoops

_REGISTERS = 16  # vectors of sums; the weights and the inputs need the others


class Products(RowLoops):
    """Multiplies rows with vectors, in float32: results[j, row - base] = sum over the columns of row * inputs[j].

    inputs: float32, shape (vectors, inputs_stride), zero beyond the columns; if the instructions are paired, the even
    columns of each chunk before the odd ones. results: of dtype `result`, shape (vectors, results_stride).

    Args:
        dtype, how: as for `RowLoops`.
        vectors: their number, at least 1.
        result: dtype of the results.
    """

    def __init__(self, dtype: str, how: Instructions | None, vectors: int, result: str) -> None:
        super().__init__(dtype, how)
        self.vectors, self.result = vectors, result

    def fast(self, builder: Any, first: Any, last: Any) -> None:
        """Rows that share their loads of the inputs, then the rows that are left."""
        together = max(1, min(4, _REGISTERS // self.vectors)) if self.vectors > 1 else 1
        whole = builder.sdiv(builder.sub(last, first), number(together))
        middle = builder.add(first, builder.mul(whole, number(together)))
        self.each(builder, first, middle, together, lambda b, row: self._rows_together(b, row, together))
        if together > 1:
            self.each(builder, middle, last, 1, lambda b, row: self._rows_together(b, row, 1))

    def _rows_together(self, builder: Any, row: Any, together: int) -> None:
        how, vectors = self.how, self.vectors
        assert how is not None
        kind = vector(FLOAT, how.lanes)
        many = 2 if vectors * together == 1 else 1  # two sums for one product, or each addition would wait for the last
        rows = [builder.add(row, number(i)) for i in range(together)]

        def word(b: Any, at: Any, bits: list[Any], places: list[Any], values: list[Any]) -> Sequence[Any]:
            sums, first = list(values), b.mul(at, number(WORD_COLUMNS))
            for chunk in range(WORD_COLUMNS // how.chunk):
                weights = [how.floats(b, *self.chunk(b, bits[i], places[i], chunk), self.dtype) for i in range(together)]
                for part in range(how.chunk // how.lanes):
                    column = b.add(first, number(chunk * how.chunk + part * how.lanes))
                    for j in range(vectors):
                        x = fetch(b, self.task["inputs"], self._input(b, column, j), kind)
                        for i in range(together):
                            k = (i * vectors + j) * many + (chunk + part) % many
                            sums[k] = intrinsic(b, f"llvm.fma.v{how.lanes}f32", kind, [weights[i][part], x, sums[k]])
            return sums

        sums = self.mask_words(builder, rows, [zeros(kind)] * (together * vectors * many), word)
        for i in range(together):
            for j in range(vectors):
                own = sums[(i * vectors + j) * many :][:many]
                self._finish(builder, rows[i], j, self._total(builder, own[0] if many == 1 else builder.fadd(*own)))

    def plain(self, builder: Any, row: Any) -> None:
        """One product of numbers at a time."""

        def add(b: Any, column: Any, word: Any, sums: list[Any]) -> Sequence[Any]:
            weight, place = floats(b, word, self.dtype), self._place(b, column)
            inputs = [fetch(b, self.task["inputs"], self._input(b, place, j), FLOAT) for j in range(self.vectors)]
            return [intrinsic(b, "llvm.fmuladd.f32", FLOAT, [weight, x, total]) for x, total in zip(inputs, sums, strict=True)]

        for j, total in enumerate(self.set_bits(builder, row, [zeros(FLOAT)] * self.vectors, add)):
            self._finish(builder, row, j, total)

    def _input(self, builder: Any, column: Any, vector: int) -> Any:
        return builder.add(column, builder.mul(self.task["inputs_stride"], number(vector)))

    def _place(self, builder: Any, column: Any) -> Any:
        """The place of a column among the inputs."""
        how = self.how
        if how is None or not how.paired:
            return column
        pair = builder.lshr(builder.and_(column, number(how.chunk - 1)), number(1))
        odd = builder.mul(builder.and_(column, number(1)), number(how.lanes))
        return builder.add(builder.and_(column, number(-how.chunk)), builder.add(odd, pair))

    @staticmethod
    def _total(builder: Any, lanes: Any) -> Any:
        name = f"llvm.vector.reduce.fadd.v{lanes.type.count}f32"
        module = builder.module
        if name not in module.globals:
            ir.Function(module, ir.FunctionType(FLOAT, [FLOAT, lanes.type]), name)
        return builder.call(module.globals[name], [ir.Constant(FLOAT, -0.0), lanes], fastmath=("reassoc",))

    def _finish(self, builder: Any, row: Any, vector: int, total: Any) -> None:
        at = builder.add(builder.sub(row, self.task["base"]), builder.mul(self.task["results_stride"], number(vector)))
        store(builder, rounded(builder, total, self.result), self.task["results"], at)
