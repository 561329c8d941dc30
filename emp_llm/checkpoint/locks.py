"""Locks on files, for one run at a time. The system releases a lock when its process ends, even
if it is killed.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from emp_llm.common.errors import UserError, reason
from emp_llm.common.ranks import ranks

logger = logging.getLogger(__name__)
_TICK = 0.05  # seconds between two tries
_UNKNOWN = "an unknown process"
FOLDER = "a folder in place of a file"  # for `link_sentence`


@contextmanager
def lock(path: Path, subject: str | None = None, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of an output file, `.NAME.lock` beside it, in this context; only the first rank
    holds it. The folder is created if missing.

    Args:
        path: the output.
        subject: the output in errors; default: `--output PATH`.
        patience: seconds to wait for another process that holds it.

    Raises:
        UserError: another run holds the lock, or the folder cannot be written.
    """
    if not ranks().main:
        yield
        return
    subject = subject or f"--output {path}"
    path = Path(os.path.abspath(path))
    lock = FileLock(path.with_name(f".{path.name}.lock"), subject)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(patience)
    except OSError as error:
        raise UserError(f"{subject}: cannot be written there ({reason(error)}).") from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.release()


class FileLock:
    """A lock file that names its holder.

    Args:
        path: the file; its folder must exist.
        subject: the locked output, for errors.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self.path = path
        self._subject = subject
        self._file: int | None = None

    def acquire(self, patience: float = 0.0) -> None:
        """Take the lock.

        Args:
            patience: seconds to wait for another process that holds it.

        Raises:
            UserError: another process holds it.
        """
        began = time.monotonic()
        waits = False
        while self._file is None:
            file = open_own(self.path)
            if not _is_lock(file):
                os.close(file)
                raise UserError(
                    f"{self._subject}: {self.path} is no lock of emp-llm, so it is not "
                    "touched. Move it away."
                )
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    holder = _read_holder(file)
                    os.close(file)
                    if time.monotonic() - began < patience:
                        if not waits:
                            logger.info("%s: waiting for another run (%s).", self._subject, holder)
                        waits = True
                        time.sleep(_TICK)
                        continue
                    raise UserError(
                        f"{self._subject}: another run is working on it ({holder}). Wait for that "
                        "run, or stop it."
                    ) from error
                logger.warning(
                    "warning: %s: this file system has no locks; make sure that no other run uses "
                    "this output.",
                    self.path,
                )
            if same_file(file, self.path):
                self._file = file
            else:  # the previous holder has just deleted the file
                os.close(file)
        with suppress(OSError):  # on a full disk, the lock works without naming its holder
            os.ftruncate(self._file, 0)
            since = datetime.now(UTC).isoformat(timespec="seconds")
            content = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.pwrite(self._file, json.dumps(content).encode(), 0)

    @property
    def descriptor(self) -> int:
        """The descriptor of the open file. A process that inherits it shares the lock, which then
        ends when both processes have ended.
        """
        assert self._file is not None
        return self._file

    def release(self) -> None:
        """Delete the file and release the lock."""
        if self._file is not None:
            if same_file(self._file, self.path):
                self.path.unlink()
            os.close(self._file)
            self._file = None


def open_own(path: Path) -> int:
    """Open a file of our work for reading and writing, created if missing.

    Raises:
        UserError: it is a symbolic or hard link, so somebody else chose what would be overwritten;
            or no file.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise UserError(link_sentence(path)) from error
        if error.errno == errno.EISDIR:
            raise UserError(link_sentence(path, FOLDER)) from error
        raise
    about = os.fstat(file)
    if about.st_nlink > 1 or not stat.S_ISREG(about.st_mode):
        os.close(file)
        what = "a link" if about.st_nlink > 1 else "a pipe, socket or device"
        raise UserError(link_sentence(path, what))
    return file


def link_sentence(path: Path, what: str = "a link") -> str:
    """Why a path of our work is not used."""
    return f"{path} is {what}. emp-llm makes none for its work and follows none; delete it."


def holder_of(path: Path) -> str | None:
    """Who holds a lock, in words; None if nobody does."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _read_holder(file) if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    finally:
        os.close(file)
    return None


def same_file(file: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _is_lock(file: int) -> bool:
    """Whether an open file is empty, or names a holder."""
    return os.fstat(file).st_size == 0 or _read_holder(file) != _UNKNOWN


def _read_holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return _UNKNOWN
