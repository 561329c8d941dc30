"""Bytes by position: reading, writing and copying parts of files that are too large to hold."""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from emp_llm.models.errors import UserError

T = TypeVar("T")

_COPY_BYTES = 1 << 24
_WAITING = 3  # jobs of a thread beside the work; what they hold is all the memory it costs
# What copy_file_range answers where the two file systems cannot do it between them.
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class OpenFiles(ExitStack):
    """Open files by path; written ones reach the disk before they are closed."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[tuple[Path, int], int] = {}

    def reading(self, path: Path) -> int:
        """A descriptor to read from."""
        return self._descriptor(path, os.O_RDONLY)

    def writing(self, path: Path) -> int:
        """A descriptor to write to; the file is made, or emptied, when it is first asked for."""
        return self._descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def _descriptor(self, path: Path, flags: int) -> int:
        if (path, flags) not in self._open:
            file = self._open[path, flags] = os.open(path, flags, 0o666)
            self.callback(os.close, file)
            if flags != os.O_RDONLY:
                self.callback(os.fsync, file)
        return self._open[path, flags]


def ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What some jobs return, in their order; a thread does the next few while the caller works on the last."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="emp-llm-read") as thread:
        try:
            for job in jobs:
                waiting.append(thread.submit(job))
                if len(waiting) >= _WAITING:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


class Behind:
    """Jobs that a thread does one after the other, in order, while the caller goes on; to be used as a context.

    The error of a job is raised by a later `do`, or at the end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-write")
        self._waiting: deque[Future[Any]] = deque()

    def do(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Have a job done; waits while too many do."""
        self._waiting.append(self._thread.submit(job, *arguments))
        while len(self._waiting) > _WAITING:
            self._waiting.popleft().result()

    def __enter__(self) -> "Behind":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            while self._waiting and kind is None:
                self._waiting.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)


def read_exactly(file: int, raw: memoryview, offset: int, path: Path) -> None:
    """Fill all bytes from a position; `path` names the file in the error."""
    while raw:
        got = os.preadv(file, [raw], offset)
        if got == 0:
            raise UserError(f"{path}: it ends before byte {offset + len(raw)}; it changed while it was read.")
        raw, offset = raw[got:], offset + got


def write_exactly(file: int, raw: memoryview, offset: int) -> None:
    """Write all bytes at a position."""
    while raw:
        written = os.pwrite(file, raw, offset)
        raw, offset = raw[written:], offset + written


def copy_bytes(here: int, there: int, start: int, end: int) -> None:
    """Copy a range of bytes between two open files, to the same offsets; by the kernel where the file systems allow it."""
    if not hasattr(os, "copy_file_range"):
        return _copy_by_hand(here, there, start, end)
    try:
        while start < end:
            copied = os.copy_file_range(here, there, min(end - start, _COPY_BYTES), start, start)
            if copied == 0:
                raise UserError("a shard became shorter while it was read.")
            start += copied
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        _copy_by_hand(here, there, start, end)


def _copy_by_hand(here: int, there: int, start: int, end: int) -> None:
    while start < end:
        piece = os.pread(here, min(end - start, _COPY_BYTES), start)
        if not piece:
            raise UserError("a shard became shorter while it was read.")
        write_exactly(there, memoryview(piece), start)
        start += len(piece)
