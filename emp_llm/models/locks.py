"""One run at a time: a lock on a file, which the system lets go when the process ends, however it ends."""

import errno
import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from emp_llm.models.errors import UserError

logger = logging.getLogger(__name__)


class Lock:
    """A lock file; it says who holds it.

    Args:
        path: the file; its folder has to exist.
        what: what is locked, as it stands in the error.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = what
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock, or say who has it.

        Raises:
            UserError: another process holds it.
        """
        while self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    holder = _read_holder(file)
                    os.close(file)
                    sentence = f"another run is at work on it ({holder}). Wait for it, or end it."
                    raise UserError(f"{self._what}: {sentence}") from error
                logger.warning("warning: %s: this file system has no locks; see that no other run writes there.", self.path)
            if _same(file, self.path):
                self._file = file
            else:  # the last holder has just deleted it
                os.close(file)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):  # on a full disk the lock holds as well, without a name
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)

    def release(self) -> None:
        """Delete the file and let the lock go."""
        if self._file is not None:
            if _same(self._file, self.path):
                self.path.unlink()
            os.close(self._file)
            self._file = None


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _read_holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which does not say who it is"
