"""Open files by path: a model may have more shards than the system lets a process open."""

from contextlib import ExitStack, closing
from pathlib import Path
from threading import Lock

from emp_llm.storage.direct_io import FileReader, FileWriter

_OPEN = 16  # files to read, and files to write, at a time


class FilePool(ExitStack):
    """Open files by path; the oldest are closed when there are too many. `sync` flushes written files to disk.

    Request the file again for each piece of work. Only one thread may request readers, and only one may request writers.

    Args:
        again: the content will be read again; keep it in the page cache.
    """

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self._again = again
        self._readers: dict[Path, FileReader] = {}  # most recently used last
        self._writers: dict[Path, FileWriter] = {}  # most recently opened last
        self._syncing = Lock()
        self.callback(self._close)

    def reader(self, path: Path) -> FileReader:
        """A file to read from."""
        reader = self._readers.pop(path, None) or FileReader(path, self._again)
        self._readers[path] = reader
        if len(self._readers) > _OPEN:
            self._readers.pop(next(iter(self._readers))).close()
        return reader

    def writer(self, path: Path) -> FileWriter:
        """A file to write to."""
        if path not in self._writers:
            with self._syncing:
                self._writers[path] = FileWriter(path)
                if len(self._writers) > _OPEN:
                    oldest = self._writers.pop(next(iter(self._writers)))
                    with closing(oldest):
                        oldest.sync()
        return self._writers[path]

    def sync(self) -> None:
        """Flush everything written so far to disk."""
        with self._syncing:
            for writer in self._writers.values():
                writer.sync()

    def _close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        for writer in self._writers.values():
            writer.close()
