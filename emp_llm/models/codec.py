"""The frames of a block in a packed file: its mask and the byte planes of its values, by zstd; see `packed` for the format."""

from typing import Any

import numpy as np

from emp_llm.models.bits import (
    FREQUENT,
    WORD,
    Bytes,
    Words,
    join_planes,
    mask_bytes,
    mask_of,
    ones_in,
    pair_exponents,
    put_zeros_in,
    split_planes,
    unpair_exponents,
    values_of,
)
from emp_llm.models.errors import UserError, reason

# Planes as random as a mantissa become blocks of literals, which cost nothing to write or to read; of the others zstd's Huffman
# coder makes what there is to be had, and what higher levels look for, repetitions, is not there.
_LEVEL = 1
_PAIRED = ("BF16", "F32")  # whose highest plane is the exponent and nothing else


class Zstd:
    """Blocks of words as zstd frames, by the package `zstandard`; without state, so that threads may share it.

    Args:
        why: who needs it, as it stands in the error.

    Raises:
        UserError: the package is not installed.
    """

    def __init__(self, why: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{why} needs zstandard. Install it: pip install 'emp-llm[zstd]'") from error
        self._zstd = zstandard

    def encode(self, words: Words, dtype: str, sparse: bool, values: bool) -> list[bytes]:
        """The frames of a block: its mask, if sparse, and the planes of its values, if these are wanted."""
        chunks = [mask_of(words)] if sparse else []
        if values:
            planes = split_planes(values_of(words) if sparse else words)
            if dtype in _PAIRED:
                planes[0] = pair_exponents(planes[0])
            chunks += planes
        return [self._zstd.ZstdCompressor(level=_LEVEL).compress(memoryview(chunk)) for chunk in chunks]  # type: ignore[arg-type]

    def decode(self, frames: list[memoryview], count: int, dtype: str, size: int, sparse: bool) -> Words:
        """The `count` words, of `size` bytes, of a block whose values were encoded; ValueError where the frames hold others."""
        mask, numbers = None, count
        if sparse:
            mask, frames = self.mask(frames[0], count), frames[1:]
            numbers = ones_in(mask, count)
        planes = [self._content(frame, numbers) for frame in frames[len(frames) - size + (dtype in _PAIRED) :]]
        if dtype in _PAIRED:
            least = FREQUENT + (numbers + 1) // 2
            planes.insert(0, unpair_exponents(self._content(frames[0], least, least + numbers), numbers))
        values = join_planes(planes).astype(WORD[size], copy=False)
        return values if mask is None else put_zeros_in(mask, values, count)

    def mask(self, frame: memoryview, count: int) -> Bytes:
        """The mask of `count` words from its frame."""
        return self._content(frame, mask_bytes(count))

    def _content(self, frame: Any, least: int, most: int | None = None) -> Bytes:
        """What a frame holds: `least` bytes, or up to `most`; ValueError where it does not, before anything is allocated."""
        try:
            size = self._zstd.frame_content_size(frame)
            if not least <= size <= (least if most is None else most):
                raise ValueError(f"a frame of {size:,} bytes where {least:,} belong")
            raw = self._zstd.ZstdDecompressor().decompress(frame) if size else b""
        except self._zstd.ZstdError as error:
            raise ValueError(f"a frame is damaged: {reason(error)}") from error
        if len(raw) != size:
            raise ValueError("a frame holds less than it says")
        return np.frombuffer(raw, dtype=np.uint8)
