"""The temporary folder for weights that transformers converts and then offloads to disk, such as the experts of a mixture.

Most models need none: their offloaded weights are read from the checkpoint. The folder is made when it is first used, and
deleted with its model. It is locked as long as its process lives, so that a later run can delete what a killed run has left.
"""

import logging
import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from emp_llm.checkpoint.locks import FileLock
from emp_llm.common.errors import UserError

logger = logging.getLogger(__name__)
_PREFIX = "emp-llm-offload-"
_LOCK = ".lock"
_YOUNG = 60.0  # seconds in which a run locks its new folder


class OffloadFolder:
    """A folder that is made when its path is asked for; as a context, it is deleted at the end unless it holds weights."""

    def __init__(self) -> None:
        self._path: str | None = None

    def __fspath__(self) -> str:
        if self._path is None:
            _delete_abandoned()
            self._path = tempfile.mkdtemp(prefix=_PREFIX)
            lock = FileLock(Path(self._path) / _LOCK, self._path)
            lock.acquire()
            self._delete = weakref.finalize(self, _delete, self._path, lock, os.getpid())
        return self._path

    def __enter__(self) -> "OffloadFolder":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Delete the folder after an error, or if it holds no weights; else it is deleted with this object."""
        if self._path is not None and (kind is not None or all(path.name == _LOCK for path in Path(self._path).iterdir())):
            self._delete()


def _delete(path: str, lock: FileLock, owner: int) -> None:
    if os.getpid() != owner:  # a fork
        return
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        lock.release()


def _delete_abandoned() -> None:
    """Delete the folders of runs that were killed; of those without a lock, which older versions made, only the empty ones."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's
            if time.time() - folder.stat().st_mtime < _YOUNG:
                continue
            if not (folder / _LOCK).is_file():
                folder.rmdir()
                continue
            lock = FileLock(folder / _LOCK, str(folder))
            try:
                lock.acquire()
            except UserError:  # its run is alive
                continue
            _delete(str(folder), lock, os.getpid())
            logger.debug("%s: deleted; the run that made it was killed.", folder)
