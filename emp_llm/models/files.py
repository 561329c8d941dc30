"""Bytes by position: reading, writing and copying parts of files that are too large to hold."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from emp_llm.models.direct import Sink
from emp_llm.models.errors import ReadError, UserError, reason

T = TypeVar("T")

_WAITING = 3  # jobs of a thread beside the work; what they hold is all the memory it costs


class OpenFiles(ExitStack):
    """Open files by path; what is written reaches the disk with `sync`."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, int] = {}
        self._sinks: dict[Path, Sink] = {}

    def reading(self, path: Path) -> int:
        """A descriptor to read from, from the beginning to the end at best."""
        if path not in self._open:
            with reading(path):
                file = self._open[path] = os.open(path, os.O_RDONLY)
            self.callback(os.close, file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._open[path]

    def writing(self, path: Path) -> Sink:
        """A file to write to."""
        if path not in self._sinks:
            self._sinks[path] = Sink(path)
            self.callback(self._sinks[path].close)
        return self._sinks[path]

    def sync(self) -> None:
        """Return when all that was written so far is on the disk."""
        for sink in list(self._sinks.values()):
            sink.sync()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file that could not be read."""
    try:
        yield
    except OSError as error:
        raise ReadError(f"{path}: it cannot be read ({reason(error)}). Run the command again when it can.") from error


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


def read_exactly(file: int, raw: memoryview, offset: int, path: Path) -> None:
    """Fill all bytes from a position; `path` names the file in the error."""
    while raw:
        with reading(path):
            got = os.preadv(file, [raw], offset)
        if got == 0:
            raise UserError(f"{path}: it ends before byte {offset + len(raw)}; it changed while it was read.")
        raw, offset = raw[got:], offset + got


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
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
