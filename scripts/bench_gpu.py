"""Everything worth measuring on a GPU, in one table: the commands of users, masks, calibration, and
a prune from end to end.

    python scripts/bench_gpu.py [--size 3B] [--only commands masks calibration prune]
    [--seconds 120] [--output gpu.md]
    python scripts/bench_gpu.py --device cpu --size tiny

Commands: Wanda, SparseGPT, ADMM with a refit, and healing whole and by blocks, once each, on 128
sequences of 2048 tokens: seconds of each stage and the highest memory. Masks: the torch reference
against a copy within the memory of the device; on a CPU the compiled kernel too. Calibration:
tokens/s of a random Llama in bfloat16, by a plain forward pass, by hooks in the whole model, and
block by block with resident and with offloaded weights. Prune: whole processes, imports included,
against `cp -r` and sync of the same folder. Measurements that are compared run in turn; medians.

Sections can run one after another with the same --folder: the model is made once, and the table
gets the rows of all. With --device cpu, the same code runs without a GPU, to try it.
scripts/on_gpu.sh runs this on a GPU machine.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import bench_masks
import torch
from bench_helpers import (
    bytes_of_shards,
    forget,
    hardware,
    in_turn,
    layers_in_blocks,
    make_llama,
    offloaded_blocks,
    plain_pass,
    random_tokens,
    run_and_watch,
    wall_time,
)

from emp_llm.common.errors import reason
from emp_llm.common.machine import free_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LLAMA3 = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = 4
_DEMO_TOKENS = 50_000  # of calibration/demo.txt, at least
HEAL_STEPS = 8
SECTIONS = ("commands", "masks", "calibration", "prune")


class Size(NamedTuple):
    """What is measured: the model, the tokens of a calibration and those of the commands, and the
    matrices and repeats of the masks.
    """

    config: dict[str, int]
    samples: int
    seqlen: int
    of_commands: int = 128
    shapes: tuple[tuple[int, int], ...] = bench_masks.SHAPES
    repeats: int = 30


SIZES = {
    "8B": Size(_LLAMA3 | {"num_hidden_layers": 32}, 32, 2048),
    "3B": Size(_LLAMA3 | {"num_hidden_layers": 8}, 32, 2048),
    "2B": Size(_LLAMA3 | {"num_hidden_layers": 4}, 32, 2048),
    "tiny": Size(_TINY | {"num_hidden_layers": 2}, 4, 32, 16, ((96, 64), (64, 160)), 3),
}


class Row(NamedTuple):
    """A row of the table, as text."""

    section: str
    name: str
    result: str
    ratio: str = ""
    gpu: str = ""
    host: str = ""
    runs: str = ""


def main(arguments: list[str] | None = None) -> None:
    """Measure the sections that are asked for, and write the table after each. Exit code 1 if
    something fails.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--size",
        choices=tuple(SIZES),
        default="3B",
        help="default: 3B, 8 of the 32 blocks of LLaMA-3-8B",
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="no further round of a section starts after this time",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds of calibrations and prunes at most"
    )
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu.md")
    parser.add_argument(
        "--command", default="bash scripts/on_gpu.sh", help="the command that the table names"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "--device cuda needs an NVIDIA GPU and a torch that sees it; there is none here.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    with tempfile.TemporaryDirectory(prefix="emp-llm-bench-") as scratch:
        failed = _run(options, options.folder or Path(scratch))
    raise SystemExit(1 if failed else 0)


def _run(options: argparse.Namespace, folder: Path) -> bool:
    """Measure; returns whether something fails."""
    folder.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "commands": lambda: commands(options, folder),
        "masks": lambda: masks(options.device, SIZES[options.size]),
        "calibration": lambda: calibration(options, folder / "model"),
        "prune": lambda: prune(options, folder / "model", folder / "output"),
    }
    kept = folder / "rows.json"
    failed = False
    rows = [Row(*row) for row in json.loads(kept.read_text())] if kept.is_file() else []
    for section in [name for name in sections if name in options.only]:
        rows = [row for row in rows if row.section != section]
        try:
            for row in sections[section]():
                print(" | ".join(part for part in row if part), flush=True)
                rows.append(row)
                failed |= row.result.startswith("failed")
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            traceback.print_exc()
            rows.append(Row(section, "", f"failed: {type(error).__name__}: {reason(error)}"))
            failed = True
        rows.sort(key=lambda row: list(sections).index(row.section))
        kept.write_text(json.dumps(rows))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(page(rows, options), encoding="utf-8")
    return failed


