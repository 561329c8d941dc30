"""An output of a single file: locked for one run at a time, with finished work kept beside it."""

import contextlib
import logging
import os
import shutil
from pathlib import Path
from types import TracebackType

from emp_llm.common.errors import UserError, reason
from emp_llm.common.ranks import ranks
from emp_llm.storage.atomic import sync_path
from emp_llm.storage.disk_errors import explain_disk_error, how_to_resume
from emp_llm.storage.output.lock import FileLock

logger = logging.getLogger(__name__)


def check_output_file(path: Path, overwrite: bool) -> None:
    """Raise UserError if a file cannot be written, or exists and may not be replaced."""
    if path.is_dir() or next(folder for folder in path.absolute().parents if folder.exists()).is_file():
        raise UserError(f"--output {path}: it is a folder, or lies in a file; name a file in a folder.")
    if path.exists() and not overwrite:
        raise UserError(f"--output {path}: it exists; name another file, or add --overwrite.")


class OutputFile:
    """`with OutputFile(path) as out: ...; write it; out.publish()`. Only the first rank locks the output.

    Args:
        path: the file. Until `publish`, finished work is kept beside it, in the folder `progress`.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.progress = self.path.with_name(f".{self.path.name}.progress")
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), f"--output {path}")

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
        explanation = explain_disk_error(error, self.path, [self.progress])
        if explanation is not None:
            raise explanation from error
        if error is not None and (sentence := how_to_resume([self.progress])):
            logger.warning("%s", sentence)

    def publish(self) -> None:
        """Flush the written file to disk, and delete the work kept beside it."""
        sync_path(self.path)
        sync_path(self.path.parent)
        shutil.rmtree(self.progress, ignore_errors=True)
