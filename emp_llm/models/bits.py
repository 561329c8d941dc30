"""Blocks of numbers taken apart for packing and put together again: zeros as bits, numbers as planes of bytes.

Numbers are words, unsigned integers of their bits, throughout, so that nothing is rounded and no NaN is changed; zero means
that no bit is set, and -0.0 is a number like any other. All is numpy's, but for the two loops of `bit_loops`, where numba is.
"""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.selection.kernels.rows import has_numba

Words = NDArray[Any]  # one dimension, uint8, uint16, uint32 or uint64, little-endian
Bytes = NDArray[np.uint8]

WORD: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_ONES = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)
FREQUENT = 15  # exponents with a code of four bits; the sixteenth code says that the byte is found elsewhere
_SAMPLE = 1 << 16  # bytes that tell which are frequent


def mask_bytes(count: int) -> int:
    """Size of the mask of so many words: a bit for each, filled up to 8 bytes."""
    return -(-count // 64) * 8


def mask_of(words: Words) -> Bytes:
    """A bit for each word, lowest bit of the first byte first, one where it is not zero; filled up with zeros."""
    mask = np.zeros(mask_bytes(words.size), dtype=np.uint8)
    mask[: -(-words.size // 8)] = np.packbits(words != 0, bitorder="little")
    return mask


def values_of(words: Words) -> Words:
    """The words that are not zero."""
    loops = _loops()
    if loops is not None:
        values = np.empty(words.size + 1, dtype=words.dtype)
        return values[: loops.compress(words, values)]
    # By places, and the places of booleans: all other ways numpy goes with a jump at every word, five times as slow.
    return words.take(np.flatnonzero(words != 0))


def ones_in(mask: Bytes, count: int) -> int:
    """How many bits of the mask of `count` words are set.

    Raises:
        ValueError: it is of another size, or bits are set behind its last word's.
    """
    whole, rest = divmod(count, 8)
    if mask.size != mask_bytes(count) or (rest and mask[whole] >> rest) or mask[whole + bool(rest) :].any():
        raise ValueError("a mask is not that of its numbers")
    return int(_ONES[mask.view("<u2")].sum(dtype=np.int64))


def booleans(mask: Bytes, count: int) -> NDArray[np.bool_]:
    """The bits of the mask of `count` words, one by one."""
    return np.unpackbits(mask, count=count, bitorder="little").view(np.bool_)


def put_zeros_in(mask: Bytes, values: Words, count: int) -> Words:
    """The `count` words of a mask and the values.

    Raises:
        ValueError: the mask is not one of so many words, or has not as many bits set as there are values.
    """
    if ones_in(mask, count) != values.size:
        raise ValueError(f"its mask has not as many bits set as the {values.size:,} values that are there")
    loops = _loops()
    if loops is None:
        words = np.zeros(count, dtype=values.dtype)
        words[np.flatnonzero(booleans(mask, count))] = values
    else:
        words = np.empty(count, dtype=values.dtype)
        loops.expand(mask.view("<u8"), values, words)
    return words


def zero_out(mask: Bytes, words: Words) -> Words:
    """Words with zero where the mask has."""
    return words * booleans(mask, words.size)


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
    turned: Words = raw.reshape(-1).view(WORD[size])
    joined: Words = (turned >> 1) | (turned << (8 * size - 1))
    return joined


def pair_exponents(plane: Bytes) -> Bytes:
    """Two bytes in one, as far as few are different: a coder that spends whole bits on a byte loses half as much on a pair.

    Returns:
        15 bytes, the most frequent of a sample; then for every two bytes their places in that list, the first in the low half,
        15 for a byte that is not in it (and where the last has no second); then the bytes that are not in it, in order.
    """
    sample = plane[:: max(1, plane.size // _SAMPLE)]
    frequent = np.argsort(-np.bincount(sample, minlength=256), kind="stable")[:FREQUENT].astype(np.uint8)
    codes = np.full(256, FREQUENT, dtype=np.uint8)
    codes[frequent] = np.arange(FREQUENT, dtype=np.uint8)
    coded = codes.take(plane)
    others = plane[np.flatnonzero(coded == FREQUENT)]
    if coded.size % 2:
        coded = np.append(coded, np.uint8(FREQUENT))
    return np.concatenate([frequent, coded[0::2] | (coded[1::2] << 4), others])


def unpair_exponents(packed: Bytes, count: int) -> Bytes:
    """The inverse of `pair_exponents` for a plane of `count` bytes.

    Raises:
        ValueError: it does not hold as many.
    """
    end = FREQUENT + (count + 1) // 2
    if packed.size < end:
        raise ValueError("too few exponents")
    pairs = packed[FREQUENT:end]
    coded = np.empty(2 * pairs.size, dtype=np.uint8)
    coded[0::2], coded[1::2] = pairs & 15, pairs >> 4
    coded = coded[:count]
    plane = np.append(packed[:FREQUENT], np.uint8(0)).take(coded)
    rare = np.flatnonzero(coded == FREQUENT)
    if rare.size != packed.size - end:
        raise ValueError("the exponents that are not frequent are not as many as announced")
    plane[rare] = packed[end:]
    return plane


@cache
def _loops() -> ModuleType | None:
    """The compiled loops, where numba can be used."""
    if not has_numba():
        return None
    from emp_llm.models import bit_loops

    return bit_loops
