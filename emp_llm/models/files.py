"""Bytes by position: reading, writing and copying parts of files that are too large to hold."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor

from emp_llm.models.direct import PAGE, Buffers, Sink, Source, bytes_of

T = TypeVar("T")

_OPEN = 16  # files to read, and files to write, at a time
_WAITING = 3  # jobs of a thread beside the work; what they hold is all the memory it costs
_COLLECTED = 1 << 22  # bytes of a write of a stream


class OpenFiles(ExitStack):
    """Open files by path; what is written reaches the disk with `sync`.

    Large models have more shards than the system lets a process have open: older ones are closed. So a file is to be asked for
    anew for each piece of work. One thread asks for files to read, and one for files to write.

    Args:
        again: what is read will be read again, so that it belongs in the page cache.
    """

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self._again = again
        self._sources: dict[Path, Source] = {}  # the last used last
        self._sinks: dict[Path, Sink] = {}  # the last opened last
        self._syncing = Lock()
        self.callback(self._close)

    def reading(self, path: Path) -> Source:
        """A file to read from."""
        source = self._sources.pop(path, None) or Source(path, self._again)
        self._sources[path] = source
        if len(self._sources) > _OPEN:
            self._sources.pop(next(iter(self._sources))).close()
        return source

    def writing(self, path: Path) -> Sink:
        """A file to write to."""
        if path not in self._sinks:
            with self._syncing:
                self._sinks[path] = Sink(path)
                if len(self._sinks) > _OPEN:
                    oldest = self._sinks.pop(next(iter(self._sinks)))
                    with closing(oldest):
                        oldest.sync()
        return self._sinks[path]

    def sync(self) -> None:
        """Return when all that was written so far is on the disk."""
        with self._syncing:
            for sink in self._sinks.values():
                sink.sync()

    def _close(self) -> None:
        for source in self._sources.values():
            source.close()
        for sink in self._sinks.values():
            sink.close()


def ahead(jobs: Iterable[Callable[[], T]], threads: int = 1) -> Iterator[T]:
    """What some jobs return, in their order; a thread, or some, do the next few while the caller works on the last."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-read") as thread:
        try:
            for job in jobs:
                waiting.append(thread.submit(job))
                if len(waiting) >= _WAITING + threads - 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


class Behind:
    """Jobs that a thread does one after the other, in order, while the caller goes on; to be used as a context.

    The error of a job is raised by a later `do`, or at the end; no job behind it is done.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-write")
        self._waiting: deque[Future[Any]] = deque()
        self._failed = False

    def do(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Have a job done; waits while too many do."""
        self._waiting.append(self._thread.submit(self._run, job, *arguments))
        while len(self._waiting) > _WAITING:
            self._waiting.popleft().result()

    def _run(self, job: Callable[..., Any], *arguments: Any) -> None:
        if self._failed:
            return
        try:
            job(*arguments)
        except BaseException:
            self._failed = True
            raise

    def __enter__(self) -> "Behind":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            while self._waiting and kind is None:
                self._waiting.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)


class Stream:
    """Bytes that come in pieces, one after another, written to a file in large blocks of whole pages.

    Args:
        sink: the file.
        offset: where in it they begin.
        buffers: where memory for the blocks comes from.
        behind: who writes them.
    """

    def __init__(self, sink: Sink, offset: int, buffers: Buffers, behind: Behind) -> None:
        self._sink, self._buffers, self._behind = sink, buffers, behind
        self._offset = offset  # of the block that is being filled
        self._block: Tensor | None = None
        self._filled = 0

    def write(self, piece: memoryview) -> None:
        """Take some bytes, which may be changed afterwards; they are in the file after `close`, when `behind` is done."""
        while piece:
            if self._block is None:
                self._block = self._buffers.take((1, _COLLECTED - self._offset % PAGE), torch.uint8, self._offset)
            room = bytes_of(self._block)[self._filled :]
            taken = min(len(room), len(piece))
            room[:taken] = piece[:taken]
            self._filled += taken
            piece = piece[taken:]
            if taken == len(room):
                self.close()

    def close(self) -> None:
        """Have written what is not yet."""
        if self._block is not None:
            self._behind.do(self._put, self._block, self._filled, self._offset)
            self._offset += self._filled
            self._block, self._filled = None, 0

    def _put(self, block: Tensor, size: int, offset: int) -> None:
        self._sink.write(bytes_of(block)[:size], offset)
        self._buffers.give(block)


def sync_path(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(folder: Path) -> None:
    """`sync_path` of a folder and all that is in it."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def replace_json(path: Path, value: Any) -> None:
    """Put JSON in a file's place, in one step that a crash of the machine does not split either."""
    with _replacing(path) as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def replace_text(path: Path, text: str) -> None:
    """Put text in a file's place, likewise."""
    with _replacing(path) as file:
        file.write(text)


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.parent)
