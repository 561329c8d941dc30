"""Reads and writes at any position of a file; large ones bypass the page cache (direct I/O), as databases do.

A checkpoint is seldom reread right after it was written, and caching its pages takes longer than writing them (five times as
long on some machines). On systems without direct I/O, files are read and written through the cache.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from emp_llm.common.errors import ReadError, UserError, reason
from emp_llm.storage.buffers import PAGE, address_of

_DIRECT = getattr(os, "O_DIRECT", 0)


class FileReader:
    """A file to read from, at any position.

    Args:
        path: the file.
        again: the content will be read again; keep it in the page cache.

    Raises:
        ReadError: the file cannot be opened.
    """

    def __init__(self, path: Path, again: bool = False) -> None:
        self.path = path
        with reading(path):
            self.file = os.open(path, os.O_RDONLY)
        self._direct = None if again else _open_direct(path, os.O_RDONLY)
        self._cache = _CachedPages(self.file)
        if self._direct is None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, raw: memoryview, offset: int) -> None:
        """Fill `raw` from a position. Whole pages bypass the cache, unless most of them are cached already.

        Raises:
            UserError: the file is too short.
            ReadError: the file cannot be read.
        """
        first, last = _whole_pages(raw, offset)
        if self._direct is None or first == last or self._cache.share(offset + first, last - first) > 0.5:
            read_exactly(self.file, raw, offset, self.path)
            return
        read_exactly(self.file, raw[:first], offset, self.path)
        done = first
        while first <= done < last and (done - first) % PAGE == 0:
            try:
                got = os.preadv(self._direct, [raw[done:last]], offset + done)
            except OSError:  # the ordinary read below succeeds, or raises the error
                break
            if got == 0:
                break
            done += got
        read_exactly(self.file, raw[done:], offset + done, self.path)

    def close(self) -> None:
        self._cache.close()
        os.close(self.file)
        if self._direct is not None:
            os.close(self._direct)

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileWriter:
    """A file to write to, at any position. It is created if missing; existing content is kept."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._direct = _open_direct(path, os.O_WRONLY)

    def write(self, raw: memoryview, offset: int) -> None:
        """Write all of `raw` at a position. Whole pages bypass the cache if `BufferPool.take` aligned them."""
        first, last = _whole_pages(raw, offset)
        if self._direct is None or first == last:
            write_exactly(self.file, raw, offset)
            return
        write_exactly(self.file, raw[:first], offset)
        written = self._write_directly(raw[first:last], offset + first)
        write_exactly(self.file, raw[first + written :], offset + first + written)

    def sync(self) -> None:
        """Flush everything written so far to disk."""
        os.fsync(self.file)

    def close(self) -> None:
        os.close(self.file)
        if self._direct is not None:
            os.close(self._direct)

    def _write_directly(self, raw: memoryview, offset: int) -> int:
        """Write whole pages; returns the number of bytes written, which may be less than the length of `raw`."""
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
    """Turn a system error into a ReadError that names the file."""
    try:
        yield
    except OSError as error:
        raise ReadError(f"{path}: it cannot be read ({reason(error)}). Run the command again when it is readable.") from error


def read_exactly(file: int, raw: memoryview, offset: int, path: Path) -> None:
    """Fill all of `raw` from a position; `path` names the file in the error."""
    while raw:
        with reading(path):
            got = os.preadv(file, [raw], offset)
        if got == 0:
            end = offset + len(raw)
            raise UserError(f"{path}: it ends before byte {end}; it changed while it was read. Run the command again.")
        raw, offset = raw[got:], offset + got


def write_exactly(file: int, raw: memoryview, offset: int) -> None:
    """Write all of `raw` at a position."""
    while raw:
        written = os.pwrite(file, raw, offset)
        raw, offset = raw[written:], offset + written


class _CachedPages:
    """The share of a file's pages in the page cache, on systems that report it."""

    def __init__(self, file: int) -> None:
        self._map: mmap.mmap | None = None
        with suppress(OSError, ValueError, AttributeError):
            self._map = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            self._mincore = ctypes.CDLL(None, use_errno=True).mincore
            self._start = address_of(np.frombuffer(self._map, dtype=np.uint8))

    def share(self, offset: int, size: int) -> float:
        """The cached share of a range that begins at a page; 1 if unknown."""
        if self._map is None or offset + size > len(self._map):
            return 1.0
        pages = np.empty(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        start = (self._start + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(address_of(pages))):
            return 1.0
        return float((pages & 1).mean())

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for direct I/O; None if the file system does not support it."""
    if not _DIRECT:
        return None
    try:
        return os.open(path, flags | _DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def _whole_pages(raw: memoryview, offset: int) -> tuple[int, int]:
    """(first, last + 1) of the bytes that are whole pages both in the file and in memory; equal if there are none."""
    first = min(-offset % PAGE, len(raw))
    if first == len(raw) or (address_of(np.frombuffer(raw, dtype=np.uint8)) - offset) % PAGE:
        return 0, 0
    return first, first + (len(raw) - first) // PAGE * PAGE
