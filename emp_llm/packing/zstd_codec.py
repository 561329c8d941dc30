"""The zstd frames of a packed block: its mask and the byte planes of its values. `packed_format` describes the format."""

from typing import Any

import numpy as np

from emp_llm.checkpoint.words import WORD, Words, mask_bytes
from emp_llm.common.errors import UserError, reason
from emp_llm.packing.bits import (
    FREQUENT,
    Bytes,
    join_planes,
    mask_of,
    nonzero_words,
    ones_in,
    pair_exponents,
    put_zeros_in,
    split_planes,
    unpair_exponents,
)

# zstd stores planes as random as a mantissa uncompressed, at no cost, and its Huffman coder gets close to the entropy of the
# others. Higher levels search for repetitions, and there are none.
_LEVEL = 1
_PAIRED = ("BF16", "F32")  # the highest plane of these is the exponent alone


class Zstd:
    """Blocks of words as zstd frames, by the package `zstandard`. It has no state, so threads may share it.

    Args:
        why: the option or file that needs it, for the error.

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
        """The frames of a block: its mask if `sparse`, and the planes of its values if `values`."""
        chunks = [mask_of(words)] if sparse else []
        if values:
            planes = split_planes(nonzero_words(words) if sparse else words)
            if dtype in _PAIRED:
                planes[0] = pair_exponents(planes[0])
            chunks += planes
        return [self._zstd.ZstdCompressor(level=_LEVEL).compress(memoryview(chunk)) for chunk in chunks]  # type: ignore[arg-type]

    def decode(self, frames: list[memoryview], count: int, dtype: str, size: int, sparse: bool) -> Words:
        """The `count` words of `size` bytes of a block that was encoded with its values; ValueError for unsound frames."""
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
        """The content of a frame, `least` to `most` bytes; ValueError if its size differs, before anything is allocated."""
        try:
            size = self._zstd.frame_content_size(frame)
            if not least <= size <= (least if most is None else most):
                raise ValueError(f"a frame of {size:,} bytes instead of {least:,}")
            raw = self._zstd.ZstdDecompressor().decompress(frame) if size else b""
        except self._zstd.ZstdError as error:
            raise ValueError(f"a frame is damaged: {reason(error)}") from error
        if len(raw) != size:
            raise ValueError("a frame is shorter than announced")
        return np.frombuffer(raw, dtype=np.uint8)
