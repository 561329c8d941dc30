"""A folder made aside under a hidden name, which gets its own name when it is complete."""

import contextlib
import errno
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from emp_llm.models.errors import UserError, reason

T = TypeVar("T")


class Staging:
    """`with Staging(...) as staging: ...; staging.publish()`; without `publish`, nothing is left and nothing is replaced.

    Args:
        path: where the folder shall be.
        sources: folders it is made from; never touched.
        overwrite: replace what stands at the path, if it holds one of the files `known`.
        known: names of files by which a folder is known to be of the kind that may be replaced.
        what: what the user calls the path.

    Raises:
        UserError: the path exists and may not be replaced, or it is a source, lies in one or holds one.
    """

    def __init__(
        self, path: Path, sources: Iterable[Path], overwrite: bool, known: Iterable[str], what: str = "the output"
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        self._what = what
        real = self.path.resolve()
        for source in sources:
            origin = source.resolve()
            if real == origin or real in origin.parents or origin in real.parents:
                raise UserError(f"{path}: {what} is the input, lies in it or holds it; name another folder.")
        if not os.path.lexists(self.path):
            return
        if not overwrite:
            raise UserError(f"{path}: {what} exists; name another folder, or add --overwrite.")
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() and not self.path.is_symlink() else None
        if names is None or (names and not names & set(known)):
            raise UserError(f"{path}: {what} is not a model folder, so --overwrite leaves it alone; remove it yourself.")

    def __enter__(self) -> "Staging":
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self.partial.mkdir()
        except OSError as error:
            raise UserError(f"{self.path}: {self._what} cannot be written there ({reason(error)}).") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{self.path}: the disk is full. Free some space, or name a folder elsewhere.") from error

    def publish(self) -> None:
        """Give the folder its name; an older one is replaced."""
        _sync(self.partial)
        old = self.partial.with_name(f"{self.partial.name}-old")
        if self.path.exists():
            self.path.rename(old)
        try:
            self.partial.rename(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                old.rename(self.path)
            raise
        _sync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


def check_space(path: Path, needed: int) -> None:
    """Raise UserError where a disk has fewer bytes free than will be written."""
    parent = next(folder for folder in Path(os.path.abspath(path)).parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"{path}: it needs {needed:,} bytes and the disk has {free:,} free. Free some space, or name a folder elsewhere."
        )


class Workers:
    """Some threads, for work that leaves the interpreter alone (numpy, hashing, files); to be used as a context."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count or min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="emp-llm-pack")

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def map(self, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What some jobs return, in their order; only a few more than there are threads are begun ahead."""
        waiting: deque[Future[T]] = deque()
        for job in jobs:
            waiting.append(self._pool.submit(job))
            if len(waiting) > self._count + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
