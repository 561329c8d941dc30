"""Products of packed rows with activations on the CPU: by the compiled loops, or by torch where these cannot be compiled."""

import ctypes
import logging
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from emp_llm.runtime.kernels import WORD_COLUMNS
from emp_llm.runtime.packed_rows import PackedRows
from emp_llm.selection.available_kernels import has_numba

logger = logging.getLogger(__name__)
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
        from emp_llm.runtime.kernels import cpu

        self._rows, self._dtype = rows, NAMES[rows.values.dtype]
        self._how = cpu.instructions_for(self._dtype, most)
        offsets = rows.offsets.numpy()
        parts = max(1, min(rows.rows, rows.rows * rows.columns // _PART))
        # Equal numbers of bytes: values, and the mask.
        ends = offsets[1:] * rows.values.element_size() + np.arange(1, rows.rows + 1) * rows.mask.shape[1]
        cuts = np.searchsorted(ends, np.linspace(0, ends[-1] if ends.size else 0, parts + 1)[1:-1])
        self._bounds = np.concatenate([[0], cuts, [rows.rows]]).astype(np.int64)
        self._safe = int(np.searchsorted(offsets[1:], rows.values.numel() - cpu.LONGEST_LOAD, side="right"))
        self._own = (rows.values.data_ptr(), rows.mask.data_ptr(), rows.offsets.data_ptr(), rows.words, self._safe)

    def __call__(self, x: Tensor) -> Tensor:
        """x @ W.T for x of shape (tokens, inputs), in float32 sums, rounded to the dtype of x; shape (tokens, outputs)."""
        if x.shape[0] > _FEW:
            return self._by_tiles(x)
        inputs, result = self._inputs(x), torch.empty(x.shape[0], self._rows.rows, dtype=x.dtype)
        from emp_llm.runtime.kernels import cpu

        for first in range(0, x.shape[0], cpu.MOST_VECTORS):
            part, target = inputs[first : first + cpu.MOST_VECTORS], result[first : first + cpu.MOST_VECTORS]
            function = cpu.products(self._dtype, self._how, part.shape[0], NAMES[x.dtype])
            self._run(function, self._bounds, part, target)
        return result

    def _inputs(self, x: Tensor) -> Tensor:
        """The inputs in float32 and in the kernel's order, with zeros up to whole mask words; shape (tokens, padded)."""
        padded = self._rows.words * WORD_COLUMNS
        if padded != x.shape[1]:
            x = functional.pad(x, (0, padded - x.shape[1]))
        if self._how is None or not self._how.paired:
            return x.to(torch.float32).contiguous()
        ordered = torch.empty(x.shape[0], padded // self._how.chunk, 2, self._how.lanes)
        ordered.copy_(x.reshape(x.shape[0], padded // self._how.chunk, self._how.lanes, 2).transpose(2, 3))
        return ordered.view(x.shape[0], padded)

    def _by_tiles(self, x: Tensor) -> Tensor:
        """As `__call__`, by dense rows that stay in the cache and matrix products of torch."""
        from emp_llm.runtime.kernels import cpu

        fast_bfloat = x.dtype == self._rows.values.dtype == torch.bfloat16 and multiplies_bfloat16()
        dtype = torch.bfloat16 if fast_bfloat else torch.float32
        inputs = x.to(dtype).T
        padded, rows = self._rows.words * WORD_COLUMNS, self._rows.rows
        height = max(16, min(rows, _TILE // padded))
        tile = torch.empty(height, padded, dtype=dtype)
        function = cpu.dense_rows(self._dtype, self._how, not fast_bfloat)
        result = torch.empty(rows, x.shape[0], dtype=dtype)
        for first in range(0, rows, height):
            last = min(first + height, rows)
            bounds = np.linspace(first, last, min(last - first, 4 * torch.get_num_threads()) + 1).astype(np.int64)
            self._run(function, bounds, None, tile, first)
            torch.mm(tile[: last - first, : x.shape[1]], inputs, out=result[first:last])
        return torch.empty(x.shape[0], rows, dtype=x.dtype).copy_(result.T)

    def _run(self, function: int, bounds: np.ndarray, inputs: Tensor | None, target: Tensor, base: int = 0) -> None:
        from emp_llm.runtime.kernels import cpu
        from emp_llm.runtime.kernels.threads import run_on_threads

        source = (0, 0) if inputs is None else (inputs.data_ptr(), inputs.stride(0))
        parts = bounds.size - 1
        task = cpu.KernelTask(0, parts, bounds.ctypes.data, *self._own, *source, target.data_ptr(), target.stride(0), base)
        run_on_threads(function, ctypes.addressof(task), min(parts, torch.get_num_threads()))


class TorchProducts:
    """Multiplies packed rows by torch alone: rows are made dense a part at a time. Slow; for any device.

    Args:
        rows: on the device of the activations.
    """

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """As `CpuProducts`."""
        rows, offsets = self._rows, self._rows.offsets.tolist()
        bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=rows.mask.device)
        height = max(1, _TILE // (rows.words * WORD_COLUMNS))
        parts = []
        for first in range(0, rows.rows, height):
            mask = rows.mask[first : first + height]
            stored = (mask[:, :, None] & bits).ne(0).view(mask.shape[0], -1)[:, : rows.columns]
            tile = torch.zeros(stored.shape, dtype=torch.float32, device=mask.device)
            values = rows.values[offsets[first] : offsets[first + mask.shape[0]]]
            tile.masked_scatter_(stored, values.float())
            parts.append(x.float() @ tile.T)
        return torch.cat(parts, dim=1).to(x.dtype)


@cache
def compiles() -> bool:
    """Whether the loops can be compiled here; says once if not."""
    if has_numba():
        return True
    logger.warning(
        "warning: numba is not installed, so sparse layers run by torch alone, slowly. Install it: pip install numba"
    )
    return False


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices by instructions of its own."""
    from emp_llm.runtime.kernels.cpu import processor_features

    return bool(processor_features() & {"avx512bf16", "amx-bf16", "bf16"})
