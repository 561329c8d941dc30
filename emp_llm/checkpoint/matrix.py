"""Stored matrices, read and written in blocks of rows, with one output per row."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emp_llm.checkpoint.block_scales import FP8_DTYPE, BlockScales
from emp_llm.checkpoint.safetensors_header import BITS, StoredTensor
from emp_llm.checkpoint.words import WORD, Words
from emp_llm.storage.buffers import BufferPool, bytes_of
from emp_llm.storage.direct_io import FileReader, FileWriter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PRUNABLE_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class Matrix:
    """A stored matrix, seen with one output per row regardless of its layout.

    Attributes:
        stored: the tensor, of two dimensions; of three if it holds one matrix per expert.
        transposed: stored as (inputs, outputs), like GPT-2's Conv1D.
        expert: index of the matrix in a tensor of three dimensions.
        scales: of an FP8 matrix; None for others.
    """

    stored: StoredTensor
    transposed: bool = False
    expert: int | None = None
    scales: BlockScales | None = None

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def itemsize(self) -> int:
        """Bytes per weight."""
        return BITS[self.stored.dtype] // 8

    @property
    def start(self) -> int:
        """Offset of the first byte in the file."""
        return self.stored.start + (self.expert or 0) * self.numel * self.itemsize

    @property
    def end(self) -> int:
        """Offset of the byte after the last one."""
        return self.start + self.numel * self.itemsize

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return self.stored.shape[-1 if self.transposed else -2]

    @property
    def columns(self) -> int:
        """Number of inputs."""
        return self.stored.shape[-2 if self.transposed else -1]

    def row_blocks(self, block_weights: int) -> Iterator[tuple[int, int]]:
        """(first, last + 1) of consecutive blocks of rows, each of at most `block_weights` weights, or of one row."""
        step = max(1, block_weights // max(1, self.columns))
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)

    def read(self, file: FileReader, first: int, last: int, buffers: BufferPool | None = None) -> Words:
        """The bits of rows first to last - 1: unsigned integers, shape (last - first, columns), contiguous.

        Args:
            file: the shard.
            buffers: supplies the memory; the caller returns it there.
        """
        buffers = buffers or BufferPool()
        word = WORD[self.itemsize]
        shape = (self.columns, last - first) if self.transposed else (last - first, self.columns)
        block = buffers.take(shape, word, next(self._pieces(first, last), (0,))[0])
        raw = bytes_of(block)
        for offset, begin, end in self._pieces(first, last):
            file.read(raw[begin:end], offset)
        if not self.transposed:
            return block
        rows = buffers.take((last - first, self.columns), word)
        rows[:] = block.T
        buffers.give(block)
        return rows

    def write(self, file: FileWriter, first: int, block: Words) -> None:
        """Write rows, as `read` returns them, to the positions of rows first, first + 1, ..."""
        content = block.T.copy() if self.transposed else block
        raw = bytes_of(content)
        for offset, begin, end in self._pieces(first, first + block.shape[0]):
            file.write(raw[begin:end], offset)

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the file, begin, end in the block's bytes) of each contiguous piece of a block of rows."""
        size = self.itemsize
        if not self.transposed:
            width = self.columns * size
            yield self.start + first * width, 0, (last - first) * width
            return
        width = (last - first) * size
        for i in range(self.columns):
            yield self.start + (i * self.rows + first) * size, i * width, (i + 1) * width


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a prunable dtype of safetensors ("BF16"), or of FP8."""
    import torch

    if name == FP8_DTYPE:
        return torch.float8_e4m3fn
    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}[name]


def dequantised_rows(matrix: Matrix, first: int, weights: "Tensor") -> "Tensor":
    """The values of rows from `first` on, given as stored: float32 if the matrix has scales, else unchanged."""
    return weights if matrix.scales is None else matrix.scales.dequantised(first, weights)


def as_tensor(words: Words, dtype: str) -> "Tensor":
    """Words as a tensor of a prunable dtype, or of FP8, in the same memory."""
    import numpy as np
    import torch

    # Signed, because torch supports few operations on unsigned integers. The view is free.
    signed = words.view(np.dtype(f"<i{words.dtype.itemsize}"))
    return torch.from_numpy(signed).view(torch_dtype(dtype))
