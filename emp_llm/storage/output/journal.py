"""The journal of a pruned checkpoint: the progress of its writing, from which an interrupted run resumes.

The segments of all shards are written in one order, so two numbers record the progress: the finished segments, and the finished
units of the next one (rows of a target, or bytes of a copy). About once a second a thread flushes the data to disk and then
saves the two numbers; a crash costs at most the work since then. The statistics of finished rows are saved in a file, so that
the report of a resumed run equals that of an uninterrupted one.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from emp_llm.common.errors import ReadError, UserError
from emp_llm.storage.buffers import Block, bytes_of
from emp_llm.storage.direct_io import read_exactly, write_exactly
from emp_llm.storage.file_pool import FilePool
from emp_llm.storage.hashing import FileHasher
from emp_llm.storage.output.work_folder import WorkFolder

_SECONDS = 1.0  # minimum time between two entries
_RATIO = 10  # the same as a multiple of the time that the last entry took, for slow disks
STATISTICS = ("kept", "zeros", "kept_mass", "mass", "n_eff", "s_eff")


class Journal:
    """The journal of one checkpoint. Without a work folder, nothing is saved.

    Args:
        work: the work folder. Its entry "pruned" holds the progress of an earlier run.
    """

    def __init__(self, work: WorkFolder | None = None) -> None:
        self._work = work
        entry = (work.get("pruned") if work is not None else None) or {"segments": 0, "units": 0, "hashes": {}}
        self._start: tuple[int, int] = (entry["segments"], entry["units"])
        self.hasher = FileHasher(entry["hashes"])
        self._rows: int | None = None
        self._reached = self._start
        self._commit: Future[None] | None = None
        self._next = time.monotonic() + _SECONDS

    @contextmanager
    def keeping(self, files: FilePool) -> Iterator[None]:
        """Keep the journal while files are written. At the end of the context, everything is on disk.

        After an error, the progress is saved once more if possible.
        """
        self._files = files
        if self._work is not None:
            self._rows = os.open(self._work.path / "rows", os.O_RDWR | os.O_CREAT, 0o666)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-sync")
        try:
            with self.hasher:
                yield
                self._wait()
                self.hasher.finish()
                self._write(*self._reached)
        except BaseException as error:
            if isinstance(error, ReadError) or not isinstance(error, UserError):
                with suppress(OSError):
                    self._wait()
                    self._write(*self._reached)
            raise
        finally:
            self._thread.shutdown(cancel_futures=True)
            if self._rows is not None:
                os.close(self._rows)

    def done(self, segment: int, units: int) -> int:
        """The number of a segment's units (rows or bytes) that an earlier run finished."""
        finished, part = self._start
        return units if segment < finished else min(part, units) if segment == finished else 0

    def reached(self, segment: int, units: int) -> None:
        """Note that `units` units of a segment and all earlier segments are written. Call this in the order of writing."""
        self._reached = max(self._reached, (segment, units))
        if self._work is None or time.monotonic() < self._next or (self._commit is not None and not self._commit.done()):
            return
        self._wait()
        self._commit = self._thread.submit(self._write, *self._reached)

    def final(self, path: Path, start: int, end: int, last: bool) -> None:
        """Note that bytes start to end - 1 of a file are final; `last`: the file is complete."""
        if self._work is not None:
            self.hasher.advance(path, start, end, last)

    def hash(self, path: Path, start: int, content: memoryview) -> Future[None] | None:
        """`final` for bytes in memory, which must not change until the future is done; None: nothing to wait for."""
        return self.hasher.add(path, start, content) if self._work is not None else None

    def put(self, first: int, statistics: Mapping[str, Block]) -> None:
        """Save the statistics of rows.

        Args:
            first: index of the first row among the rows of all targets.
            statistics: one number per row, by the names of STATISTICS.
        """
        if self._rows is None:
            return
        table = np.stack([statistics[name] for name in STATISTICS], axis=1)
        write_exactly(self._rows, bytes_of(table), first * 8 * len(STATISTICS))

    def get(self, first: int, rows: int) -> dict[str, Block]:
        """The statistics of rows that an earlier run finished: float64, shape (rows,), by name."""
        table = np.empty((rows, len(STATISTICS)))
        if rows and self._work is not None and self._rows is not None:
            read_exactly(self._rows, bytes_of(table), first * 8 * len(STATISTICS), self._work.path / "rows")
        return {name: table[:, column] for column, name in enumerate(STATISTICS)}

    def forget(self) -> None:
        """Discard the progress: nothing written so far is valid."""
        if self._work is not None:
            self._work.forget()

    def _wait(self) -> None:
        if self._commit is not None:
            self._commit.result()

    def _write(self, segments: int, units: int) -> None:
        if self._work is None or self._rows is None:
            self._files.sync()
            return
        began = time.monotonic()
        hashes = dict(self.hasher.finished)  # taken before the sync, so that they cover only bytes that are on disk
        self._files.sync()
        os.fsync(self._rows)
        self._work.note(pruned={"segments": segments, "units": units, "hashes": hashes})
        now = time.monotonic()
        self._next = now + max(_SECONDS, _RATIO * (now - began))
