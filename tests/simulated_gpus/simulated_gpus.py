"""Two CUDA devices, simulated on the CPU, for a torch that was built without CUDA.

    export PYTHONPATH=$PWD:$PWD/tests/simulated_gpus
    python -c "import simulated_gpus; from emp_llm.cli import main; main()" prune MODEL
    python -m pytest -p simulated_gpus tests/test_cuda.py -k "not sparse_layer"

gpu.cpp registers what a CUDA build of torch would register. So tensors are plain `torch.Tensor`s on
"cuda:0" or "cuda:1", and Parameters, views, autograd, hooks, deepcopy and threads are torch's own.
An operator

- raises, as on CUDA, if its tensors lie on different devices, or its generator is the CPU's;
- runs on the CPU, in the same memory, and is counted (`counters`).

The address of a tensor on a GPU cannot be read by the CPU: numpy, ctypes or a compiled kernel that
tries to gets a segmentation fault. Each device has its own random numbers, and
SIMULATED_GPU_BYTES of free memory. There are SIMULATED_GPUS devices, of which
CUDA_VISIBLE_DEVICES shows some.

Not simulated: the speed and the arithmetic of GPUs, a missing synchronisation, pinned memory,
streams, NCCL, Triton, CUDA graphs.

A process ends by `os._exit`, because the threads of autograd's engine cannot end after the
interpreter, if the library is loaded before torch. It runs with torch 2.13 on x86-64.
"""

import atexit
import ctypes
import fcntl
import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("gpu.cpp")
DEVICES = 0
MEMORY = 0  # bytes of each device that other processes leave
_LEAST = 16 << 30  # bytes of a whole device: transformers cannot load onto one of 1 GB


def _library() -> Path:
    """The compiled library, kept beside compiled Python files, by its source and torch."""
    spec = find_spec("torch")
    assert spec is not None
    torch = Path(str(spec.origin)).parent
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes() + bytes(torch))
    folder = SOURCE.parent / "__pycache__"
    folder.mkdir(exist_ok=True)
    path = folder / f"gpu-{key.hexdigest()[:16]}.so"
    with (folder / "gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes do not compile at the same time
        if not path.exists():
            made = path.with_suffix(".new")
            subprocess.run(
                [
                    *("g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-w", SOURCE, "-o", made),
                    *(f"-I{torch}/include", f"-L{torch}/lib", "-ltorch_cpu", "-lc10"),
                    f"-Wl,-rpath,{torch}/lib",
                ],
                check=True,
            )
            made.replace(path)
    return path


assert "torch" not in sys.modules, "import simulated_gpus before torch, which looks for CUDA once"
ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL)
import torch  # noqa: E402

_gpus = torch.ops.simulated_gpus
_initialized = False


def set_up() -> None:
    """Be the machine that the environment describes now; before the first use of a GPU."""
    global DEVICES, MEMORY
    MEMORY = int(os.environ.get("SIMULATED_GPU_BYTES", str(_LEAST)))
    present = [str(number) for number in range(int(os.environ.get("SIMULATED_GPUS", "2")))]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = present if shown is None else shown.split(",")
    known = [name in present for name in names]
    DEVICES = known.index(False) if False in known else len(known)  # CUDA stops at a wrong name
    _gpus.set_up(DEVICES, MEMORY)
    generators = tuple(torch.Generator(f"cuda:{number}") for number in range(DEVICES))
    torch.cuda.default_generators = generators


def counters() -> dict[str, int]:
    """What the GPUs have done so far."""
    names = ("kernels", "waits", "bytes_up", "bytes_down", "bytes_across")
    return dict(zip(names, _gpus.counters(), strict=True))


def used() -> list[int]:
    """The bytes in use of each GPU."""
    return [int(_gpus.used(number)) for number in range(DEVICES)]


def _operators_with_scalars() -> list[str]:
    """The operators that check no devices: they take scalars of the CPU."""
    import torchgen
    import yaml

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [
        "aten::" + entry["func"].split("(")[0]
        for entry in functions
        if entry.get("device_check") == "NoCheck"
        or entry.get("structured_inherits") == "TensorIteratorBase"
        or entry["func"].startswith("where.")
    ]


# ---- torch.cuda, whose functions call a part of torch that is not built.


def _init() -> None:
    global _initialized
    if not DEVICES:
        raise RuntimeError("No CUDA GPUs are available")
    _initialized = True


def _index(device: Any = None, optional: bool = True, allow_cpu: bool = False) -> int:
    if device is not None and not isinstance(device, int):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        device = device.index
    if device is None:
        _init()
        return int(_gpus.device())
    if not 0 <= device < DEVICES:
        raise AssertionError("Invalid device id")
    return int(device)


