"""The work folder of an output that is being made: a hidden sibling with a lock, a manifest, and the files so far.

    .NAME.partial/lock            held by the process at work
    .NAME.partial/manifest.json   what defines the run (its signature) and what of it is finished
    .NAME.partial/rows            statistics of the finished rows (`journal`)
    .NAME.partial/files/          what becomes NAME, by one rename, when all is finished

The manifest is replaced in one step, and only when what it calls finished is on the disk.
"""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from emp_llm.models.errors import UserError
from emp_llm.models.files import replace_json
from emp_llm.models.headers import read_json
from emp_llm.models.locks import Lock

logger = logging.getLogger(__name__)
_FORMAT = "emp-llm work 1"


class Work:
    """A work folder.

    Args:
        path: the folder.
        what: the output, as it stands in errors.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.files = path / "files"
        self._what = what
        self._manifest = path / "manifest.json"
        self._state: dict[str, Any] = {}
        self._lock = Lock(path / "lock", what)

    def open(self) -> None:
        """Make the folder where it is not there, and lock it.

        Raises:
            UserError: another run has it.
        """
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                self._lock.acquire()
            except FileNotFoundError:  # another run has just finished with it
                continue
            break
        self._state = self._read()

    def close(self) -> None:
        """Let the folder go; it stays only where something of it is finished."""
        if self.started:
            self.release()
        else:
            self.remove()

    def release(self) -> None:
        """Let the folder go as it is."""
        self._lock.release()

    def remove(self) -> None:
        """Delete the folder; the lock last, so that nobody begins in what is being deleted."""
        if self.path.is_dir():
            self._manifest.unlink(missing_ok=True)
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry != self._lock.path:
                    entry.unlink(missing_ok=True)
            self._lock.release()
            with suppress(OSError):  # not empty: another run has it already
                self.path.rmdir()

    def begin(self, signature: dict[str, Any], anew: bool) -> None:
        """Take up what an earlier run of this signature left, or begin with empty files.

        Args:
            signature: what the result depends on, as JSON.
            anew: throw away what a run of another signature left.

        Raises:
            UserError: a run of another signature left something, and not `anew`.
        """
        signature = {"format": _FORMAT} | signature
        if self.started and self.files.is_dir():
            found = difference(self._state.get("signature", {}), signature)
            if found is None:
                logger.info("%s: the work of an earlier run is continued.", self.path)
                return
            if not anew:
                raise UserError(
                    f"{self._what}: {self.path} holds the work of an unfinished run with {found}. Repeat its command to "
                    "go on with it; to begin anew, add --overwrite or delete that folder."
                )
            logger.info("%s: the work of an unfinished run with %s is thrown away.", self.path, found)
        self._state = {}
        self._manifest.unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)
        (self.path / "rows").unlink(missing_ok=True)
        self.files.mkdir()
        self._state = {"signature": signature}

    @property
    def started(self) -> bool:
        """Whether anything is finished that is worth keeping."""
        return self._state.keys() > {"signature"}

    def get(self, key: str) -> Any:
        """What the manifest says of a part of the work; None where nothing of it is finished."""
        return self._state.get(key)

    def note(self, **changes: Any) -> None:
        """Write into the manifest what is finished; what it is said of has to be on the disk."""
        self._state = self._state | changes
        replace_json(self._manifest, self._state)

    def forget(self) -> None:
        """Nothing is finished: what was made cannot be relied on."""
        self._manifest.unlink(missing_ok=True)
        self._state = {}

    def _read(self) -> dict[str, Any]:
        try:
            return read_json(self._manifest) if self._manifest.is_file() else {}
        except UserError as error:
            logger.warning("warning: %s This run begins anew.", error)
            return {}


def difference(held: Any, asked: Any) -> str | None:
    """The first field in which two signatures differ, in words."""
    found = first_difference(held, asked)
    return found and f"{found[0]} {_short(found[1])}, this one has {_short(found[2])}"


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first field in which two nested records differ, by its path, and what either has there; None if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            found = first_difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
            if found is not None:
                return found
        return None
    return None if old == new else (name, old, new)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
