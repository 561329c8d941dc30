"""Sizes and speed of pack and unpack on a synthetic bfloat16 checkpoint, beside the entropy and a
plain copy.

    python scripts/bench_pack.py [--gigabytes 1.5] [--repeats 3] [--folder DIR] [--write]

The weights are Gaussian and 40 % of them are zero: the smallest of each row ("magnitude"), or
random ones ("random"), the worst case for a packer. Times are those of the Python functions `pack`
and `unpack`, without imports. Every run, the copy included, ends when its output is on the disk.
The source lies in the page cache, as after pruning, or was dropped from it ("cold").
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_helpers import forget, processor, read_to_cache, run_and_watch
from safetensors.torch import save_file

from emp_llm import pack, unpack
from emp_llm.checkpoint.files import sync_tree
from emp_llm.common.errors import count_of

_SPARSITY = 0.4
_COLUMNS = 4096


def main(line: list[str] | None = None) -> None:
    """Create the checkpoints, measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gigabytes", type=float, default=1.5, help="size of the checkpoint; default: 1.5"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="times that each run is measured; default: 3"
    )
    parser.add_argument("--folder", type=Path, help="working folder; default: a temporary folder")
    parser.add_argument(
        "--write", action="store_true", help="write the tables to scripts/results/pack.md"
    )
    arguments = parser.parse_args(line)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folders = {kind: Path(scratch) / kind for kind in ("magnitude", "random")}
        for kind, folder in folders.items():
            make(
                folder,
                arguments.gigabytes if kind == "magnitude" else arguments.gigabytes / 4,
                kind,
            )
        sizes = ["| zeros | packed | bytes / dense | entropy |", "|---|---|---:|---:|"]
        peak = 0
        for kind, folder in folders.items():
            rows, highest = size_rows(kind, folder, Path(scratch))
            sizes = sizes + rows
            peak = max(peak, highest)
        speed = speeds(folders["magnitude"], Path(scratch), arguments.repeats)
        dense = weights(folders["magnitude"])
    about = (
        f"{dense / 1e9:.2f} GB of Gaussian bfloat16, {100 * _SPARSITY:.0f} % zeros; {processor()}; "
        f"medians of {count_of(arguments.repeats, 'run')}, GB/s of the dense checkpoint. Peak "
        f"memory of a process, imports included: {peak / 1e9:.2f} GB."
    )
    notes = (
        "Entropy: bits per weight if each is coded alone, as a share of 16; in brackets with sign "
        "and mantissa taken as random, as the packer does.\n\nWork: processor seconds of the "
        "program itself, and GB of the dense checkpoint per such second. "
        "The seconds of the system for reading and writing (system) and the wait for the disk come "
        f"on top. Load during the run: {os.getloadavg()[1]:.1f}."
    )
    text = f"{about}\n\n" + "\n".join(sizes) + f"\n\n{notes}\n\n" + "\n".join(speed)
    print(text)
    if arguments.write:
        command = (
            f"python scripts/bench_pack.py --gigabytes {arguments.gigabytes:g} --repeats "
            f"{arguments.repeats} --write"
        )
        target = Path(__file__).parent / "results" / "pack.md"
        target.write_text(f"# Packed checkpoints\n\n`{command}`: {text}\n", encoding="utf-8")


def make(folder: Path, gigabytes: float, kind: str) -> None:
    """Write a checkpoint of one shard: Gaussian matrices of 64 MB with 40 % zeros, the smallest
    of each row or random ones.
    """
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {}
    for number in range(max(1, round(gigabytes * 1e9 / (1 << 26)))):
        weight = (torch.randn(1 << 13, _COLUMNS) * 0.02).bfloat16()
        score = weight.abs().float() if kind == "magnitude" else torch.rand(weight.shape)
        cut = score.kthvalue(int(_SPARSITY * _COLUMNS), dim=1, keepdim=True).values
        tensors[f"layers.{number}.weight"] = weight.masked_fill(score <= cut, 0)
    save_file(tensors, folder / "model.safetensors")


