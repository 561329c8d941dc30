"""Memory: how much there is, and when it runs out, said with where it was and which option to lower."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from emp_llm.models.errors import UserError


class OutOfMemory(UserError):
    """There is not enough memory for what was asked for."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can take without swapping, where the system tells (Linux).

    That is what the machine has left, or the control groups that the process is in, where a scheduler or a container has set
    limits; files in the page cache count as free.

    Args:
        root: where proc and sys are found.
    """
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2, version 1
                found += _left_in_group(root / "sys/fs/cgroup" / controllers, path.strip("/"))
    return min(found, default=None)


def _left_in_group(root: Path, path: str) -> Iterator[int]:
    """Bytes that a control group has left, and those around it, as far as they have limits."""
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


def free_memory() -> None:
    """Give back what nobody holds any more: models sit in cycles of references, and their devices keep what they had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a device or on the CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


@contextmanager
def enough_memory(where: Callable[[], tuple[str, torch.device]], batch: Tensor, or_else: str = "") -> Iterator[None]:
    """While this lasts, OutOfMemory where it does.

    Args:
        where: says what is running, and where.
        batch: token ids, int64, shape (sequences, length), that pass through it.
        or_else: what helps besides smaller batches (", or ...").
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        name, device = where()
        raise OutOfMemory(
            f"{name}: out of memory on {device} with {batch.shape[0]} sequences of {batch.shape[1]} tokens at a time. "
            f"Lower --batch-size, then --seqlen{or_else}."
        ) from error


@contextmanager
def enough_for_weights(name: str, device: torch.device) -> Iterator[None]:
    """While weights are brought to a device, OutOfMemory where they find no room."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(
            f"{name}: out of memory on {device}, which has no room for its weights. Keep less there: --device-map disk, or a "
            "JSON map; or take --dtype bfloat16."
        ) from error
