"""Stored numbers as words: their bits, as unsigned integers. And stored matrices, read in chunks of
rows, one output per row.

An FP8 matrix has a scale for each block of its numbers (DeepSeek-V3, Qwen3-FP8, and FineGrainedFP8
of transformers). A weight is its 8-bit float times the scale of its block. Scales and bits are kept
when weights are removed, and zero has exact bits, so a pruned matrix stays FP8.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.files import FileReader, bytes_of
from emp_llm.checkpoint.headers import BITS, StoredTensor
from emp_llm.common.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Words = NDArray[Any]  # uint8, uint16, uint32 or uint64, little-endian
WORD: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
PRUNABLE_DTYPES = ("BF16", "F16", "F32", "F64")
FP8_DTYPE = "F8_E4M3"
_SCALE_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E8M0": "float8_e8m0fnu",
}


def word_bytes(tensor: StoredTensor) -> int:
    """Bytes per word of a tensor: those of its dtype; 1 for dtypes of less than 8 bits."""
    return max(1, BITS[tensor.dtype] // 8)


def words_in(tensor: StoredTensor) -> int:
    """Number of words in a tensor."""
    return (tensor.end - tensor.start) // word_bytes(tensor)


def mask_bytes(count: int) -> int:
    """Bytes of the bitmask of `count` words: one bit each, padded to 8 bytes."""
    return -(-count // 64) * 8


def packed_bytes(words: int, size: int, zeros: int) -> int:
    """Bytes of `words` words of `size` bytes, packed raw: bitmask and values, or all words if
    that is smaller.
    """
    return min(words * size, mask_bytes(words) + (words - zeros) * size)


def read_words(file: FileReader, tensor: StoredTensor, first: int, count: int) -> Words:
    """Words first to first + count - 1 of a tensor, from its open shard: shape (count,)."""
    size = word_bytes(tensor)
    words = np.empty(count, dtype=WORD[size])
    if count:
        file.read(words.view(np.uint8).data, tensor.start + first * size)
    return words


@dataclass(frozen=True)
class BlockScales:
    """The scales of a matrix.

    Attributes:
        stored: the tensor of the scales: one for each block, or a single one.
        rows, columns: of a block; the last blocks may be smaller.
    """

    stored: StoredTensor
    rows: int
    columns: int

    def dequantised(self, first: int, weights: "Tensor") -> "Tensor":
        """Rows of the matrix times their scales: float32, shape (rows, inputs), each product
        rounded once.

        Args:
            first: number of the first row.
            weights: the rows as stored, float8_e4m3fn, shape (rows, inputs).

        Raises:
            UserError: a scale is not finite, or below zero.
        """
        import torch

        scales = _scale_values(self.stored).to(weights.device)
        blocks = torch.arange(first, first + weights.shape[0], device=weights.device) // self.rows
        by_column = scales[blocks].repeat_interleave(self.columns, dim=1)[:, : weights.shape[1]]
        return weights.float() * by_column


def block_scales(
    weight: StoredTensor, tensors: dict[str, StoredTensor], config: dict[str, Any]
) -> BlockScales:
    """The scales of an FP8 matrix of a checkpoint.

    Args:
        weight: the matrix.
        tensors: all tensors of the checkpoint, by name.
        config: the content of its config.json.

    Raises:
        UserError: the checkpoint has no scales for the matrix, or their shape does not fit.
    """
    name = f"{weight.name}_scale_inv"
    scales = tensors.get(name)
    if scales is None:
        raise UserError(
            f"{weight.shard}: {weight.name} is stored as FP8 without its scales {name}, so its "
            "weights are unknown. Prune the original model of 16 bits and quantise the result."
        )
    settings = config.get("quantization_config")
    size = settings.get("weight_block_size") if isinstance(settings, dict) else None
    rows, columns = _block_size(weight.shape if scales.numel == 1 else size)
    fits = scales.numel == 1 or scales.shape == (
        -(-weight.shape[0] // rows),
        -(-weight.shape[1] // columns),
    )
    if not fits or scales.dtype not in _SCALE_DTYPES:
        problem = (
            f"{name} is {scales.dtype} {list(scales.shape)}, which does not fit a weight of "
            f"{list(weight.shape)}"
        )
        raise UserError(
            f"{scales.shard}: {problem} in blocks of {size} (weight_block_size in config.json). "
            "Download the model again."
        )
    return BlockScales(scales, rows, columns)


def _block_size(size: Any) -> tuple[int, int]:
    """The rows and columns of a block, from a list of two lengths; (1, 1), which fits no scales,
    for anything else.
    """
    if (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(type(length) is int and length > 0 for length in size)
    ):
        return size[0], size[1]
    return 1, 1


def _scale_values(stored: StoredTensor) -> "Tensor":
    """Scales as float32, shape (blocks of rows, blocks of columns)."""
    import torch

    dtype = getattr(torch, _SCALE_DTYPES[stored.dtype], None)
    if dtype is None:
        raise UserError(
            f"{stored.shard}: its scales are stored as {stored.dtype}, which needs "
            "torch 2.7. Update it."
        )
    with FileReader(stored.shard) as file:
        words = read_words(file, stored, 0, stored.numel)
    scales = torch.from_numpy(words).view(dtype).float()
    if not bool(torch.isfinite(scales).all()) or bool((scales < 0).any()):
        raise UserError(
            f"{stored.shard}: {stored.name} holds NaN, infinity or a scale below zero. "
            "Download the model again."
        )
    # A block of zeros may have the scale zero. Above it, a score is zero only where the weight's
    # bits are.
    return scales.clamp(min=torch.finfo(torch.float32).tiny).reshape(
        stored.shape if len(stored.shape) == 2 else (1, 1)
    )


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

    def row_chunks(self, weights: int) -> Iterator[tuple[int, int]]:
        """(first, last + 1) of consecutive chunks of rows, each of at most `weights` weights, or
        of one row.
        """
        step = max(1, weights // max(1, self.columns))
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)

    def read(self, file: FileReader, first: int, last: int) -> Words:
        """The words of rows first to last - 1 from the open shard, contiguous, shape (last - first,
        columns).
        """
        if not self.transposed:
            ((offset, begin, end),) = self._places(first, last)
            stored = file.take(offset, end - begin).view(WORD[self.itemsize])
            # A copy, if the tensor starts at an odd byte.
            return np.require(stored.reshape(last - first, self.columns), requirements="A")
        words = np.empty((self.columns, last - first), WORD[self.itemsize])
        raw = bytes_of(words)
        for offset, begin, end in self._places(first, last):
            file.read(raw[begin:end], offset)
        return words.T.copy()

    def pieces(self, first: int, words: Words) -> Iterator[tuple[int, memoryview]]:
        """(offset in the shard, bytes) of each contiguous piece of the rows from `first` on, whose
        words are given as `read` returns them.
        """
        raw = bytes_of(words.T.copy() if self.transposed else words)
        for offset, begin, end in self._places(first, first + words.shape[0]):
            yield offset, raw[begin:end]

    def _places(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the shard; begin, end in the bytes of the rows) of each contiguous piece of
        rows first to last - 1.
        """
        size = self.itemsize
        if not self.transposed:
            width = self.columns * size
            yield self.start + first * width, 0, (last - first) * width
            return
        width = (last - first) * size
        for column in range(self.columns):
            offset = self.start + (column * self.rows + first) * size
            yield offset, column * width, (column + 1) * width


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a prunable dtype of safetensors ("BF16"), or of FP8."""
    import torch

    if name == FP8_DTYPE:
        return torch.float8_e4m3fn
    return {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F64": torch.float64,
    }[name]


def dequantise_rows(matrix: Matrix, first: int, weights: "Tensor") -> "Tensor":
    """The values of the rows from `first` on, which are given as stored: times their scales in
    float32 if the matrix has scales, else unchanged.
    """
    return weights if matrix.scales is None else matrix.scales.dequantised(first, weights)


def as_tensor(words: Words, dtype: str) -> "Tensor":
    """Words as a tensor of a prunable dtype, or of FP8, in the same memory."""
    import torch

    # Signed, because torch supports few operations on unsigned integers. The view is free.
    signed = words.view(np.dtype(f"<i{words.dtype.itemsize}"))
    return torch.from_numpy(signed).view(torch_dtype(dtype))