def weights(folder: Path) -> int:
    """Size of the shards of a checkpoint, packed or not, in bytes."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def entropy(folder: Path) -> tuple[float, float]:
    """Lower bounds on the bits per weight if each is coded alone, as shares of 16.

    Returns:
        The entropy of the bfloat16 numbers; and that of mask and exponents, with sign and mantissa
        taken as random.
    """
    with (folder / "model.safetensors").open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        words = np.fromfile(file, dtype="<u2", count=1 << 26)
    counts = np.bincount(words, minlength=1 << 16)
    kept = counts.copy()
    kept[0] = 0
    share = kept.sum() / counts.sum()
    mask = bits(np.array([share, 1 - share]))
    exponents = kept.reshape(2, 256, 128).sum(axis=(0, 2))
    return bits(counts) / 16, (mask + share * (8 + bits(exponents))) / 16


def bits(counts: Any) -> float:
    """Entropy of a distribution, in bits."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def size_rows(kind: str, folder: Path, scratch: Path) -> tuple[list[str], int]:
    """Table rows with the packed sizes of a checkpoint, and the largest memory peak of the
    processes, in bytes.
    """
    rows = []
    peak = 0
    of_all, of_parts = entropy(folder)
    for name, flags in (
        ("raw", []),
        ("zstd", ["--zstd"]),
        ("mask", ["--mask-only"]),
        ("mask, zstd", ["--mask-only", "--zstd"]),
    ):
        peak = max(peak, command("pack", folder, scratch / "packed", *flags))
        peak = max(
            peak,
            command(
                "unpack",
                scratch / "packed",
                scratch / "back",
                *(["--base", folder] if "mask" in name else []),
            ),
        )
        ratio = weights(scratch / "packed") / weights(folder)
        rows.append(
            f"| {kind} | {name} | {ratio:.4f} | "
            f"{f'{of_all:.4f} ({of_parts:.4f})' if name == 'zstd' else ''} |"
        )
        shutil.rmtree(scratch / "packed")
        shutil.rmtree(scratch / "back")
    return rows, peak


def speeds(source: Path, scratch: Path, repeats: int) -> list[str]:
    """A table of seconds and GB/s."""
    packed = scratch / "packed"
    back = scratch / "back"
    runs: dict[str, Callable[[], object]] = {
        "cp -r, sync, cold": lambda: copy(source, back),
        "pack, cold": lambda: pack(source, packed),
        "unpack, cold": lambda: unpack(packed, back),
        "cp -r, sync": lambda: copy(source, back),
        "pack": lambda: pack(source, packed),
        "unpack": lambda: unpack(packed, back),
        "pack --zstd": lambda: pack(source, packed, zstd=True),
        "unpack, of zstd": lambda: unpack(packed, back),
        "pack --mask-only": lambda: pack(source, packed, mask_only=True),
        "unpack --base": lambda: unpack(packed, back, base=str(source)),
    }
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in runs}
    pack(source, packed)  # not measured: the kernels load
    shutil.rmtree(packed)
    for _ in range(repeats):
        for name, work in runs.items():
            for folder in (source, packed):
                if folder.is_dir():
                    (forget if "cold" in name else read_to_cache)(folder)
            start = time.perf_counter()
            before = cpu_seconds()
            work()
            times[name].append(
                (
                    time.perf_counter() - start,
                    *(now - then for now, then in zip(cpu_seconds(), before, strict=True)),
                )
            )
            if back.exists():
                subprocess.run(
                    ["cmp", source / "model.safetensors", back / "model.safetensors"], check=True
                )
                shutil.rmtree(back)
                shutil.rmtree(packed, ignore_errors=True)
    rows = [
        "| run | seconds | GB/s | work | GB/s of work | system |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, passed in times.items():
        seconds, work, system = (statistics.median(column) for column in zip(*passed, strict=True))
        dense = weights(source) / 1e9
        rate = f"{dense / work:.1f}" if work >= 0.01 else ""
        rows.append(
            f"| {name} | {seconds:.2f} | {dense / seconds:.2f} | {work:.2f} | {rate} | "
            f"{system:.2f} |"
        )
    return rows


def cpu_seconds() -> tuple[float, float]:
    """Processor seconds of this process and its finished children: (user, system)."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime for one in used), sum(one.ru_stime for one in used)


def copy(source: Path, target: Path) -> None:
    """`cp -r`, and a sync of the copy."""
    subprocess.run(["cp", "-r", source, target], check=True)
    sync_tree(target)


def command(name: str, *arguments: object) -> int:
    """Run a command as a process; returns its peak memory in bytes."""
    return run_and_watch(
        [sys.executable, "-m", "emp_llm", name, *map(str, arguments)], output=False
    )


if __name__ == "__main__":
    main()
