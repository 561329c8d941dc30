"""Words: the bits of a stored tensor's numbers as unsigned integers, and their packed size."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.safetensors_header import BITS, StoredTensor
from emp_llm.storage.direct_io import FileReader

Words = NDArray[Any]  # uint8, uint16, uint32 or uint64, little-endian
WORD: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


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
    """Bytes of `words` words of `size` bytes, packed raw: bitmask and values, or all words if that is smaller."""
    return min(words * size, mask_bytes(words) + (words - zeros) * size)


def read_words(file: FileReader, tensor: StoredTensor, first: int, count: int) -> Words:
    """Words first to first + count - 1 of a tensor, from its open shard: shape (count,)."""
    size = word_bytes(tensor)
    words = np.empty(count, dtype=WORD[size])
    if count:
        file.read(words.view(np.uint8).data, tensor.start + first * size)
    return words
