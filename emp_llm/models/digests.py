"""SHA-256 of files, or another hash, while they are written, by a thread: of what is in memory, or still in the page cache."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from emp_llm.models.direct import read_exactly, reading

_CHUNK = 1 << 22


class Digests:
    """Digests of growing files; to be used as a context.

    Args:
        known: digests of files that are finished already, by name, in hexadecimal.
        new: what begins a digest.
    """

    def __init__(self, known: dict[str, str] | None = None, new: Callable[[], Any] = hashlib.sha256) -> None:
        self.finished = dict(known or {})
        self._new = new
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-hash")
        self._hashes: dict[Path, Any] = {}
        self._reached: dict[Path, int] = {}
        self._buffer = memoryview(bytearray(_CHUNK))
        self._error: BaseException | None = None

    def __enter__(self) -> "Digests":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)

    def advance(self, path: Path, start: int, end: int, last: bool = False) -> None:
        """Bytes start to end - 1 of a file are final; they are hashed if all before them are. `last`: there are no more."""
        self._raise()
        if self._next(path, start, end):
            self._thread.submit(self._hash, path, start, end)
            if last:
                self._close(path)

    def add(self, path: Path, start: int, content: memoryview) -> Future[None] | None:
        """The same for bytes that are still in memory, where they must stay until the future is done; None if it is now."""
        self._raise()
        if not self._next(path, start, start + len(content)):
            return None
        return self._thread.submit(self._update, path, content)

    def finish(self) -> dict[str, str]:
        """The digests of all files by name, of which no byte will change; for files that were not read to their end, too."""
        for path, start in list(self._reached.items()):
            self._thread.submit(self._hash, path, start, path.stat().st_size)
            self._close(path)
        self._thread.submit(lambda: None).result()
        self._raise()
        return self.finished

    def _next(self, path: Path, start: int, end: int) -> bool:
        """Whether these bytes come next in a file."""
        if path.name in self.finished or start != self._reached.get(path, 0):
            return False
        self._reached[path] = end
        return True

    def _update(self, path: Path, content: memoryview) -> None:
        if self._error is None:
            self._hash_of(path).update(content)

    def _hash_of(self, path: Path) -> Any:
        if path not in self._hashes:
            self._hashes[path] = self._new()
        return self._hashes[path]

    def _close(self, path: Path) -> None:
        del self._reached[path]

        def close() -> None:
            if self._error is None:
                self.finished[path.name] = self._hash_of(path).hexdigest()
                del self._hashes[path]

        self._thread.submit(close)

    def _hash(self, path: Path, start: int, end: int) -> None:
        if self._error is not None:
            return
        try:
            with reading(path):
                file = os.open(path, os.O_RDONLY)
            try:
                for first in range(start, end, _CHUNK):
                    piece = self._buffer[: min(end - first, _CHUNK)]
                    read_exactly(file, piece, first, path)
                    self._update(path, piece)
            finally:
                os.close(file)
        except BaseException as error:  # raised where somebody waits for it
            self._error = self._error or error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with Digests() as digests:
        digests.advance(path, 0, path.stat().st_size, last=True)
        return digests.finish()[path.name]
