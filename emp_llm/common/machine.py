"""The machine and the process: cores, memory with errors that name the options to lower, time of
stages, versions, command.
"""

import ctypes
import gc
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from emp_llm.common.errors import UserError, count_of, format_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PACKAGES = (
    "emp-llm",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "lm-eval",
)
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_SOFT_PAUSE = 1  # omp_pause_soft
_OPENMP = ("libgomp", "libiomp5", "libomp")  # each has GOMP_parallel
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
# getrusage counts in kB on Linux, in bytes on macOS.
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


def available_cores() -> int:
    """The number of CPU cores that this process may use: by its affinity, if the system has that,
    else all.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class OutOfMemory(UserError):
    """Memory ran out. The message names the options to lower."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can allocate without swapping.

    The minimum of the machine's available memory and of the memory left in this process's control
    groups, which schedulers and containers limit. Files in the page cache count as free.

    Args:
        root: folder that holds proc and sys, where the groups are listed.
    """
    import psutil  # type: ignore[import-untyped]

    limits = [int(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):  # version 2, version 1
                limits += _left_in_group(root / "sys/fs/cgroup" / controllers, path.strip("/"))
    return min(limits)


def _left_in_group(root: Path, path: str) -> Iterator[int]:
    """Bytes left in a control group and in each enclosing group that has a limit."""
    limit, usage, cached = (
        ("memory.max", "memory.current", "")
        if root.name != "memory"
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    for group in (root / path, *(root / path).parents):
        with suppress(OSError, ValueError, KeyError):
            statistics = dict(
                line.split() for line in (group / "memory.stat").read_text().splitlines()
            )
            files = sum(int(statistics[f"{cached}{use}_file"]) for use in ("active", "inactive"))
            yield max(
                0, int((group / limit).read_text()) - int((group / usage).read_text()) + files
            )
        if group == root:
            return


def resident_memory(device: "torch.device") -> int:
    """The bytes in use now: by this process, mapped files included; or of the memory of
    `device`, if that is a GPU.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)


def free_memory() -> None:
    """Free unused memory: models contain reference cycles, and CUDA's allocator caches freed
    blocks.
    """
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()  # nothing before CUDA is initialised


def trim_heap() -> None:
    """Return free pages of the heap to the system, if the C library can: glibc keeps those
    between pieces in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def at_most_more(number: int) -> Iterator[None]:
    """Inside this context, allocations of more than `number` bytes in all raise MemoryError, where
    the system can limit a process.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        wanted = pages * resource.getpagesize() + number
        resource.setrlimit(
            resource.RLIMIT_AS, (wanted if before[1] < 0 else min(wanted, before[1]), before[1])
        )
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or on the CPU."""
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    # The CPU's, and that of Apple's GPUs.
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("allocate memory", "backend out of memory")
    )


@contextmanager
def out_of_memory(message: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error inside this context into OutOfMemory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(message()) from error


def enough_memory(
    where: "Callable[[], tuple[str, torch.device]]", batch: "Tensor", or_else: str = ""
) -> AbstractContextManager[None]:
    """A context of a forward pass, in which an out-of-memory error becomes OutOfMemory.

    Args:
        where: returns the name of the running module, and its device.
        batch: the current token ids, int64, shape (sequences, length).
        or_else: a further remedy, appended to the message (", or ...").
    """

    def message() -> str:
        size = f"{count_of(batch.shape[0], 'sequence')} of {count_of(batch.shape[1], 'token')}"
        lower = "--seqlen" if batch.shape[0] == 1 else "--batch-size, then --seqlen"
        name, device = where()
        return f"{name}: out of memory on {device} with {size} at a time. Lower {lower}{or_else}."

    return out_of_memory(message)


class Times(TypedDict):
    """What a stage took."""

    seconds: float
    peak_bytes: NotRequired[float]
    peak_cuda_bytes: NotRequired[float]


class Stopwatch:
    """Times stages: `with stopwatch("prune"): ...`. `record` holds the seconds and peak bytes of
    each stage.

    Args:
        peaks: in a command of the shell, measure the peaks, which sets those of the process back. A
            program of others may measure its own.
    """

    def __init__(self, peaks: bool = True) -> None:
        self._peaks = peaks and UserError.in_shell
        self.record: dict[str, Times] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._peaks:
            _reset_peaks()
        start = time.perf_counter()
        yield
        entry: Times = {"seconds": round(time.perf_counter() - start, 3)}
        if self._peaks:
            entry["peak_bytes"] = peak_memory()
            if _gpus():
                entry["peak_cuda_bytes"] = _peak_of_gpus()
        self.record[name] = entry


def _reset_peaks() -> None:
    """Let the peaks of memory be those from now on, of this process and of its GPUs."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")  # of resident memory, if Linux allows it
    torch: Any = sys.modules.get("torch")
    for device in range(_gpus()):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory() -> int:
    """Peak resident memory of this process in bytes: since the last reset on Linux, since its
    start elsewhere.
    """
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RUSAGE_UNIT


def peak_memory_text() -> str:
    """The peak memory of this process as text, and that of its GPUs."""
    on_gpu = f", on the GPU {format_bytes(_peak_of_gpus())}" if _gpus() else ""
    return f"peak memory {format_bytes(peak_memory())}{on_gpu}"


