"""Bytes of files by position; large ones past the page cache, as databases do, in memory that lies as the file does.

A checkpoint that was just written is read by nobody soon, and keeping its pages costs the system more time than the disk takes
to write them (on some machines five times as much). Where the system cannot do so, files are written as usual.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from emp_llm.models.errors import ReadError, UserError, reason

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


class Source:
    """A file to read from, at any place.

    Args:
        path: the file.
        again: what is read will be read again, so that it belongs in the cache.

    Raises:
        ReadError: it cannot be read.
    """

    def __init__(self, path: Path, again: bool = False) -> None:
        self.path = path
        with reading(path):
            self.file = os.open(path, os.O_RDONLY)
        self._direct = None if again else _open_direct(path, os.O_RDONLY)
        self._cached = _Cached(self.file)
        if self._direct is None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, raw: memoryview, offset: int) -> None:
        """Fill all bytes from a position; whole pages past the cache, unless most of them are in it.

        Raises:
            UserError: the file ends before.
            ReadError: it cannot be read.
        """
        first, last = _pages(raw, offset)
        if self._direct is None or first == last or self._cached.share(offset + first, last - first) > 0.5:
            read_exactly(self.file, raw, offset, self.path)
            return
        read_exactly(self.file, raw[:first], offset, self.path)
        done = first
        while first <= done < last and (done - first) % PAGE == 0:
            try:
                got = os.preadv(self._direct, [raw[done:last]], offset + done)
            except OSError:  # not in this way; the other tells whether it can be read at all
                break
            if got == 0:
                break
            done += got
        read_exactly(self.file, raw[done:], offset + done, self.path)

    def close(self) -> None:
        """Close the file."""
        self._cached.close()
        os.close(self.file)
        if self._direct is not None:
            os.close(self._direct)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sink:
    """A file to write to, at any place; it is made where it is not there, and else goes on as it is.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._direct = _open_direct(path, os.O_WRONLY)

    def write(self, raw: memoryview, offset: int) -> None:
        """Write all bytes at a position; whole pages past the cache, if they lie in memory as `Buffers.take` has them."""
        first, last = _pages(raw, offset)
        if self._direct is None or first == last:
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


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file that could not be read."""
    try:
        yield
    except OSError as error:
        raise ReadError(f"{path}: it cannot be read ({reason(error)}). Run the command again when it can.") from error


def read_exactly(file: int, raw: memoryview, offset: int, path: Path) -> None:
    """Fill all bytes from a position; `path` names the file in the error."""
    while raw:
        with reading(path):
            got = os.preadv(file, [raw], offset)
        if got == 0:
            raise UserError(f"{path}: it ends before byte {offset + len(raw)}; it changed while it was read.")
        raw, offset = raw[got:], offset + got


def write_exactly(file: int, raw: memoryview, offset: int) -> None:
    """Write all bytes at a position."""
    while raw:
        written = os.pwrite(file, raw, offset)
        raw, offset = raw[written:], offset + written


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class _Cached:
    """How much of a file is in the page cache, as far as the system tells."""

    def __init__(self, file: int) -> None:
        self._map: mmap.mmap | None = None
        with suppress(OSError, ValueError, AttributeError):
            self._map = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            self._mincore = ctypes.CDLL(None, use_errno=True).mincore
            self._start = np.frombuffer(self._map, dtype=np.uint8).ctypes.data

    def share(self, offset: int, size: int) -> float:
        """The share of the pages of a range, which begins with one, that are in the cache; 1 where that is not known."""
        if self._map is None or offset + size > len(self._map):
            return 1.0
        pages = np.empty(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        start = (self._start + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p)):
            return 1.0
        return float((pages & 1).mean())

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for access past the page cache; None where the file system has none."""
    if not _DIRECT:
        return None
    try:
        return os.open(path, flags | _DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def _pages(raw: memoryview, offset: int) -> tuple[int, int]:
    """(first, last + 1) of the bytes that are whole pages of a file and of memory; alike where there are none."""
    first = min(-offset % PAGE, len(raw))
    if first == len(raw) or (torch.frombuffer(raw, dtype=torch.uint8).data_ptr() - offset) % PAGE:
        return 0, 0
    return first, first + (len(raw) - first) // PAGE * PAGE
