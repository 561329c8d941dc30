"""Functions that numba compiles, and where their machine code is kept."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeVar

from blake3 import blake3
from numba import config, njit

from emp_llm.common.paths import cache_folder

F = TypeVar("F", bound=Callable[..., object])
_lock = Lock()


def compiler_of(*files: str) -> Callable[[F], F]:
    """A decorator that compiles functions by numba, without the interpreter's lock, and keeps their machine code on disk.

    numba keys its cache by the file of the decorated function, but code from other files is compiled into it. Here the folder
    of the cache has the hash of all files in its name, so an edit of any of them compiles all functions again. The folder is in
    $NUMBA_CACHE_DIR, or else in the cache folder of emp-llm. If it cannot be written, nothing is kept.

    Args:
        files: all files whose code or constants the functions contain, `__file__` among them.
    """
    digest = blake3(b"".join(blake3(Path(file).read_bytes()).digest() for file in files)).hexdigest()[:16]
    folder = Path(config.CACHE_DIR or cache_folder() / "kernels") / digest

    def compiled(function: F) -> F:
        if not _is_writable(folder):
            plain: F = njit(nogil=True)(function)
            return plain
        with _lock:
            before, config.CACHE_DIR = config.CACHE_DIR, str(folder)  # numba reads it when the function is decorated
            try:
                kept: F = njit(nogil=True, cache=True)(function)
                return kept
            finally:
                config.CACHE_DIR = before

    return compiled


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