def _peak_of_gpus() -> int:
    """The largest peak memory of the GPUs in bytes."""
    torch: Any = sys.modules["torch"]
    return max(int(torch.cuda.max_memory_allocated(device)) for device in range(_gpus()))


def _gpus() -> int:
    """Number of GPUs that this process may have used; 0 before CUDA is initialised, which torch
    does at the first use of a GPU.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.device_count())


def versions(*others: str) -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a result, and of others."""
    installed = {"python": sys.version.split()[0]}
    for package in (*_PACKAGES, *others):
        with suppress(PackageNotFoundError):
            installed[package] = _version(package)
    return installed


# A run asks several times, and each time all metadata of the package would be parsed.
_version = cache(version)


def command_line() -> str:
    """The running command, quoted for a shell."""
    program = Path(sys.argv[0])
    if program.parent.name == "emp_llm" and program.suffix == ".py":
        start = ["emp-llm"] if program.stem == "__main__" else ["emp-llm", program.stem]
    else:
        start = [program.name]
    return shlex.join(start + sys.argv[1:])


def processor_name() -> str:
    """The name of the CPU."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def machine_name() -> str:
    """What the last bits of a forward pass on the CPU depend on: the processor, the versions of
    torch and transformers, and the threads.
    """
    import torch

    return (
        f"{processor_name()}, torch {torch.__version__}, transformers {_version('transformers')}, "
        f"{count_of(torch.get_num_threads(), 'thread')}"
    )


@cache
def cpu_fields() -> dict[str, str]:
    """The description of the last core in /proc/cpuinfo; empty without this file."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): " ".join(value.split()) for key, value in pairs}


@cache
def torch_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded, with GOMP_parallel; None if there is none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    for path in sorted(paths, key=lambda path: ("/torch" not in path, path)):  # torch's own first
        library = ctypes.CDLL(path) if Path(path).name.startswith(_OPENMP) else None
        if library is not None and hasattr(library, "GOMP_parallel"):
            return library
    return None


def release_team() -> None:
    """End the threads that OpenMP keeps for this one, before another one computes with torch.

    libgomp keeps a team of threads for each thread that has computed. As soon as all teams have
    more threads than the machine has processors, every thread sleeps wherever it waits for others,
    and waking up takes longer than most of torch's operations.
    """
    openmp = torch_openmp()
    if openmp is not None and hasattr(openmp, "omp_pause_resource_all"):
        openmp.omp_pause_resource_all(_SOFT_PAUSE)


def without_team() -> None:
    """Let torch compute on this thread alone, which then has no team (see `release_team`)."""
    import torch

    torch.get_num_threads()  # torch sets the number at its first use in a thread
    openmp = torch_openmp()
    if openmp is not None:
        openmp.omp_set_num_threads(1)


def has_bfloat16(device: "torch.device") -> bool:
    """Whether a device has instructions for products of bfloat16."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    fields = cpu_fields()
    return bool(
        {"avx512_bf16", "amx_bf16", "bf16"}
        & {*fields.get("flags", "").split(), *fields.get("Features", "").split()}
    )


def runs_triton(device: "torch.device") -> bool:
    """Whether Triton is installed and runs on a device: an NVIDIA GPU of compute capability 8.0
    or higher.
    """
    import torch

    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def launching_on(device: "torch.device") -> AbstractContextManager[object]:
    """A context in which Triton launches on a GPU. torch.compile makes its own, and on other
    devices none is needed.
    """
    import torch

    if device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def has_float64(device: "torch.device") -> bool:
    """Whether a device has numbers of 64 bits: Apple's GPUs have none."""
    import torch

    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def exact_device(device: "torch.device") -> "torch.device":
    """Where numbers of 64 bits are computed that belong to a device: the CPU, if it has none."""
    import torch

    return device if has_float64(device) else torch.device("cpu")


def in_float64(values: "Tensor") -> "Tensor":
    """Values in float64, on the CPU if their device has no such numbers."""
    return values.to(exact_device(values.device)).double()


@contextmanager
def default_modes() -> Iterator[None]:
    """Inside this context, torch computes as in a new process, whatever the caller has set:
    gradients where they are asked for, no inference mode, no autocast, and new tensors in float32
    on the CPU. So a call of the library gives the masks that the command gives.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:  # so nothing is set
        yield
        return
    dtype = torch.get_default_dtype()
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in _DEVICES:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def float32_products(precision: Literal["highest", "medium"]) -> Iterator[None]:
    """Within this context, float32 products round to float32 only ("highest"), or their factors
    are rounded first where that is faster ("medium"): to bfloat16 on CPUs, to TF32 on GPUs.
    """
    import torch

    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set the precision of single backends
        backends = {
            torch.backends.cuda.matmul: "tf32",
            torch.backends.mkldnn.matmul: "bf16",  # type: ignore[attr-defined]
        }
        precisions = [backend.fp32_precision for backend in backends]
        for backend, fast in backends.items():
            backend.fp32_precision = fast if precision == "medium" else "ieee"
        try:
            yield
        finally:
            for backend, before in zip(backends, precisions, strict=True):
                backend.fp32_precision = before
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
