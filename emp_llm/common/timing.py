"""Seconds and peak memory of each stage of a run."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emp_llm.common.wording import format_bytes

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
# getrusage counts in kB on Linux, in bytes on macOS.
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


class Stopwatch:
    """Times stages: `with stopwatch("prune"): ...`. `record` holds the seconds and peak bytes of each stage."""

    def __init__(self) -> None:
        self.record: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5")  # resets the peak of resident memory, if Linux allows it
        for device in range(_gpus()):
            sys.modules["torch"].cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        yield
        entry: dict[str, float] = {"seconds": round(time.perf_counter() - start, 3), "peak_bytes": peak_memory()}
        if _gpus():
            cuda: Any = sys.modules["torch"].cuda
            entry["peak_cuda_bytes"] = max(cuda.max_memory_allocated(device) for device in range(_gpus()))
        self.record[name] = entry


def peak_memory() -> int:
    """Peak resident memory of this process in bytes: since the last reset on Linux, since its start elsewhere."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT


def memory_words() -> str:
    """The peak memory of this process as text, and that of its GPUs."""
    words = f"peak memory {format_bytes(peak_memory())}"
    if _gpus():
        cuda: Any = sys.modules["torch"].cuda
        words += f", on the GPU {format_bytes(max(cuda.max_memory_allocated(device) for device in range(_gpus())))}"
    return words


def _gpus() -> int:
    """Number of GPUs that this process may have used; 0 before torch is imported."""
    torch: Any = sys.modules.get("torch")
    return int(torch.cuda.device_count()) if torch is not None and torch.cuda.is_available() else 0