def page(rows: list[Row], options: argparse.Namespace) -> str:
    """The table, and what it was made with."""
    model = SIZES[options.size]
    tokens = SIZES[options.size].samples * SIZES[options.size].seqlen
    lines = [
        "| | measurement | result | ratio | GPU memory | host memory | runs |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return (
        f"# Measurements on a GPU\n\n`{options.command}`: {hardware(options.device)}.\n\n"
        f"Size {options.size}: a random Llama in bfloat16 with {model.config['num_hidden_layers']} "
        f"blocks of width {model.config['hidden_size']}. Medians of measurements in turn.\n\n"
        f"- Commands: {model.of_commands} sequences of {model.seqlen} tokens, 50 % of the linear "
        f"layers; healing makes {HEAL_STEPS} steps. The result is seconds of the stages and of the "
        "whole process, and the ratio seconds of the stages for each block.\n"
        "- Masks: GB/s read and written; the ratio is to the speed of the copy.\n"
        f"- Calibration: {tokens:,} tokens in sequences of {model.seqlen}, {BATCH} to a batch; the "
        "ratio is to the speed of the plain pass. Weights offloaded to disk may lie in the page "
        "cache. GPU memory is the peak of the allocator, without the other models of the process.\n"
        "- Prune: all linear layers of the blocks, by whole processes with a cold page cache; all "
        "data is on disk at the end. The ratio is to the time of `cp -r`. Host memory is the peak "
        "of resident memory.\n\n" + "\n".join(lines) + "\n"
    )


