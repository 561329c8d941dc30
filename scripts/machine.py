"""What measurements need from the machine: the name of the processor, the page cache, and processes watched from outside."""

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Watched:
    """A finished process.

    Attributes:
        seconds: wall time, from its start to its end.
        peak: its highest resident memory, in bytes.
    """

    seconds: float
    peak: int


def processor() -> str:
    """The processor for the head of a table: "Intel Xeon, 2 cores, without SHA instructions"."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    fields = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line}
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = (fields.get("flags") or fields.get("Features") or "").split()  # on x86 and on ARM
    sha = (
        f"{'with' if {'sha_ni', 'sha2'} & set(flags) else 'without'} SHA instructions" if flags else "SHA instructions unknown"
    )
    return f"{' '.join(name.split())}, {os.cpu_count()} cores, {sha}"


def run_and_watch(command: Sequence[object], output: bool = True) -> Watched:
    """Run a process to its end. The script ends if it fails.

    The kernel's high-water mark of its memory is read from outside: getrusage would include the memory of this process at
    the fork.

    Args:
        command: the program and its arguments.
        output: show the standard output.
    """
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen([str(word) for word in command], stdout=None if output else subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max(peak, 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1]))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.returncode)
    return Watched(time.perf_counter() - start, peak)


def drop_from_cache(folder: Path) -> None:
    """Write the files of a folder to disk, and drop their pages from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_to_cache(folder: Path) -> None:
    """Read the files of a folder, so that they lie in the page cache."""
    buffer = bytearray(_CHUNK)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
