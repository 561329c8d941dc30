"""Calibration block by block from disk: peak memory, bytes read, and time beside a model in memory;
prints a table.

    python scripts/measure_calibration.py [--folder DIR] [--samples 4] [--seqlen 128]

Makes two random Llamas in bfloat16, of about 3 B and 1 B parameters. The first is calibrated from
disk in a process of its own, the file's pages thrown out of the cache before. The second is
calibrated from disk and, for the ratio, run in memory with and without hooks in turn; these pairs
are timed in CPU seconds, which other programs disturb less. On a GPU: scripts/bench_gpu.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_helpers import forget, layers_in_blocks, make_llama, plain_pass, random_tokens

from emp_llm.calibration.passes import calibrate_blocks, calibrate_model
from emp_llm.common.machine import peak_memory
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model
from emp_llm.options.calibration import Place

SHAPES = {
    "3B": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def main() -> None:
    """Make, measure, print; with --step, be one of the processes that do so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--step", choices=("make", "blocks", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=tuple(SHAPES), help=argparse.SUPPRESS)
    parser.add_argument("--place", choices=("cpu", "disk"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is not None:
        tokens = random_tokens(options.samples, options.seqlen)
        steps: dict[str, Callable[[], dict[str, float]]] = {
            "make": lambda: {"bytes": make_llama(options.folder, SHAPES[options.shape])},
            "blocks": lambda: by_blocks(options.folder, tokens, options.place),
            "memory": lambda: in_memory(options.folder, tokens),
        }
        print(json.dumps(steps[options.step]()))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        measure(Path(scratch), options.samples, options.seqlen)


def measure(scratch: Path, samples: int, seqlen: int) -> None:
    """Print the table."""

    def step(name: str, shape: str, place: str = "cpu") -> dict[str, float]:
        line = [
            sys.executable,
            __file__,
            "--step",
            name,
            "--shape",
            shape,
            "--folder",
            str(scratch / shape),
        ]
        line += ["--samples", str(samples), "--seqlen", str(seqlen), "--place", place]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result

    print(
        f"{samples} sequences of {seqlen} tokens, one to a batch, {torch.get_num_threads()} "
        "threads\n"
    )
    print(
        "| model | hidden states | checkpoint | read | peak memory | weights and libraries | "
        "seconds |"
    )
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        size = step("make", shape)["bytes"]
        for place in ("cpu", "disk"):
            found = step("blocks", shape, place)
            read = f"{found['storage'] / 1e9:.2f} GB ({found['storage'] / size:.3f} x)"
            memory = (
                f"{found['peak'] / 1e9:.2f} GB | {found['before'] / 1e9:.2f} GB before the "
                "first block"
            )
            print(
                f"| {shape} | {place} | {size / 1e9:.2f} GB | {read} | {memory} | "
                f"{found['seconds']:.1f} |",
                flush=True,
            )
    found = step("memory", "1B")
    other = step("blocks", "1B")
    plain = found["plain"]
    hooked = found["hooked"]
    wall = found["wall"]
    percent = 100 * (found["overhead"] - 1)
    print(
        f"\n1B in memory: {plain:.2f} CPU s without hooks, {hooked:.2f} with them "
        f"({percent:+.1f} %, median of 5 pairs)"
    )
    ratio = other["seconds"] / wall
    print(
        f"1B, wall time: {wall:.2f} s in memory without hooks, {other['seconds']:.2f} s from "
        f"disk, cold ({ratio:.2f} x)"
    )


def by_blocks(folder: Path, tokens: torch.Tensor, place: Place) -> dict[str, float]:
    """Calibrate from disk, cold."""
    forget(folder)
    model = load_model(folder, "disk")
    before = _storage()
    peak_before = peak_memory()
    start = time.perf_counter()
    runner = BlockwiseModel(model, None, place)
    calibrate_blocks(runner, layers_in_blocks(model), tokens, 1)
    seconds = time.perf_counter() - start
    read = max(_storage() - before, runner.bytes_read)  # the storage may be a memory file system
    return {"seconds": seconds, "peak": peak_memory(), "before": peak_before, "storage": read}


def in_memory(folder: Path, tokens: torch.Tensor) -> dict[str, float]:
    """Passes of the whole model, without and with hooks in turn."""
    model = load_model(folder, "cpu")
    layers = layers_in_blocks(model)
    plain = []
    hooked = []
    wall = []
    for _ in range(6):
        start = time.process_time()
        clock = time.perf_counter()
        plain_pass(model, tokens)
        plain.append(time.process_time() - start)
        wall.append(time.perf_counter() - clock)
        start = time.process_time()
        calibrate_model(model, layers, tokens, 1)
        hooked.append(time.process_time() - start)
    ratios = [b / a for a, b in zip(plain[1:], hooked[1:], strict=True)]  # the first pair warms up
    median = statistics.median
    return {
        "plain": median(plain[1:]),
        "hooked": median(hooked[1:]),
        "overhead": median(ratios),
        "wall": median(wall[1:]),
    }


def _storage() -> int:
    """Bytes this process caused to be read from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    main()