class _Device:
    """A context with another current device."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self.before = int(_gpus.device())
        if self.idx >= 0:
            _gpus.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _gpus.set_device(self.before)


class _Stream:
    """A stream or an event, on which everything is done."""

    cuda_stream = stream_id = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        _gpus.wait()

    record = wait = wait_event = wait_stream = lambda self, *_: None


def _current_device() -> int:
    _init()
    return _index()


def _set_device(device: Any) -> None:
    _init()
    _gpus.set_device(_index(device))


def _synchronize(device: Any = None) -> None:
    _init()
    _index(device)
    _gpus.wait()


def _reset_peak(device: Any = None) -> None:
    number = _index(device)
    if not _initialized:
        raise RuntimeError(f"Invalid device argument {number}: did you call init?")
    _gpus.reset_peak(number)


def _memory_stats(device: Any = None) -> dict[str, int]:
    if not _initialized:
        return {}
    number = _index(device)
    return {
        f"{name}.all.{which}": int(read(number))
        for name in ("allocated_bytes", "reserved_bytes")
        for which, read in (("current", _gpus.used), ("peak", _gpus.peak))
    }


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    _init()
    return MEMORY - int(_gpus.used(_index(device))), max(_LEAST, MEMORY)


def _properties(device: Any = None) -> SimpleNamespace:
    _init()
    _index(device)
    return SimpleNamespace(
        name="Simulated GPU",
        major=8,
        minor=0,
        total_memory=max(_LEAST, MEMORY),
        multi_processor_count=108,
        warp_size=32,
    )


def _seed(number: int, seed: int) -> None:
    _gpus.seed(number, int(seed) & ((1 << 63) - 1))


def _seed_all(seed: int) -> None:
    for number in range(DEVICES):
        _seed(number, seed)


def _set_states(states: Any) -> None:
    for generator, state in zip(torch.cuda.default_generators, states, strict=True):
        generator.set_state(state)


def _generator(device: Any = "cuda") -> torch.Generator:
    return torch.cuda.default_generators[_index(device)]


_CUDA = {
    "_lazy_init": _init,
    "init": _init,
    "is_available": lambda: DEVICES > 0,
    "is_initialized": lambda: _initialized,
    "_is_compiled": lambda: True,
    "device_count": lambda: DEVICES,
    "_device_count_nvml": lambda: DEVICES,
    "current_device": _current_device,
    "set_device": _set_device,
    "device": _Device,
    "_get_device_index": _index,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": lambda device=None: (_properties(device).major, 0),
    "get_device_properties": _properties,
    "get_arch_list": lambda: ["sm_80"],
    "can_device_access_peer": lambda one, other: True,
    "synchronize": _synchronize,
    "Stream": _Stream,
    "Event": _Stream,
    "stream": lambda stream: stream or _Stream(),
    "current_stream": _Stream,
    "default_stream": _Stream,
    "is_current_stream_capturing": lambda: False,
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "memory_stats": _memory_stats,
    "reset_peak_memory_stats": _reset_peak,
    "mem_get_info": _mem_get_info,
    "manual_seed": lambda seed: _seed(_index(), seed),
    "manual_seed_all": _seed_all,
    "get_rng_state": lambda device="cuda": _generator(device).get_state(),
    "set_rng_state": lambda state, device="cuda": _generator(device).set_state(state),
    "get_rng_state_all": lambda: [each.get_state() for each in torch.cuda.default_generators],
    "set_rng_state_all": _set_states,
}


# ---- Places where torch and safetensors take memory of a device by themselves.


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    """A storage on a device, as `torch.load` asks for one."""
    return _bytes_of(storage).to(device).untyped_storage()


def _storage_clone(storage: Any) -> Any:
    """A copy of a storage, as `copy.deepcopy` makes one."""
    return _bytes_of(storage).clone().untyped_storage()


class _Slice:
    """A slice of a file, which is read on the CPU and moved."""

    def __init__(self, piece: Any, device: torch.device) -> None:
        self._piece = piece
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._piece, name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._piece[key].to(self._device)


def _on_devices(safe_open: Any) -> type:
    """safetensors' `safe_open`, which reads on the CPU and moves."""

    class SafeOpen:
        def __init__(
            self, filename: Any, framework: str = "pt", device: Any = "cpu", **more: Any
        ) -> None:
            self._device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
            place = "cpu" if self._device.type == "cuda" else device
            self._file = safe_open(filename, framework=framework, device=place, **more)

        def __enter__(self) -> "SafeOpen":
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> Any:
            return self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            return self._file.get_tensor(name).to(self._device)

        def get_slice(self, name: str) -> Any:
            piece = self._file.get_slice(name)
            return _Slice(piece, self._device) if self._device.type == "cuda" else piece

    return SafeOpen


def _patch() -> None:
    import safetensors
    import safetensors.torch

    cuda: Any = torch.cuda
    for name, value in _CUDA.items():
        for module in (cuda, cuda.memory, cuda.random):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    compiled: Any = torch._C
    compiled._cuda_getCurrentRawStream = lambda device: 0
    patched: Any = torch
    patched.UntypedStorage.to = _storage_to
    patched.UntypedStorage.clone = _storage_clone
    patched.Tensor.pin_memory = lambda self, device=None: self.clone()
    safetensors.safe_open = safetensors.torch.safe_open = _on_devices(safetensors.safe_open)


_gpus.start(_operators_with_scalars())
_patch()
set_up()
_status = 0


def _failed(*error: Any) -> None:
    global _status
    _status = 1
    sys.__excepthook__(*error)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)


sys.excepthook = _failed
atexit.register(_leave)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """pytest's process ends with pytest's status."""
    global _status
    _status = int(exitstatus)
