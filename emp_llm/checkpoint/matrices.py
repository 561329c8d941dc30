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

from emp_llm.checkpoint.checkpoint import BITS, StoredTensor
from emp_llm.checkpoint.files import FileReader, bytes_of
from emp_llm.common.errors import UserError, reason

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

    def dequantise(self, first: int, weights: "Tensor") -> "Tensor":
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
    return weights if matrix.scales is None else matrix.scales.dequantise(first, weights)


def as_tensor(words: Words, dtype: str) -> "Tensor":
    """Words as a tensor of a prunable dtype, or of FP8, in the same memory."""
    import torch

    # Signed, because torch supports few operations on unsigned integers. The view is free.
    signed = words.view(np.dtype(f"<i{words.dtype.itemsize}"))
    return torch.from_numpy(signed).view(torch_dtype(dtype))


# Chunks of words split into masks, values and zstd frames, and restored from them.
#
# A word is the bits of a number as an unsigned integer, so that nothing is rounded and no NaN is
# changed. A word is zero if no bit is set; -0.0 is a value like any other.


Bytes = NDArray[np.uint8]

_FREQUENT = 15  # exponents with a code of four bits; the sixteenth code marks all others
_SAMPLE = 1 << 16  # bytes that decide which are frequent
_PAIRED = ("BF16", "F32")  # the highest plane of these is the exponent alone
# zstd stores planes as random as a mantissa uncompressed, at no cost, and its Huffman coder gets
# close to the entropy of the others. Higher levels search for repetitions, and there are none.
_LEVEL = 1


