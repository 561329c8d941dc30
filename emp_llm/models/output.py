"""The output folder: it appears under its name only when it is complete."""

import contextlib
import errno
import os
import shutil
from pathlib import Path
from types import TracebackType

from emp_llm.models.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from emp_llm.models.errors import UserError


class OutputFolder:
    """A folder made aside and renamed when done: `with OutputFolder(...) as out: ...; out.publish()`.

    Without `publish`, or after an error, nothing is left, and what stood at the path before stands there still.

    Args:
        path: where the output shall be.
        source: what it is made from; never touched.
        overwrite: replace an older checkpoint at the path.

    Raises:
        UserError: the path exists (and overwrite is not given, or it is not a checkpoint), it is the source, lies in it or
            holds it, or there is too little space.
    """

    def __init__(self, path: Path, source: Checkpoint, overwrite: bool = False) -> None:
        self.path = Path(os.path.abspath(path))
        self.partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        self._made: list[Path] = []
        real, origin = self.path.resolve(), source.folder.resolve()
        if real == origin or real in origin.parents or origin in real.parents:
            raise UserError(f"--output {path}: it is the input, lies in it or holds it; name another folder.")
        if os.path.lexists(self.path):
            if not overwrite:
                raise UserError(f"--output {path}: it exists; name another folder, or add --overwrite.")
            if not _replaceable(self.path):
                raise UserError(
                    f"--output {path}: it is not a model folder, so --overwrite leaves it alone; remove it yourself."
                )
        self._check_space(needed_bytes(source))

    def __enter__(self) -> "OutputFolder":
        try:
            for folder in reversed([folder for folder in self.path.parents if not folder.exists()]):
                folder.mkdir()
                self._made.append(folder)
            self.partial.mkdir()
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be written there ({error.strerror}).") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        if not self.path.exists():
            for folder in reversed(self._made):
                with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
                    folder.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"--output {self.path}: the disk is full. Free some space, or name an --output elsewhere."
            ) from error

    def publish(self) -> None:
        """Give the folder its name; an older one is replaced."""
        _sync(self.partial)
        old = self.partial.with_name(self.partial.name + "-old")
        if self.path.exists():
            self.path.rename(old)
        self.partial.rename(self.path)
        _sync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _check_space(self, needed: int) -> None:
        parent = next(folder for folder in self.path.parents if folder.exists())
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise UserError(
                f"--output {self.path}: it needs {needed:,} bytes and the disk has {free:,} free. Free some "
                "space, or name an --output elsewhere."
            )


def needed_bytes(source: Checkpoint) -> int:
    """The size of the checkpoint to be written: that of the source's shards and side files."""
    files = [*source.shards, *(source.folder / relative for relative in source.side_files())]
    return sum(file.stat().st_size for file in files)


def _replaceable(path: Path) -> bool:
    if not path.is_dir() or path.is_symlink():
        return False
    names = {entry.name for entry in path.iterdir()}
    return not names or bool(names & {INDEX_NAME, SINGLE_NAME, "emp_report.json"})


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
