"""Hashes of files: BLAKE3 by default, and SHA-256 for formats that require it.

On processors without SHA instructions, SHA-256 runs at 0.3 to 0.6 GB/s per core, slower than a disk. BLAKE3 is as strong and
runs at 4 to 5 GB/s.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from blake3 import blake3

from emp_llm.storage.direct_io import read_exactly, reading

_CHUNK = 1 << 22


class FileHasher:
    """Hashes of growing files, computed in a thread from memory or from the page cache. Use it as a context.

    Args:
        known: hashes of files that are already complete, by name, in hexadecimal.
        new: creates a hash object with `update` and `hexdigest`.
    """

    def __init__(self, known: dict[str, str] | None = None, new: Callable[[], Any] = blake3) -> None:
        self.finished = dict(known or {})
        self._new = new
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-hash")
        self._hashes: dict[Path, Any] = {}
        self._reached: dict[Path, int] = {}
        self._buffer = memoryview(bytearray(_CHUNK))
        self._error: BaseException | None = None

    def __enter__(self) -> "FileHasher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)

    def advance(self, path: Path, start: int, end: int, last: bool = False) -> None:
        """Bytes start to end - 1 of a file are final. They are hashed if all earlier bytes are; `last`: they end the file."""
        self._raise()
        if self._follows(path, start, end):
            self._thread.submit(self._hash, path, start, end)
            if last:
                self._close(path)

    def add(self, path: Path, start: int, content: memoryview) -> Future[None] | None:
        """`advance` for bytes in memory, which must not change until the future is done; None: nothing to wait for."""
        self._raise()
        if not self._follows(path, start, start + len(content)):
            return None
        return self._thread.submit(self._update, path, content)

    def finish(self) -> dict[str, str]:
        """The hashes of all files, by name. Bytes that did not arrive in order are read from the files."""
        for path, start in list(self._reached.items()):
            self._thread.submit(self._hash, path, start, path.stat().st_size)
            self._close(path)
        self._thread.submit(lambda: None).result()
        self._raise()
        return self.finished

    def _follows(self, path: Path, start: int, end: int) -> bool:
        """Whether these bytes follow the last hashed ones of a file."""
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
        except BaseException as error:  # `_raise` raises it in the caller's thread
            self._error = self._error or error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class ReadHasher:
    """BLAKE3 of files that are being read, computed by the reading thread for all bytes that are read in order.

    Args:
        files: the files to hash; others are ignored.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._hashes = {path: blake3() for path in files}
        self._reached = dict.fromkeys(self._hashes, 0)

    def add(self, path: Path, start: int, content: memoryview) -> None:
        """Hash bytes of a file, read from `start` on, if they follow the last hashed ones."""
        if self._reached.get(path) == start:
            self._hashes[path].update(content)
            self._reached[path] = start + len(content)

    def finish(self) -> dict[str, str]:
        """The hash of each file, by name. Bytes that were not read in order are read now."""
        raw = memoryview(bytearray(_CHUNK))
        for path, digest in self._hashes.items():
            size = path.stat().st_size
            if self._reached[path] < size:
                with reading(path), path.open("rb") as file:
                    for first in range(self._reached[path], size, _CHUNK):
                        piece = raw[: min(size - first, _CHUNK)]
                        read_exactly(file.fileno(), piece, first, path)
                        digest.update(piece)
        return {path.name: digest.hexdigest() for path, digest in self._hashes.items()}


def file_hash(path: Path, kind: str = "blake3") -> str:
    """The hash of a file, in hexadecimal.

    Args:
        kind: "blake3", or "sha256" for the Hub and for manifests of earlier versions.
    """
    with FileHasher(new=blake3 if kind == "blake3" else hashlib.sha256) as hasher:
        hasher.advance(path, 0, path.stat().st_size, last=True)
        return hasher.finish()[path.name]