def mask_of(words: Words) -> Bytes:
    """The mask of words, uint8: one bit for each word, 1 if it is not zero, the lowest bit of the
    first byte first; padded with zeros to a multiple of 8 bytes.
    """
    mask = np.zeros(mask_bytes(words.size), dtype=np.uint8)
    mask[: -(-words.size // 8)] = np.packbits(words != 0, bitorder="little")
    return mask


def nonzero_words(words: Words) -> Words:
    """The words that are not zero."""
    # By positions, and the positions of booleans: numpy's other ways branch at every word and are
    # five times as slow.
    return words.take(np.flatnonzero(words != 0))


def ones_in(mask: Bytes, count: int) -> int:
    """The number of bits that are set in the mask of `count` words.

    Raises:
        ValueError: the size of the mask is wrong, or bits are set after the last word's bit.
    """
    whole, rest = divmod(count, 8)
    if (
        mask.size != mask_bytes(count)
        or (rest and mask[whole] >> rest)
        or mask[whole + bool(rest) :].any()
    ):
        raise ValueError("a mask does not fit its numbers")
    return int(np.bitwise_count(mask.view("<u8")).sum(dtype=np.int64))


def booleans(mask: Bytes, count: int) -> NDArray[np.bool_]:
    """The mask of `count` words as booleans, shape (count,)."""
    return np.unpackbits(mask, count=count, bitorder="little").view(np.bool_)


def put_zeros_in(mask: Bytes, values: Words, count: int) -> Words:
    """The `count` words with this mask and these non-zero values.

    Raises:
        ValueError: the mask does not fit `count` words, or the number of its set bits is not the
            number of values.
    """
    if (ones := ones_in(mask, count)) != values.size:
        raise ValueError(f"its mask has {ones:,} bits set for {values.size:,} values")
    words = np.zeros(count, dtype=values.dtype)
    words[np.flatnonzero(booleans(mask, count))] = values
    return words


def need_zstandard(why: str) -> None:
    """Raise UserError if the package zstandard is missing; `why` names the option or folder that
    needs it.
    """
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise UserError(f"{why} needs zstandard. Install it: pip install zstandard") from error


def zstd_frames(arrays: list[Any]) -> list[bytes]:
    """One zstd frame for each array."""
    import zstandard

    return [zstandard.ZstdCompressor(level=_LEVEL).compress(memoryview(array)) for array in arrays]


def zstd_content(frame: Any, least: int, most: int | None = None) -> Bytes:
    """The content of a frame; ValueError unless it has `least` to `most` bytes, by default exactly
    `least`. The size is checked before anything is allocated.
    """
    import zstandard

    try:
        size = zstandard.frame_content_size(frame)
        if not least <= size <= (least if most is None else most):
            raise ValueError(f"a frame of {size:,} bytes instead of {least:,}")
        raw = zstandard.ZstdDecompressor().decompress(frame) if size else b""
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {reason(error)}") from error
    if len(raw) != size:
        raise ValueError("a frame is shorter than announced")
    return np.frombuffer(raw, dtype=np.uint8)


def split_planes(values: Words, dtype: str) -> list[Bytes]:
    """The arrays that zstd compresses: byte planes, the highest first, of words rotated left by one
    bit.

    The rotation moves the sign of a floating-point number next to the mantissa, which is equally
    random. The highest plane of bfloat16 or float32 is then the exponent alone, and goes through
    `pair_exponents`.
    """
    size = values.dtype.itemsize
    if size == 1:
        return [values]
    rotated = (values << 1) | (values >> (8 * size - 1))
    raw = rotated.view(np.uint8).reshape(-1, size)
    planes = [np.ascontiguousarray(raw[:, plane]) for plane in reversed(range(size))]
    return [pair_exponents(planes[0]), *planes[1:]] if dtype in _PAIRED else planes


def join_planes(frames: list[memoryview], count: int, dtype: str) -> Words:
    """The inverse of `split_planes`: `count` words, from the zstd frames of their planes.

    Raises:
        ValueError: a frame is damaged, or has another size.
    """
    size = len(frames)
    paired = dtype in _PAIRED
    least = _FREQUENT + (count + 1) // 2
    planes = [zstd_content(frame, count) for frame in frames[paired:]]
    if paired:
        planes.insert(0, unpair_exponents(zstd_content(frames[0], least, least + count), count))
    if size == 1:
        return planes[0]
    raw = np.empty((count, size), dtype=np.uint8)
    for plane, values in zip(reversed(range(size)), planes, strict=True):
        raw[:, plane] = values
    rotated: Words = raw.reshape(-1).view(WORD[size])
    joined: Words = (rotated >> 1) | (rotated << (8 * size - 1))
    return joined


def pair_exponents(plane: Bytes) -> Bytes:
    """A plane with two bytes in one, which works because few distinct bytes occur. A Huffman coder
    spends whole bits on a symbol, so it wastes half as many on a pair: at 50 % zeros, all values
    take 4 % fewer bytes.

    Returns:
        The 15 most frequent bytes of a sample; then one byte for each two bytes of the plane: their
        indexes in that list, the first in the low half, 15 for a byte that is not in the list and
        for the missing half of a last pair; then the bytes that are not in the list, in order.
    """
    sample = plane[:: max(1, plane.size // _SAMPLE)]
    frequent = np.argsort(-np.bincount(sample, minlength=256), kind="stable")[:_FREQUENT].astype(
        np.uint8
    )
    codes = np.full(256, _FREQUENT, dtype=np.uint8)
    codes[frequent] = np.arange(_FREQUENT, dtype=np.uint8)
    coded = codes.take(plane)
    others = plane[np.flatnonzero(coded == _FREQUENT)]
    if coded.size % 2:
        coded = np.append(coded, np.uint8(_FREQUENT))
    return np.concatenate([frequent, coded[0::2] | (coded[1::2] << 4), others])


def unpair_exponents(packed: Bytes, count: int) -> Bytes:
    """The inverse of `pair_exponents` for a plane of `count` bytes.

    Raises:
        ValueError: the number of bytes is wrong.
    """
    end = _FREQUENT + (count + 1) // 2
    pairs = packed[_FREQUENT:end]
    coded = np.empty(2 * pairs.size, dtype=np.uint8)
    coded[0::2] = pairs & 15
    coded[1::2] = pairs >> 4
    coded = coded[:count]
    plane = np.append(packed[:_FREQUENT], np.uint8(0)).take(coded)
    rare = np.flatnonzero(coded == _FREQUENT)
    if rare.size != packed.size - end:
        raise ValueError("the number of rare exponents is wrong")
    plane[rare] = packed[end:]
    return plane
