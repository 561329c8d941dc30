"""Shared by the benchmarks: models to measure, measurements in turn, and the memory of a
process.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emp_llm.common.errors import reason
from emp_llm.common.machine import available_cores, cpu_fields, processor_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emp_llm.models.layers import Layer

TOKENIZER = Path(__file__).parent / "demo" / "model"


def make_llama(
    folder: Path, sizes: Mapping[str, int], device: str = "cpu", shard_size: str = "2GB"
) -> int:
    """Write a random Llama in bfloat16 with the tokenizer of the demo model; returns the bytes of
    its shards.

    Args:
        sizes: fields of the config; others are Llama 2's.
        device: the device that makes the random numbers.
    """
    import transformers

    config = transformers.LlamaConfig(
        **({"vocab_size": 32000, "max_position_embeddings": 4096} | dict(sizes))
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return bytes_of_shards(folder)


def bytes_of_shards(folder: Path) -> int:
    """The bytes of a folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def offloaded_blocks(place: str, device: int | str = 0) -> str:
    """The device map of a Llama with its blocks on the CPU or on disk, and everything else on a
    device.
    """
    outside = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return json.dumps({"model.layers": place} | dict.fromkeys(outside, device))


def layers_in_blocks(model: "PreTrainedModel") -> "list[Layer]":
    """The linear layers of a model's decoder blocks."""
    from emp_llm.models.modules import model_layers

    return [layer for layer in model_layers(model) if layer.block is not None]


def plain_pass(model: "PreTrainedModel", tokens: Tensor, batch_size: int = 1) -> None:
    """A forward pass without hooks and without the head, as a calibration makes it."""
    from emp_llm.models.loading import input_device
    from emp_llm.models.modules import body_of

    with torch.no_grad():
        for batch in torch.split(tokens, batch_size):
            body_of(model)(input_ids=batch.to(input_device(model)), use_cache=False)


def random_tokens(samples: int, seqlen: int, vocabulary: int = 32000) -> Tensor:
    """Random token ids, int64, shape (samples, seqlen)."""
    return torch.randint(
        0, vocabulary, (samples, seqlen), generator=torch.Generator().manual_seed(0)
    )


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float = float("inf"),
    measure: Callable[[Callable[[], object]], float] | None = None,
    warm_up: bool = False,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure several ways of doing something in turn, so that a slow moment of the machine does
    not fall on one of them.

    Args:
        ways: name -> what to do.
        rounds: at most; a further round starts only if it is likely to end within `seconds`.
        measure: measures one of them in seconds; default: its wall time.
        warm_up: the first round is not counted.

    Returns:
        The measurements of each way, and the error of each way that fails. A failed way is
        not repeated; the others continue. An interrupt ends the measurements early.
    """
    measure = measure or wall_time
    found: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    start = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(rounds + warm_up):
            began = time.perf_counter()
            for name, run in ways.items():
                if name in failed:
                    continue
                try:
                    taken = measure(run)
                except (Exception, SystemExit) as error:
                    traceback.print_exc()
                    failed[name] = f"{type(error).__name__}: {reason(error)}"
                    continue
                if number or not warm_up:
                    found[name].append(taken)
            now = time.perf_counter()
            if number >= warm_up and now - start + (now - began) > seconds:
                break
    failed |= {
        name: "interrupted" for name, taken in found.items() if not taken and name not in failed
    }
    return found, failed


def wall_time(run: Callable[[], object]) -> float:
    """Seconds until the work is done, on the GPU too."""
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def gpu_time(run: Callable[[], object]) -> float:
    """Seconds by the GPU's clock; it is kept busy until everything is queued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # cycles
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def run_and_watch(command: list[str], output: bool = True) -> int:
    """Run a process to its end; returns its highest resident memory in bytes.

    The kernel's high-water mark is read from outside: getrusage would include the memory of this
    process at the fork.

    Args:
        command: the program and its arguments.
        output: show the standard output.

    Raises:
        SystemExit: with the code of a command that fails.
    """
    process = subprocess.Popen(command, stdout=None if output else subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid)["VmHWM"])
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak


def memory_of(process: int) -> dict[str, int]:
    """Fields of a process's memory in bytes: VmHWM, the highest resident memory since its start
    or since the process reset it, and RssAnon, the part that is in no file, now. 0 for a process
    that has ended.
    """
    found = {"VmHWM": 0, "RssAnon": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = 1024 * int(value.split()[0])
    return found


def used_by(words: list[str], folder: Path, log: Path, **more: str) -> dict[str, Any]:
    """CPU seconds (user, system), wall seconds and peak memory in GB of a process, in all
    (`memory`) and of what is in no file (`anonymous`); or how it `failed`.

    A run of emp-llm resets its own peak at each stage, so it is watched from outside.

    Args:
        words: the program and its arguments.
        folder: it works there, without the Hub.
        log: gets its output.
        more: of its environment.
    """
    started = time.perf_counter()
    memory = 0
    anonymous = 0
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | more,
            stdout=file,
            stderr=file,
        )
        ended = 0
        while not ended:
            now = memory_of(process.pid)
            memory = max(memory, now["VmHWM"])
            anonymous = max(anonymous, now["RssAnon"])
            time.sleep(0.02)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
    if status:
        said = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        return {"failed": f"ended with {os.waitstatus_to_exitcode(status)}: {said[-1]}"}
    return {
        "user": round(used.ru_utime, 1),
        "system": round(used.ru_stime, 1),
        "wall": round(time.perf_counter() - started, 1),
        "memory": round(memory / 1e9, 3),
        "anonymous": round(anonymous / 1e9, 3),
    }


def forget(folder: Path) -> None:
    """Sync all disks, and drop the pages of a folder's files from the page cache."""
    os.sync()
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_to_cache(folder: Path) -> None:
    """Read the files of a folder, so that they lie in the page cache."""
    buffer = bytearray(1 << 22)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def processor() -> str:
    """The CPU for the head of a table: "Intel Xeon, 2 cores, without SHA instructions"."""
    fields = cpu_fields()
    flags = (fields.get("flags") or fields.get("Features") or "").split()  # on x86 and on ARM
    sha = "with" if {"sha_ni", "sha2"} & set(flags) else "without"
    return (
        f"{processor_name()}, {os.cpu_count()} cores, "
        f"{f'{sha} SHA instructions' if flags else 'SHA instructions unknown'}"
    )


def hardware(device: str) -> str:
    """The machine and the versions, in words."""
    words = []
    if device == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        words = [
            f"{found.name}, {found.total_memory / 2**30:.0f} GiB",
            f"driver {_driver()}",
            f"CUDA {torch.version.cuda}",
        ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    words += [
        f"{processor_name()}, {available_cores()} cores, {memory:.0f} GiB",
        f"Python {platform.python_version()}",
    ]
    for package in ("torch", "triton", "transformers", "accelerate", "numba"):
        try:
            words.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            words.append(f"no {package}")
    return ", ".join(words)


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3,}\.[\d.]+\b", path.read_text()) if path.is_file() else None
    if found is None and shutil.which("nvidia-smi"):
        line = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = re.search(
            r"[\d.]+", subprocess.run(line, capture_output=True, text=True, check=False).stdout
        )
    return found.group() if found is not None else "unknown"
