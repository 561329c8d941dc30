"""Seconds and peak memory of each stage of a run."""

import contextlib
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class Stages:
    """A stopwatch: `with stages("prune"): ...`; `record` then holds seconds and peak bytes, by stage."""

    def __init__(self) -> None:
        self.record: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5")  # resets the high-water mark of resident memory, where Linux lets us
        if torch.cuda.is_available():
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        yield
        entry: dict[str, float] = {"seconds": round(time.perf_counter() - start, 3), "peak_bytes": peak_memory()}
        if torch.cuda.is_available():
            peaks = [torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())]
            entry["peak_cuda_bytes"] = max(peaks)
        self.record[name] = entry


def peak_memory() -> int:
    """The highest resident memory of this process, in bytes: since the last reset on Linux, else since it began."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
