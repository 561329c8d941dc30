"""A block of words as the bytes of a packed file, and back; see `packed` for the format."""

from typing import Any, Protocol

import numpy as np

from emp_llm.models.bits import (
    WORD,
    Bytes,
    Words,
    count_ones,
    join_planes,
    pair_exponents,
    places,
    put_zeros_in,
    split_planes,
    take_zeros_out,
    unpair_exponents,
)
from emp_llm.models.errors import UserError

# Of planes that are as random as a mantissa zstd makes blocks of literals, which cost nothing to write or to read; of the others
# its Huffman coder makes what there is to be had, and what higher levels look for, repetitions, is not there.
_LEVEL = 1


class Coder(Protocol):
    """What turns bytes into frames and back."""

    def compress(self, raw: Any) -> bytes: ...

    def decompress(self, frame: Any, least: int, most: int) -> Bytes: ...


class Zstd:
    """zstd frames, by the package `zstandard`; each call with a state of its own, so that threads may share it.

    Raises:
        UserError: the package is not installed.
    """

    def __init__(self, why: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{why} needs zstandard. Install it: pip install 'emp-llm[zstd]'") from error
        self._zstd = zstandard

    def compress(self, raw: Any) -> bytes:
        """One frame that tells its content's size."""
        frame: bytes = self._zstd.ZstdCompressor(level=_LEVEL).compress(raw)
        return frame

    def decompress(self, frame: Any, least: int, most: int) -> Bytes:
        """The content of a frame; ValueError where it is none, or not of `least` to `most` bytes."""
        try:
            size = self._zstd.frame_content_size(frame)
            if not least <= size <= most:  # before anything is allocated
                raise ValueError(f"a frame of {size:,} bytes where {most:,} belong")
            raw: bytes = self._zstd.ZstdDecompressor().decompress(frame) if size else b""
        except self._zstd.ZstdError as error:
            raise ValueError(f"a frame is damaged: {error}") from error
        if len(raw) != size:
            raise ValueError("a frame holds less than it says")
        return np.frombuffer(raw, dtype=np.uint8)


def encode(words: Words, sparse: bool, values: bool, coder: Coder | None) -> list[Any]:
    """What a packed file holds of a block: raw, the mask and the values; else frames. Without `values`, the mask only."""
    chunks: list[Any] = []
    if sparse:
        mask, words = take_zeros_out(words)
        chunks.append(mask)
    if values:
        if coder is None:
            chunks.append(words)
        else:
            planes = split_planes(words)
            if len(planes) > 1:
                planes[0] = pair_exponents(planes[0])
            chunks += planes
    return chunks if coder is None else [coder.compress(chunk) for chunk in chunks]


def decode_frames(frames: list[Any], count: int, size: int, sparse: bool, coder: Coder) -> Words:
    """The inverse of `encode` with values and a coder, for `count` words of `size` bytes.

    Raises:
        ValueError: the frames do not hold that.
    """
    numbers = count
    if sparse:
        mask = mask_of(frames[0], count, coder)
        numbers, frames = count_ones(mask), frames[1:]
    least = (numbers + 1) // 2
    planes = []
    for place, frame in enumerate(frames):
        if place == 0 and size > 1:
            planes.append(unpair_exponents(coder.decompress(frame, 15 + least, 15 + least + numbers), numbers))
        else:
            planes.append(coder.decompress(frame, numbers, numbers))
    values = join_planes(planes).astype(WORD[size], copy=False)
    return put_zeros_in(mask, values, count) if sparse else values


def mask_of(frame: Any, count: int, coder: Coder) -> Bytes:
    """The mask of `count` words from its frame; ValueError where it is none."""
    mask = coder.decompress(frame, -(-count // 8), -(-count // 8))
    check_end(mask, count)
    return mask


def check_end(mask: Bytes, count: int) -> None:
    """Raise ValueError where bits are set behind those of `count` words."""
    whole, rest = divmod(count, 8)
    if (rest and mask[whole] >> rest) or mask[whole + bool(rest) :].any():
        raise ValueError("a mask has bits set behind its last number")


def apply_mask(mask: Bytes, words: Words) -> Words:
    """Words with those set to zero whose bit is not set."""
    kept: Words = np.unpackbits(mask, count=words.size, bitorder="little")
    return words * kept.astype(words.dtype)


def fill(mask: Bytes, values: Words, count: int) -> Words:
    """`put_zeros_in` of a mask that need not be sound: ValueError where it has not one bit for each value."""
    check_end(mask, count)
    if places(mask, count).size != values.size:
        raise ValueError("a mask has not one bit set for each value")
    return put_zeros_in(mask, values, count)
