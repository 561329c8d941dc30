"""Runs a compiled function on several threads at once: on the threads of torch's OpenMP where they can be found.

torch's threads spin for a while after each of its operations. Other threads would wait for a processor until they sleep.
"""

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

_LIBRARIES = ("libgomp", "libiomp5", "libomp")  # each has GOMP_parallel
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_on_threads(function: int, task: int, threads: int) -> None:
    """Call a function `void run(task)` once on each of several threads, and wait for all.

    Args:
        function: its address.
        task: the address of its argument.
        threads: at least 1.
    """
    if threads == 1:
        _FUNCTION(function)(task)
        return
    parallel = _openmp()
    if parallel is not None:
        parallel(function, task, threads, 0)
        return
    call = _FUNCTION(function)
    others = [_pool(threads - 1).submit(call, task) for _ in range(threads - 1)]
    call(task)
    for other in others:
        if not other.cancel():
            other.result()


@cache
def _openmp() -> Callable[..., Any] | None:
    """GOMP_parallel of the OpenMP library that torch has loaded; None if there is none."""
    for path in _loaded_libraries():
        try:
            parallel = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


def _loaded_libraries() -> list[str]:
    """Paths of the OpenMP libraries in this process, those of torch first."""
    maps = Path("/proc/self/maps")
    if "torch" not in sys.modules or not maps.is_file():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    known = [path for path in paths if path.rpartition("/")[2].startswith(_LIBRARIES)]
    return sorted(known, key=lambda path: ("/torch" not in path, path))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-products")
