"""The output folder: it appears under its name only when it is complete."""

import contextlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from emp_llm.models.checkpoint import INDEX_NAME, PACK_NAME, SINGLE_NAME, Checkpoint
from emp_llm.models.errors import UserError, reason
from emp_llm.models.faults import explained, way_on
from emp_llm.models.files import sync_path, sync_tree
from emp_llm.models.locks import Lock
from emp_llm.models.ranks import ranks
from emp_llm.models.work import Work

logger = logging.getLogger(__name__)


class OutputFolder:
    """A folder made aside and renamed when done: `with OutputFolder(...) as out: out.begin(...); ...; out.publish()`.

    Without `publish`, or after an error, what stood at the path before stands there still. What is finished of the new one
    stays in `work`, for the same run to go on with; where nothing is, nothing is left.

    Args:
        path: where the output shall be.
        sources: folders that it is made from; never touched.
        needed: bytes that will be written.
        overwrite: replace an older checkpoint at the path, and what an unfinished run of another kind left of its work.
        option: what the path is called in errors.

    Raises:
        UserError: the path exists (and overwrite is not given, or it is not a checkpoint), it is the source, lies in it or
            holds it, or there is too little space.
    """

    def __init__(
        self, path: Path, sources: Sequence[Path], needed: int, overwrite: bool = False, option: str = "--output"
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self._option = option
        self.work = Work(self.path.with_name(f".{self.path.name}.partial"), f"{option} {path}")
        self.files = self.work.files
        self.calibration = self.path.with_name(f".{self.path.name}.calibration")  # finished blocks of a calibration
        self._overwrite = overwrite
        self._old = self.work.path / "replaced"
        self._made: list[Path] = []
        real = self.path.resolve()
        for origin in (source.resolve() for source in sources):
            if real == origin or real in origin.parents or origin in real.parents:
                raise UserError(f"{option} {path}: it is the input, lies in it or holds it; name another folder.")
        self._check_path()
        self._check_space(needed)

    def __enter__(self) -> "OutputFolder":
        try:
            for folder in reversed([folder for folder in self.path.parents if not folder.exists()]):
                folder.mkdir()
                self._made.append(folder)
            self.work.open()
            try:
                self._put_back()  # a run was stopped between the two renames
                if self._old.is_dir():  # or behind them
                    shutil.rmtree(self._old)
                self._check_path()  # another run may have ended since
            except BaseException:
                self._close()
                raise
        except OSError as error:
            self.work.release()
            raise UserError(f"{self._option} {self.path}: cannot be written there ({reason(error)}).") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._close()
        if not self.path.exists():
            for folder in reversed(self._made):
                with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                    folder.rmdir()
        kept = (self.work.path, self.calibration)
        explanation = explained(error, self.path, kept, self._option)
        if explanation is not None:
            raise explanation from error
        if error is not None and (sentence := way_on(kept)):
            logger.warning("%s", sentence)

    def begin(self, signature: dict[str, Any]) -> None:
        """Take up the work of an earlier run of this signature, or begin.

        Raises:
            UserError: an unfinished run of another signature has left work, and there is no `overwrite`.
        """
        self.work.begin(signature, self._overwrite)

    def publish(self) -> None:
        """Give the folder its name; an older one is replaced."""
        sync_tree(self.files)
        self._check_path()
        if self.path.exists():
            os.replace(self.path, self._old)
        try:
            os.replace(self.files, self.path)
        except OSError:
            self._put_back()
            raise
        sync_path(self.path.parent)
        self.work.remove()

    def _close(self) -> None:
        """Let the work go; not what was to be replaced, where that still waits in it to be put back."""
        if self._old.is_dir():
            self.work.release()
        else:
            self.work.close()

    def _put_back(self) -> None:
        """What was to be replaced stands again where it stood, unless what replaces it does."""
        if self._old.is_dir() and not self.path.exists():
            os.replace(self._old, self.path)

    def _check_path(self) -> None:
        if os.path.lexists(self.path):
            if not self._overwrite:
                raise UserError(f"{self._option} {self.path}: it exists; name another folder, or add --overwrite.")
            if not _replaceable(self.path):
                raise UserError(
                    f"{self._option} {self.path}: it is not a model folder, so --overwrite leaves it alone; remove it yourself."
                )

    def _check_space(self, needed: int) -> None:
        parent = next(folder for folder in self.path.parents if folder.exists())
        free = shutil.disk_usage(parent).free
        with contextlib.suppress(OSError):  # what an unfinished run has written need not be written again
            needed -= sum(path.stat().st_blocks * 512 for path in self.files.rglob("*"))
        if free < needed:
            raise UserError(
                f"{self._option} {self.path}: it needs {needed:,} bytes and the disk has {free:,} free. Free some "
                f"space, or name an {self._option} elsewhere."
            )


class OutputFile:
    """An output of one file, for one run at a time: `with OutputFile(path) as out: ...; write it; out.publish()`.

    Args:
        path: the file. Finished work is kept beside it, in the folder `progress`, until `publish`.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.progress = self.path.with_name(f".{self.path.name}.progress")
        self._lock = Lock(self.path.with_name(f".{self.path.name}.lock"), f"--output {path}")

    def __enter__(self) -> "OutputFile":
        if ranks().main:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()
            except OSError as error:
                raise UserError(f"--output {self.path}: cannot be written there ({reason(error)}).") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._lock.release()
        explanation = explained(error, self.path, [self.progress])
        if explanation is not None:
            raise explanation from error
        if error is not None and (sentence := way_on([self.progress])):
            logger.warning("%s", sentence)

    def publish(self) -> None:
        """The file is written: see that it is on the disk, and delete what was kept for making it."""
        sync_path(self.path)
        sync_path(self.path.parent)
        shutil.rmtree(self.progress, ignore_errors=True)


def needed_bytes(source: Checkpoint) -> int:
    """The size of the checkpoint to be written: that of the source's shards and side files."""
    files = [*source.shards, *(source.folder / relative for relative in source.side_files())]
    return sum(file.stat().st_size for file in files)


def _replaceable(path: Path) -> bool:
    if not path.is_dir() or path.is_symlink():
        return False
    names = {entry.name for entry in path.iterdir()}
    return not names or bool(names & {INDEX_NAME, SINGLE_NAME, PACK_NAME, "emp_report.json"})
