"""Files written past the page cache, as databases do, from memory that lies as the file does.

A checkpoint that was just written is read by nobody soon, and keeping its pages costs the system more time than the disk takes
to write them (on some machines five times as much). Where the system cannot do so, files are written as usual.
"""

import errno
import os
from pathlib import Path

import torch
from torch import Tensor

PAGE = 4096  # at what multiples, in files and in memory, every system writes directly
_DIRECT = getattr(os, "O_DIRECT", 0)


class Buffers:
    """Memory for blocks of numbers that is used again: fresh memory costs as much time as what is copied into it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, shape: tuple[int, int], dtype: torch.dtype, at: int = 0) -> Tensor:
        """A tensor of any content, in memory that was given back if there is enough of it in one piece.

        Args:
            at: where in a file its content lies: its address is equal to that, up to a multiple of PAGE.
        """
        size = shape[0] * shape[1] * dtype.itemsize
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(size + PAGE, dtype=torch.uint8)
        if memory.numel() < size + PAGE:
            memory = torch.empty(size + PAGE, dtype=torch.uint8)
        start = (at - memory.data_ptr()) % PAGE
        start -= start % dtype.itemsize  # what is not stored at multiples of its size is not written directly
        return memory[start : start + size].view(dtype).view(shape)

    def give(self, block: Tensor) -> None:
        """Take the memory of a tensor back; it must not be used any more."""
        self._free.append(torch.empty(0, dtype=torch.uint8).set_(block.untyped_storage()))


class Sink:
    """A file to write to, at any place; it is made where it is not there, and else goes on as it is.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._direct: int | None = None
        if _DIRECT:
            try:
                self._direct = os.open(path, os.O_WRONLY | _DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    os.close(self.file)
                    raise

    def write(self, raw: memoryview, offset: int) -> None:
        """Write all bytes at a position; whole pages past the cache, if they lie in memory as `Buffers.take` has them."""
        first = min(-offset % PAGE, len(raw))
        last = first + (len(raw) - first) // PAGE * PAGE
        if self._direct is None or first == last or (_address(raw) - offset) % PAGE:
            write_exactly(self.file, raw, offset)
            return
        write_exactly(self.file, raw[:first], offset)
        written = self._write_directly(raw[first:last], offset + first)
        write_exactly(self.file, raw[first + written :], offset + first + written)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fsync(self.file)

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)
        if self._direct is not None:
            os.close(self._direct)

    def _write_directly(self, raw: memoryview, offset: int) -> int:
        """Write whole pages; returns how many bytes of them were written, not all where the system does not go on."""
        written = 0
        while written < len(raw) and written % PAGE == 0 and self._direct is not None:
            try:
                written += os.pwrite(self._direct, raw[written:], offset + written)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = None
        return written


def write_exactly(file: int, raw: memoryview, offset: int) -> None:
    """Write all bytes at a position."""
    while raw:
        written = os.pwrite(file, raw, offset)
        raw, offset = raw[written:], offset + written


def _address(raw: memoryview) -> int:
    return torch.frombuffer(raw, dtype=torch.uint8).data_ptr()
