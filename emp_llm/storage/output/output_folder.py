"""The output folder, which appears under its name only when it is complete."""

import contextlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from emp_llm.common.errors import UserError, reason
from emp_llm.common.file_names import INDEX_NAME, PACK_NAME, REPORT_NAME, SINGLE_NAME
from emp_llm.common.wording import format_bytes
from emp_llm.storage.atomic import sync_path, sync_tree
from emp_llm.storage.disk_errors import explain_disk_error, how_to_resume
from emp_llm.storage.output.work_folder import WorkFolder

logger = logging.getLogger(__name__)


class OutputFolder:
    """A folder that is written under another name, and renamed when it is complete.

        with OutputFolder(...) as out:
            out.begin(signature)
            ...                      # write into out.files
            out.publish()

    Without `publish`, or after an error, the path is unchanged. Finished work stays in `work`, for the same run to resume; if
    no work is finished, nothing is left behind.

    Args:
        path: the output.
        sources: input folders; they are never changed.
        needed: bytes that will be written.
        overwrite: replace an older checkpoint at the path, and discard the work of an unfinished run with other options.
        option: the option that names the path, for errors.

    Raises:
        UserError: the path exists and may not be replaced; it is a source, inside one or around one; or the disk has too
            little space.
    """

    def __init__(
        self, path: Path, sources: Sequence[Path], needed: int, overwrite: bool = False, option: str = "--output"
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self._option = option
        self.work = WorkFolder(self.path.with_name(f".{self.path.name}.partial"), f"{option} {path}")
        self.files = self.work.files
        self.calibration = self.path.with_name(f".{self.path.name}.calibration")  # finished blocks of a calibration
        self._overwrite = overwrite
        self._old = self.work.path / "replaced"
        self._created: list[Path] = []
        real = self.path.resolve()
        for origin in (source.resolve() for source in sources):
            if real == origin or real in origin.parents or origin in real.parents:
                raise UserError(f"{option} {path}: it is the input folder, lies inside it or contains it; name another folder.")
        self._check_path()
        self._check_space(needed)

    def __enter__(self) -> "OutputFolder":
        try:
            for folder in reversed([folder for folder in self.path.parents if not folder.exists()]):
                folder.mkdir()
                self._created.append(folder)
            self.work.open()
            try:
                self._restore_old()  # if an earlier run stopped between the two renames
                if self._old.is_dir():  # or after them
                    shutil.rmtree(self._old)
                self._check_path()  # another run may have written it in the meantime
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
            for folder in reversed(self._created):
                with contextlib.suppress(OSError):  # not empty: another process uses it by now
                    folder.rmdir()
        kept = (self.work.path, self.calibration)
        explanation = explain_disk_error(error, self.path, kept, self._option)
        if explanation is not None:
            raise explanation from error
        if error is not None and (sentence := how_to_resume(kept)):
            logger.warning("%s", sentence)

    def begin(self, signature: dict[str, Any]) -> None:
        """Resume the work of an earlier run with this signature, or start with no work.

        Raises:
            UserError: an unfinished run with another signature left work, and `overwrite` is false.
        """
        self.work.begin(signature, self._overwrite)

    def publish(self) -> None:
        """Rename the folder to its final name, replacing an older output."""
        sync_tree(self.files)
        self._check_path()
        if self.path.exists():
            os.replace(self.path, self._old)
        try:
            os.replace(self.files, self.path)
        except OSError:
            self._restore_old()
            raise
        sync_path(self.path.parent)
        shutil.rmtree(self.calibration, ignore_errors=True)  # of an unfinished run with other options
        self.work.remove()

    def _close(self) -> None:
        """Release the work folder. Keep it if it still holds an older output, which the next run restores."""
        if self._old.is_dir():
            self.work.release()
        else:
            self.work.close()

    def _restore_old(self) -> None:
        """Restore the older output, unless the new one is in its place."""
        if self._old.is_dir() and not self.path.exists():
            os.replace(self._old, self.path)

    def _check_path(self) -> None:
        if os.path.lexists(self.path):
            if not self._overwrite:
                raise UserError(f"{self._option} {self.path}: it exists; name another folder, or add --overwrite.")
            if not _replaceable(self.path):
                raise UserError(
                    f"{self._option} {self.path}: it is not a model folder, so --overwrite does not replace it; remove it "
                    "yourself."
                )

    def _check_space(self, needed: int) -> None:
        parent = next(folder for folder in self.path.parents if folder.exists())
        free = shutil.disk_usage(parent).free
        with contextlib.suppress(OSError):  # an unfinished run may have written a part already
            needed -= sum(path.stat().st_blocks * 512 for path in self.files.rglob("*"))
        if free < needed:
            raise UserError(
                f"{self._option} {self.path}: it needs {format_bytes(needed)}, and the disk has {format_bytes(free)} free. "
                f"Free some space, or choose another {self._option}."
            )


def _replaceable(path: Path) -> bool:
    if not path.is_dir() or path.is_symlink():
        return False
    names = {entry.name for entry in path.iterdir()}
    return not names or bool(names & {INDEX_NAME, SINGLE_NAME, PACK_NAME, REPORT_NAME})
