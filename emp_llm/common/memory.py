"""Available memory, and an out-of-memory error that names the options to lower."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.common.wording import count_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class OutOfMemory(UserError):
    """Memory ran out. The message names the options to lower."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can allocate without swapping; None if unknown (only Linux reports them).

    The minimum of the machine's available memory and of the memory left in this process's control groups, which schedulers
    and containers limit. Files in the page cache count as free.

    Args:
        root: folder that holds proc and sys.
    """
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        limits.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2, version 1
                limits += _left_in_group(root / "sys/fs/cgroup" / controllers, path.strip("/"))
    return min(limits, default=None)


def _left_in_group(root: Path, path: str) -> Iterator[int]:
    """Bytes left in a control group and in each enclosing group that has a limit."""
    limit, usage, cached = (
        ("memory.max", "memory.current", "")
        if root.name != "memory"
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    for group in (root / path, *(root / path).parents):
        with suppress(OSError, ValueError, KeyError):
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            files = sum(int(statistics[f"{cached}{kind}_file"]) for kind in ("active", "inactive"))
            yield max(0, int((group / limit).read_text()) - int((group / usage).read_text()) + files)
        if group == root:
            return


def resident_memory(device: "torch.device") -> int:
    """The bytes in use now: by this process, mapped files included; or of the memory of `device`, if that is a GPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    path = Path("/proc/self/statm")
    pages = int(path.read_text().split()[1]) if path.is_file() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> None:
    """Free unused memory: models contain reference cycles, and CUDA's allocator caches freed blocks."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or on the CPU."""
    torch: Any = sys.modules.get("torch")
    kinds = (MemoryError, torch.OutOfMemoryError) if torch is not None else (MemoryError,)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


@contextmanager
def enough_memory(where: "Callable[[], tuple[str, torch.device]]", batch: "Tensor", or_else: str = "") -> Iterator[None]:
    """Turn an out-of-memory error inside this context into OutOfMemory.

    Args:
        where: returns the name of the running module, and its device.
        batch: the current token ids, int64, shape (sequences, length).
        or_else: a further remedy, appended to the message (", or ...").
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        name, device = where()
        raise OutOfMemory(
            f"{name}: out of memory on {device} with {count_of(batch.shape[0], 'sequence')} of "
            f"{count_of(batch.shape[1], 'token')} at a time. "
            f"Lower --batch-size, then --seqlen{or_else}."
        ) from error


@contextmanager
def enough_for_weights(name: str, device: "torch.device") -> Iterator[None]:
    """Turn an out-of-memory error while weights move to a device into OutOfMemory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(
            f"{name}: out of memory on {device}; the weights do not fit. Keep fewer there (--device-map disk, or a JSON map), "
            "or use --dtype bfloat16."
        ) from error
