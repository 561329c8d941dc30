"""Blocks of numbers taken apart for packing and put together again, in numpy: zeros as bits, numbers as planes of bytes.

Numbers are unsigned integers of their bits throughout, so that nothing is rounded and no NaN is changed; zero means that all
bits are zero, and -0.0 is a number like any other.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]  # one dimension, uint8, uint16, uint32 or uint64, little-endian
Bytes = NDArray[np.uint8]

WORD = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_ONES = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)
_FREQUENT = 15  # exponents with a code of four bits; the sixteenth code says that the byte is found elsewhere
_SAMPLE = 1 << 16  # bytes that tell which are frequent


def count_zeros(words: Words) -> int:
    """How many words have no bit set."""
    return words.size - int(np.count_nonzero(words))


def count_ones(mask: Bytes) -> int:
    """How many bits of a mask are set."""
    even = mask.size & ~1
    return int(_ONES[mask[:even].view("<u2")].sum(dtype=np.int64)) + int(_ONES[mask[even:]].sum(dtype=np.int64))


def take_zeros_out(words: Words) -> tuple[Bytes, Words]:
    """(mask, values): a bit for each word, lowest bit of the first byte first, one where it is not zero; and those words."""
    kept = words != 0
    # By places and not by booleans: numpy does the latter with a jump at every word, six times as slow where zeros are scattered.
    return np.packbits(kept, bitorder="little"), words.take(np.flatnonzero(kept))


def put_zeros_in(mask: Bytes, values: Words, count: int) -> Words:
    """The inverse of `take_zeros_out` for `count` words; the mask must have as many bits set as there are values."""
    words = np.zeros(count, dtype=values.dtype)
    words[places(mask, count)] = values
    return words


def places(mask: Bytes, count: int) -> NDArray[np.int64]:
    """Where the bits of a mask of `count` words are set."""
    found: NDArray[np.int64] = np.flatnonzero(np.unpackbits(mask, count=count, bitorder="little").view(np.bool_))
    return found


def split_planes(values: Words) -> list[Bytes]:
    """Byte planes, the highest first, of words turned left by one bit.

    In floating point the sign thereby joins the mantissa, which is as random, and the highest plane of a bfloat16 or float32 is
    the exponent, which is not.
    """
    size = values.dtype.itemsize
    if size == 1:
        return [values]
    turned = (values << 1) | (values >> (8 * size - 1))
    raw = turned.view(np.uint8).reshape(-1, size)
    return [np.ascontiguousarray(raw[:, plane]) for plane in reversed(range(size))]


def join_planes(planes: list[Bytes]) -> Words:
    """The inverse of `split_planes`."""
    size = len(planes)
    if size == 1:
        return planes[0]
    raw = np.empty((planes[0].size, size), dtype=np.uint8)
    for plane, values in zip(reversed(range(size)), planes, strict=True):
        raw[:, plane] = values
    turned = raw.view(WORD[size]).reshape(-1)
    return (turned >> 1) | (turned << (8 * size - 1))


def pair_exponents(plane: Bytes) -> Bytes:
    """Two bytes in one, as far as there are few different ones: an entropy coder that spends whole bits on a byte does better so.

    Returns:
        15 bytes, which should be the most frequent; then for every two bytes their
        places in that list, the first in the low half, 15 for a byte that is not in it (and where the last has no second);
        then the bytes that are not in it, in order.
    """
    sample = plane[:: max(1, plane.size // _SAMPLE)]
    frequent = np.argsort(-np.bincount(sample, minlength=256), kind="stable")[:_FREQUENT].astype(np.uint8)
    codes = np.full(256, _FREQUENT, dtype=np.uint8)
    codes[frequent] = np.arange(_FREQUENT, dtype=np.uint8)
    coded = codes[plane]
    others = plane[np.flatnonzero(coded == _FREQUENT)]
    if coded.size % 2:
        coded = np.append(coded, np.uint8(_FREQUENT))
    return np.concatenate([frequent, coded[0::2] | (coded[1::2] << 4), others])


def unpair_exponents(packed: Bytes, count: int) -> Bytes:
    """The inverse of `pair_exponents` for a plane of `count` bytes.

    Raises:
        ValueError: it does not hold as many.
    """
    end = _FREQUENT + (count + 1) // 2
    if packed.size < end:
        raise ValueError("too few exponents")
    pairs = packed[_FREQUENT:end]
    coded = np.empty(2 * pairs.size, dtype=np.uint8)
    coded[0::2], coded[1::2] = pairs & 15, pairs >> 4
    coded = coded[:count]
    plane = np.append(packed[:_FREQUENT], np.uint8(0))[coded]
    rare = np.flatnonzero(coded == _FREQUENT)
    if rare.size != packed.size - end:
        raise ValueError("the exponents that are not frequent are not as many as announced")
    plane[rare] = packed[end:]
    return plane
