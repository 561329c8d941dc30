"""The work folder of an unfinished output: a hidden folder beside it, with a lock, a manifest, and the files so far.

    .NAME.partial/lock            held by the running process
    .NAME.partial/manifest.json   the signature of the run, and its finished work
    .NAME.partial/rows            statistics of the finished rows (`journal`)
    .NAME.partial/fitted/         weights of finished blocks of a refit
    .NAME.partial/files/          renamed to NAME when everything is finished

The manifest is replaced atomically, and only after the work that it lists is on disk.
"""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from emp_llm.common.errors import UserError
from emp_llm.storage.atomic import write_json
from emp_llm.storage.json_files import read_json
from emp_llm.storage.output.lock import FileLock
from emp_llm.storage.output.signature import describe_difference

logger = logging.getLogger(__name__)
_FORMAT = "emp-llm work 2"


class WorkFolder:
    """A work folder.

    Args:
        path: the folder.
        subject: the output, for errors.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self.path = path
        self.files = path / "files"
        self.fitted = path / "fitted"
        self._subject = subject
        self._manifest = path / "manifest.json"
        self._state: dict[str, Any] = {}
        self._lock = FileLock(path / "lock", subject)

    def open(self) -> None:
        """Create the folder if missing, and lock it.

        Raises:
            UserError: another run holds it.
        """
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                self._lock.acquire()
            except FileNotFoundError:  # another run has just deleted it
                continue
            break
        self._state = self._read()

    def close(self) -> None:
        """Release the folder. Delete it if it holds no finished work."""
        if self.started:
            self.release()
        else:
            self.remove()

    def release(self) -> None:
        """Release the folder, and keep it."""
        self._lock.release()

    def remove(self) -> None:
        """Delete the folder; the lock goes last, so that no other run starts in a folder that is being deleted."""
        if self.path.is_dir():
            self._manifest.unlink(missing_ok=True)
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry != self._lock.path:
                    entry.unlink(missing_ok=True)
            self._lock.release()
            with suppress(OSError):  # not empty: another run already has it
                self.path.rmdir()

    def begin(self, signature: dict[str, Any], discard_other: bool) -> None:
        """Resume the work of an earlier run with this signature, or start without files.

        Args:
            signature: everything that the result depends on, as JSON.
            discard_other: discard the work of a run with another signature.

        Raises:
            UserError: a run with another signature left work, and `discard_other` is false.
        """
        signature = {"format": _FORMAT} | signature
        if self.started and self.files.is_dir():
            difference = describe_difference(self._state.get("signature", {}), signature)
            if difference is None:
                logger.info("%s: resuming the work of an earlier run.", self.path)
                return
            if not discard_other:
                raise UserError(
                    f"{self._subject}: {self.path} holds the work of an unfinished run with {difference}. Repeat its command "
                    "to resume it; to start over, add --overwrite or delete that folder."
                )
            logger.info("%s: discarding the work of an unfinished run with %s.", self.path, difference)
        self._state = {}
        self._manifest.unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)
        shutil.rmtree(self.fitted, ignore_errors=True)
        (self.path / "rows").unlink(missing_ok=True)
        self.files.mkdir()
        self._state = {"signature": signature}

    @property
    def started(self) -> bool:
        """Whether the folder holds finished work."""
        return self._state.keys() > {"signature"}

    def get(self, key: str) -> Any:
        """The manifest's entry for a part of the work; None if there is none."""
        return self._state.get(key)

    def note(self, **changes: Any) -> None:
        """Record finished work in the manifest. The work itself must already be on disk."""
        self._state = self._state | changes
        write_json(self._manifest, self._state)

    def forget(self) -> None:
        """Discard the record of finished work, because the work is not valid."""
        self._manifest.unlink(missing_ok=True)
        self._state = {}

    def _read(self) -> dict[str, Any]:
        try:
            return read_json(self._manifest) if self._manifest.is_file() else {}
        except UserError as error:
            logger.warning("warning: %s This run starts over.", error)
            return {}