def commands(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """What users type, each command once in a process of its own, and what it takes."""
    model = folder / "model"
    _prepare(options, model)
    size = SIZES[options.size]
    demo = (Path(__file__).parents[1] / "calibration" / "demo.txt").read_text()
    text = folder / "text.txt"
    text.write_text(demo * math.ceil(size.of_commands * size.seqlen / _DEMO_TOKENS))
    data = ["--calibration", str(text), "--samples", str(size.of_commands)]
    data += ["--seqlen", str(size.seqlen)]
    whole = ["--device-map", "cuda:0" if options.device == "cuda" else "cpu"]
    prune = ["prune", str(model), *data, "--sparsity", "0.5", "--no-check"]
    heal = ["heal", str(folder / "wanda"), "--dense", str(model), *data]
    heal += ["--heal-steps", str(HEAL_STEPS)]
    for name, words in {
        "wanda": [*prune, "--method", "wanda", *whole],
        "heal": [*heal, *whole],
        "sparsegpt": [*prune, "--method", "sparsegpt", *whole],
        "emp-admm --refit": [*prune, "--method", "emp-admm", "--refit", *whole],
        "heal, by blocks": [*heal, "--device-map", "disk"],
    }.items():
        output = folder / (name if name == "wanda" else "output")
        shutil.rmtree(output, ignore_errors=True)
        line = [sys.executable, "-m", "emp_llm", *words, "--output", str(output), "--overwrite"]
        start = time.perf_counter()
        try:
            host = run_and_watch(line)
        except SystemExit as error:
            yield Row("commands", name, f"failed: exit code {error.code}")
            continue
        seconds = time.perf_counter() - start
        stages = json.loads((output / "emp_report.json").read_text())["stages"]
        if "heal" in stages:  # the others are those of the pruning
            stages = {"heal": stages["heal"]}
        work = sum(stage["seconds"] for stage in stages.values())
        parts = ", ".join(f"{stage} {value['seconds']:.1f}" for stage, value in stages.items())
        gpu = max(stage.get("peak_cuda_bytes") or 0 for stage in stages.values())
        yield Row(
            "commands",
            name,
            f"{parts}; {seconds:.1f} in all",
            f"{work / size.config['num_hidden_layers']:.2f}",
            _gigabytes(gpu),
            _gigabytes(host),
            "1",
        )


def masks(device: str, size: Size) -> Iterator[Row]:
    """The speed of masks, beside a copy and a sort, for each shape and method."""
    times_on = bench_masks.gpu_times if device == "cuda" else bench_masks.cpu_times
    ways = {"kernel": "kernel", "torch": "torch", "sort": "sort of the scores"}
    for shape in size.shapes:
        weight, norms = (tensor.to(device) for tensor in bench_masks.random_matrix(shape))
        for number, (name, with_norms, rule) in enumerate(bench_masks.RUNS):
            title = f"{shape[0]} x {shape[1]}, {name}"
            try:
                times = times_on(
                    weight,
                    norms if with_norms else None,
                    bench_masks.rule_for(rule, weight),
                    size.repeats,
                )
            except Exception as error:
                traceback.print_exc()
                yield Row("masks", title, f"failed: {type(error).__name__}: {reason(error)}")
                continue
            if number == 0:
                yield _speed(f"{shape[0]} x {shape[1]}: copy", weight, times, "copy", size.repeats)
            for way, words in ways.items():
                if way in times:
                    runs = 1 if device == "cpu" and way != "kernel" else size.repeats
                    yield _speed(f"{title}: {words}", weight, times, way, runs)


def _speed(title: str, weight: torch.Tensor, times: dict[str, float], way: str, runs: int) -> Row:
    speed = 2 * weight.nbytes / 1e9 / times[way]
    return Row(
        "masks", title, f"{speed:,.1f} GB/s", f"{times['copy'] / times[way]:.1%}", runs=str(runs)
    )


def calibration(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Tokens/s of calibrations, and of a plain forward pass."""
    from emp_llm.calibration.passes import calibrate_blocks, calibrate_model
    from emp_llm.models.blockwise import BlockwiseModel
    from emp_llm.models.loading import load_model

    _prepare(options, folder)
    size = SIZES[options.size]
    tokens = random_tokens(size.samples, size.seqlen)
    cuda = options.device == "cuda"
    resident = load_model(folder, "cuda:0" if cuda else "cpu")
    places = {
        place: load_model(folder, offloaded_blocks(place, 0 if cuda else "cpu"))
        for place in ("cpu", "disk")
    }
    layers = layers_in_blocks(resident)

    def blocks(model: "PreTrainedModel", hidden: Any = "device") -> Callable[[], object]:
        return lambda: calibrate_blocks(BlockwiseModel(model, None, hidden), layers, tokens, BATCH)

    ways: dict[str, tuple[PreTrainedModel, Callable[[], object]]] = {
        "plain forward pass": (resident, lambda: plain_pass(resident, tokens, BATCH)),
        "whole model": (resident, lambda: calibrate_model(resident, layers, tokens, BATCH)),
        "block by block": (resident, blocks(resident)),
        "block by block, hidden states on the CPU": (resident, blocks(resident, "cpu")),
        "block by block, weights offloaded to the CPU": (places["cpu"], blocks(places["cpu"])),
        "block by block, weights offloaded to disk": (places["disk"], blocks(places["disk"])),
        "whole model, weights offloaded to the CPU": (
            places["cpu"],
            lambda: calibrate_model(places["cpu"], layers, tokens, BATCH),
        ),
    }
    peaks: dict[int, int] = {}

    def measure(run: Callable[[], object]) -> float:
        model = next(model for model, way in ways.values() if way is run)
        if not cuda:
            return wall_time(run)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - sum(
            p.nbytes for p in model.parameters() if p.is_cuda
        )
        seconds = wall_time(run)
        peaks[id(run)] = max(peaks.get(id(run), 0), torch.cuda.max_memory_allocated() - others)
        return seconds

    runs = {name: way for name, (_, way) in ways.items()}
    found, failed = in_turn(runs, options.repeats, options.seconds, measure, warm_up=True)
    plain = statistics.median(found["plain forward pass"]) if found["plain forward pass"] else None
    for name, taken in found.items():
        if name in failed:
            yield Row("calibration", name, f"failed: {failed[name]}")
            continue
        seconds = statistics.median(taken)
        ratio = f"{plain / seconds:.1%}" if plain else ""
        memory = _gigabytes(peaks.get(id(runs[name])))
        yield Row(
            "calibration",
            name,
            f"{tokens.numel() / seconds:,.0f} tokens/s",
            ratio,
            memory,
            runs=str(len(taken)),
        )


def prune(options: argparse.Namespace, folder: Path, output: Path) -> Iterator[Row]:
    """Seconds and GB/s of whole processes that prune a checkpoint, and of `cp -r` and sync."""
    bytes_of_model = _prepare(options, folder)
    size = SIZES[options.size]
    cuda = options.device == "cuda"
    samples = size.samples // 2
    wanda = [
        "emp-wanda",
        "--calibration",
        "demo",
        "--samples",
        str(samples),
        "--seqlen",
        str(size.seqlen),
    ]
    calibrated = f"emp-wanda with calibration on {samples * size.seqlen:,} tokens"
    offloaded = offloaded_blocks("disk", 0 if cuda else "cpu")
    device_map = ["--device-map", "cuda:0" if cuda else "cpu"]
    runs: dict[str, list[str]] = {"cp -r and sync": []}
    devices = ("cuda", "cpu") if cuda else ("cpu",)
    for device in devices:
        runs[f"emp-magnitude, masks: {device}"] = ["emp-magnitude", "--mask-device", device]
    for device in devices:
        runs[f"{calibrated}, masks: {device}"] = [*wanda, *device_map, "--mask-device", device]
    runs[f"{calibrated}, weights offloaded to disk"] = [*wanda, "--device-map", offloaded]
    host: dict[str, int] = {}
    gpu: dict[str, int] = {}

    def way(name: str) -> Callable[[], None]:
        def run() -> None:
            if not runs[name]:
                subprocess.run(["cp", "-r", str(folder), str(output)], check=True)
                os.sync()
                return
            line = [
                sys.executable,
                "-m",
                "emp_llm.prune",
                "--model",
                str(folder),
                "--output",
                str(output),
            ]
            host[name] = max(
                host.get(name, 0),
                run_and_watch([*line, "--targets", "all-linear", "--method", *runs[name]]),
            )
            stages = json.loads((output / "emp_report.json").read_text())["stages"].values()
            gpu[name] = max(
                [gpu.get(name, 0), *(stage.get("peak_cuda_bytes") or 0 for stage in stages)]
            )

        return run

    def measure(run: Callable[[], object]) -> float:
        for path in (output, output.parent / f".{output.name}.partial"):
            shutil.rmtree(path, ignore_errors=True)
        forget(folder)
        return wall_time(run)

    found, failed = in_turn(
        {name: way(name) for name in runs}, options.repeats, options.seconds, measure
    )
    shutil.rmtree(output, ignore_errors=True)
    copy = statistics.median(found["cp -r and sync"]) if found["cp -r and sync"] else None
    for name, taken in found.items():
        if name in failed:
            yield Row("prune", name, f"failed: {failed[name]}")
            continue
        seconds = statistics.median(taken)
        speed = f"{seconds:.1f} s, {bytes_of_model / 1e9 / seconds:.2f} GB/s"
        ratio = f"{seconds / copy:.2f}" if copy else ""
        yield Row(
            "prune",
            name,
            speed,
            ratio,
            _gigabytes(gpu.get(name)),
            _gigabytes(host.get(name)),
            str(len(taken)),
        )


def _prepare(options: argparse.Namespace, folder: Path) -> int:
    """Make the model unless it is there; returns the bytes of its weights."""
    done = folder.with_suffix(".done")
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        make_llama(folder, SIZES[options.size].config, options.device)
        done.touch()
        free_memory()
    return bytes_of_shards(folder)


def _gigabytes(size: int | None) -> str:
    return f"{size / 1e9:.2f} GB" if size else ""


if __name__ == "__main__":
    # A section that runs out of time still gives its rows.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
