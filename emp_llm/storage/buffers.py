"""Reusable memory for blocks of numbers, aligned with their position in a file.

Allocating memory takes as long as copying into it, so blocks are returned and reused. Direct I/O requires that a block has the
same offset within a page in memory as in its file.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Block = NDArray[Any]
PAGE = 4096  # direct I/O of all systems accepts multiples of this, in files and in memory


class BufferPool:
    """A pool of memory for blocks.

    Args:
        allocate: bytes -> uint8 array; default: ordinary memory. For fast copies to a GPU, it allocates pinned memory.
    """

    def __init__(self, allocate: Callable[[int], Block] | None = None) -> None:
        self._allocate = allocate or _ordinary
        self._free: list[Block] = []

    def take(self, shape: tuple[int, int], dtype: "np.dtype[Any] | type[Any]", at: int = 0) -> Block:
        """An array with undefined content. It reuses the memory returned last, if that is large enough.

        Args:
            shape: rows and columns.
            dtype: of the elements.
            at: offset of the content in a file; the array's address is congruent to it modulo PAGE.
        """
        dtype = np.dtype(dtype)
        size = shape[0] * shape[1] * dtype.itemsize
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._allocate(size + PAGE)
        if memory.size < size + PAGE:
            memory = self._allocate(size + PAGE)
        start = (at - address_of(memory)) % PAGE
        start -= start % dtype.itemsize  # elements must be aligned; content at odd offsets then bypasses direct I/O
        return memory[start : start + size].view(dtype).reshape(shape)

    def give(self, block: Block) -> None:
        """Return the memory of a block to the pool. The block must not be used afterwards."""
        while isinstance(block.base, np.ndarray):
            block = block.base
        self._free.append(block)


def bytes_of(array: Block) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def address_of(array: Block) -> int:
    """The memory address of the first element."""
    return int(array.__array_interface__["data"][0])


def _ordinary(size: int) -> Block:
    return np.empty(size, dtype=np.uint8)


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    import torch

    raw: Block = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw.data
