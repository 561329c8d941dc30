"""Products of packed rows with activations on the CPU, by compiled loops."""

import ctypes
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from emp_llm.runtime.kernels import WORD_COLUMNS, cpu
from emp_llm.runtime.kernels.threads import run_on_threads
from emp_llm.runtime.packed_rows import PackedRows

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_PART = 1 << 16  # weights in a part of the work
_TILE = 1 << 19  # float32 numbers of rows that are dense at a time
_FEW = 32  # vectors up to which rows are not made dense


class CpuProducts:
    """Multiplies packed rows on the CPU.

    Args:
        rows: on the CPU; kept as long as this object.
        most: as for `kernels.cpu.instructions_for`; for tests.
    """

    def __init__(self, rows: PackedRows, most: str | None = None) -> None:
        self._rows, self._dtype = rows, NAMES[rows.values.dtype]
        self._how = cpu.instructions_for(self._dtype, most)
        self._padded = rows.words * WORD_COLUMNS
        offsets = rows.offsets.numpy()
        parts = max(1, min(rows.rows, rows.rows * rows.columns // _PART))
        # Equal numbers of bytes: values, and the mask.
        ends = offsets[1:] * rows.values.element_size() + np.arange(1, rows.rows + 1) * rows.mask.shape[1]
        cuts = np.searchsorted(ends, np.linspace(0, ends[-1] if ends.size else 0, parts + 1)[1:-1])
        self._bounds = np.concatenate([[0], cuts, [rows.rows]]).astype(np.int64)
        safe = int(np.searchsorted(offsets[1:], rows.values.numel() - cpu.LONGEST_LOAD, side="right"))
        self._own = (rows.values.data_ptr(), rows.mask.data_ptr(), rows.offsets.data_ptr(), rows.words, safe)
        self._whole = (parts, self._bounds.ctypes.data)
        self._functions: dict[tuple[int, torch.dtype], int] = {}

    @property
    def instructions(self) -> str | None:
        """The name of the instructions in use; None: plain loops."""
        return None if self._how is None else self._how.name

    def __call__(self, x: Tensor) -> Tensor:
        """x @ W.T for x of shape (tokens, inputs), in float32 sums, rounded to the dtype of x; shape (tokens, outputs)."""
        if x.dtype not in NAMES:
            return self(x.float()).to(x.dtype)
        if x.shape[0] > _FEW:
            return self._by_tiles(x)
        inputs, result = self._inputs(x), torch.empty(x.shape[0], self._rows.rows, dtype=x.dtype)
        for first in range(0, x.shape[0], cpu.MOST_VECTORS):
            vectors = min(cpu.MOST_VECTORS, x.shape[0] - first)
            source, target = (inputs, result) if vectors == x.shape[0] else (inputs[first:], result[first:])
            self._run(self._product(vectors, x.dtype), self._whole, (source.data_ptr(), self._padded), target)
        return result

    def _product(self, vectors: int, dtype: torch.dtype) -> int:
        if (vectors, dtype) not in self._functions:
            self._functions[vectors, dtype] = cpu.products(self._dtype, self._how, vectors, NAMES[dtype])
        return self._functions[vectors, dtype]

    def _inputs(self, x: Tensor) -> Tensor:
        """The inputs in float32 and in the kernel's order, with zeros up to whole mask words; shape (tokens, padded)."""
        if self._padded != x.shape[1]:
            x = functional.pad(x, (0, self._padded - x.shape[1]))
        if self._how is None or not self._how.paired:
            return x.to(torch.float32).contiguous()
        ordered = torch.empty(x.shape[0], self._padded // self._how.chunk, 2, self._how.lanes)
        ordered.copy_(x.reshape(x.shape[0], self._padded // self._how.chunk, self._how.lanes, 2).transpose(2, 3))
        return ordered.view(x.shape[0], self._padded)

    def _by_tiles(self, x: Tensor) -> Tensor:
        """As `__call__`, by dense rows that stay in the cache and matrix products of torch."""
        fast_bfloat = x.dtype == self._rows.values.dtype == torch.bfloat16 and multiplies_bfloat16()
        dtype = torch.bfloat16 if fast_bfloat else torch.float32
        inputs, rows = x.to(dtype).T, self._rows.rows
        height = max(16, min(rows, _TILE // max(1, self._padded)))
        tile = torch.empty(height, self._padded, dtype=dtype)
        function = cpu.dense_rows(self._dtype, self._how, not fast_bfloat)
        result = torch.empty(rows, x.shape[0], dtype=dtype)
        for first in range(0, rows, height):
            last = min(first + height, rows)
            bounds = np.linspace(first, last, min(last - first, 4 * torch.get_num_threads()) + 1).astype(np.int64)
            self._run(function, (bounds.size - 1, bounds.ctypes.data), (0, 0), tile, first)
            torch.mm(tile[: last - first, : x.shape[1]], inputs, out=result[first:last])
        return torch.empty(x.shape[0], rows, dtype=x.dtype).copy_(result.T)

    def _run(self, function: int, parts: tuple[int, int], source: tuple[int, int], target: Tensor, base: int = 0) -> None:
        task = cpu.KernelTask(0, *parts, *self._own, *source, target.data_ptr(), target.stride(0), base)
        run_on_threads(function, ctypes.addressof(task), min(parts[0], torch.get_num_threads()))


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices by instructions of its own."""
    return bool(cpu.processor_features() & {"avx512bf16", "amx-bf16", "bf16"})
