"""Chunks of words split into masks, values and zstd frames, and restored from them.

A word is the bits of a number as an unsigned integer, so that nothing is rounded and no NaN is
changed. A word is zero if no bit is set; -0.0 is a value like any other.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.matrices import WORD, Words, mask_bytes
from emp_llm.common.errors import UserError, reason

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
