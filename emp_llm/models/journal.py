"""How far the writing of a pruned checkpoint has come, so that a stopped one goes on there.

The pieces of all shards are written in one order, so that one pair of numbers says what is finished: whole pieces, and of the
next one rows (of a target) or bytes (of a copy). It is written about once a second by a thread of its own: first the data go
to the disk, then the pair; a crash between the two costs that second and nothing else. What became of finished rows lies in a
file, so that the report of a continued run is that of an uninterrupted one.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from emp_llm.models.digests import Digests
from emp_llm.models.direct import bytes_of, read_exactly, write_exactly
from emp_llm.models.errors import ReadError, UserError
from emp_llm.models.files import OpenFiles
from emp_llm.models.work import Work

_SECONDS = 1.0  # between two entries, at least
_RATIO = 10  # and at least so many times what the last entry took, where the disk is slow
STATISTICS = ("kept", "zeros", "kept_mass", "mass", "n_eff", "s_eff")


class Journal:
    """The journal of one writing; without a work folder it forgets.

    Args:
        work: the work folder; its entry "pruned" says what an earlier run finished.
    """

    def __init__(self, work: Work | None = None) -> None:
        self._work = work
        entry = (work.get("pruned") if work is not None else None) or {"segments": 0, "units": 0, "sha256": {}}
        self._start: tuple[int, int] = (entry["segments"], entry["units"])
        self.digests = Digests(entry["sha256"])
        self._rows: int | None = None
        self._reached = self._start
        self._commit: Future[None] | None = None
        self._next = time.monotonic() + _SECONDS

    @contextmanager
    def keeping(self, files: OpenFiles) -> Iterator[None]:
        """Keep the journal of what is written into some files; when the block ends well, all of it is on the disk.

        When it ends otherwise, what was written is noted once more, as far as that can be done.
        """
        self._files = files
        if self._work is not None:
            self._rows = os.open(self._work.path / "rows", os.O_RDWR | os.O_CREAT, 0o666)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-sync")
        try:
            with self.digests:
                yield
                self._wait()
                self.digests.finish()
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
        """How many of a piece's units (rows or bytes) an earlier run finished."""
        finished, part = self._start
        return units if segment < finished else min(part, units) if segment == finished else 0

    def reached(self, segment: int, units: int) -> None:
        """So many units of a piece are written, and all pieces before it. Called in the order of the writing."""
        self._reached = max(self._reached, (segment, units))
        if self._work is None or time.monotonic() < self._next or (self._commit is not None and not self._commit.done()):
            return
        self._wait()
        self._commit = self._thread.submit(self._write, *self._reached)

    def final(self, path: Path, start: int, end: int, last: bool) -> None:
        """Bytes start to end - 1 of a file will not change; with them the file is complete, where they are the `last`."""
        if self._work is not None:
            self.digests.advance(path, start, end, last)

    def hash(self, path: Path, start: int, content: memoryview) -> Future[None] | None:
        """The same for bytes in memory, before or while they are written; where they must stay until the future is done."""
        return self.digests.add(path, start, content) if self._work is not None else None

    def put(self, first: int, statistics: dict[str, Tensor]) -> None:
        """Keep what became of rows.

        Args:
            first: the first of them, counted over all targets.
            statistics: by the names of STATISTICS, one number for each row.
        """
        if self._rows is None:
            return
        table = torch.stack([statistics[name] for name in STATISTICS], dim=1)
        write_exactly(self._rows, bytes_of(table), first * 8 * len(STATISTICS))

    def get(self, first: int, rows: int) -> dict[str, Tensor]:
        """What became of rows that an earlier run finished: float64, shape (rows,), by name."""
        table = torch.empty((rows, len(STATISTICS)), dtype=torch.float64)
        if rows and self._work is not None and self._rows is not None:
            raw = bytes_of(table)
            read_exactly(self._rows, raw, first * 8 * len(STATISTICS), self._work.path / "rows")
        return {name: table[:, column] for column, name in enumerate(STATISTICS)}

    def forget(self) -> None:
        """Nothing that was written counts."""
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
        finished = dict(self.digests.finished)  # before the rest: a digest may be of a piece that is reached meanwhile
        self._files.sync()
        os.fsync(self._rows)
        self._work.note(pruned={"segments": segments, "units": units, "sha256": finished})
        now = time.monotonic()
        self._next = now + max(_SECONDS, _RATIO * (now - began))
