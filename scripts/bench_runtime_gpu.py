"""Time of a packed layer on a GPU against torch's dense one.

    python scripts/bench_runtime_gpu.py [--shapes 4096x11008] [--zeros 50] [--tokens 1 512]
    [--repeats 50] [--output FILE] python scripts/bench_runtime_gpu.py --tune [--shapes 4096x11008]
    python scripts/bench_runtime_gpu.py --device cpu --shapes 64x96

Random bfloat16 matrices, outputs x inputs, with zeros at random places. "dense" is torch's linear
layer, which calls cuBLAS, with the same weights and their zeros. Both are measured in turn, after
the level 2 cache has been filled with other data; medians of the GPU's clock. "GB/s" counts what
each has to read once: all weights, or mask, starts and values. "of the copy" is that rate relative
to a copy within the memory of the device, which is counted as read and written. "limit" is the
ratio of these bytes.

--tune tries other sizes of the kernel's programs than those it chooses. With --device cpu, torch
alone multiplies packed rows, to try the script. scripts/on_gpu.sh runs this on a GPU machine.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_helpers import gpu_time, hardware, in_turn, wall_time
from torch import Tensor
from torch.nn import functional

from emp_llm.runtime.loader import products_of
from emp_llm.runtime.packed_rows import PackedRows, pack_rows, torch_product

SHAPES = ["4096x11008", "11008x4096", "4096x4096"]
_FLUSHED = 256 << 20  # bytes, more than any level 2 cache has
COLUMNS = (
    "matrix",
    "zeros",
    "tokens",
    "dense",
    "packed",
    "times as fast",
    "limit",
    "GB/s, dense",
    "GB/s, packed",
    "of the copy",
)
TUNED = {"rows": (2, 4, 8), "groups": (64, 128, 256), "warps": (2, 4, 8)}


def main(line: list[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, help="outputs x inputs; default: those of a 7B model"
    )
    parser.add_argument("--zeros", nargs="+", type=int, default=[40, 50, 60], help="percent")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 512])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--seconds", type=float, default=300, help="each row takes at most its part of this time"
    )
    parser.add_argument(
        "--tune", action="store_true", help="one token, with other sizes of the kernel's programs"
    )
    parser.add_argument("--output", type=Path, help="write the table to this file")
    arguments = parser.parse_args(line)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "--device cuda needs an NVIDIA GPU and a torch that sees it; there is none here.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    if arguments.tune:
        _tune(arguments)
        return
    copy = _copy_speed(arguments.device)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---:" + "|---:" * (len(COLUMNS) - 2) + "|"]
    print("\n".join(lines), flush=True)
    for row in _rows(arguments, copy):
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(_page(arguments, copy, lines), encoding="utf-8")


def _rows(arguments: argparse.Namespace, copy: float) -> Iterator[list[str]]:
    """The cells of each row."""
    count = len(arguments.shapes) * len(arguments.zeros) * len(arguments.tokens)
    flush = _flusher(arguments.device)
    for shape, zeros in itertools.product(arguments.shapes, arguments.zeros):
        weight, rows = _matrix(shape, zeros, arguments.device)
        packed = products_of(rows) if arguments.device == "cuda" else partial(torch_product, rows)
        read = {"dense": weight.nbytes, "packed": rows.nbytes + getattr(packed, "nbytes", 0)}
        for tokens in arguments.tokens:
            x = torch.randn(tokens, weight.shape[1], device=arguments.device).to(weight.dtype)
            check_result(packed(x), weight, x)
            times, failed = in_turn(
                _ways(weight, packed, x),
                arguments.repeats,
                arguments.seconds / count,
                lambda run: _time(run, flush, arguments.device),
                warm_up=True,
            )
            if failed:
                raise SystemExit(f"{shape}, {zeros} % zeros, {tokens} tokens: {failed}")
            taken = {name: statistics.median(seconds) for name, seconds in times.items()}
            speed = {name: read[name] / seconds / 1e9 for name, seconds in taken.items()}
            yield [
                shape.replace("x", " x "),
                f"{zeros} %",
                str(tokens),
                *(f"{1e6 * seconds:.1f} µs" for seconds in taken.values()),
                f"{taken['dense'] / taken['packed']:.3g}",
                f"{read['dense'] / read['packed']:.2f}",
                *(f"{rate:,.0f}" for rate in speed.values()),
                f"{speed['packed'] / copy:.0%}",
            ]


def _ways(
    weight: Tensor, packed: Callable[[Tensor], Tensor], x: Tensor
) -> dict[str, Callable[[], object]]:
    return {"dense": lambda: functional.linear(x, weight), "packed": lambda: packed(x)}


def check_result(found: Tensor, weight: Tensor, x: Tensor) -> None:
    """Raise SystemExit unless a product is right to the precision of its dtype."""
    wanted = x.double() @ weight.double().T
    error = float((found.double() - wanted).norm() / wanted.norm())
    if not error < 1e-2:
        raise SystemExit(
            f"{tuple(weight.shape)}, {x.shape[0]} tokens: the packed product is wrong "
            f"by {error:.1%}"
        )


def _matrix(shape: str, zeros: int, device: str) -> tuple[Tensor, PackedRows]:
    """A random matrix with a share of zeros in percent, dense and packed."""
    height, width = (int(size) for size in shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(height, width, generator=generator).mul_(0.02)
    weight = weight.masked_fill_(
        torch.rand(height, width, generator=generator) < zeros / 100, 0
    ).bfloat16()
    return weight.to(device), pack_rows(weight).to(device)


def _copy_speed(device: str) -> float:
    """GB/s of a copy within the memory of the device."""
    source = torch.ones(
        (1 << 30) if device == "cuda" else (1 << 22), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    taken = [_time(lambda: target.copy_(source), lambda: None, device) for _ in range(11)]
    return 2 * source.nbytes / statistics.median(taken[1:]) / 1e9


def _flusher(device: str) -> Callable[[], object]:
    """Fills the caches of a GPU with other data."""
    if device == "cpu":
        return lambda: None
    room = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)
    return lambda: room.zero_()


def _time(run: Callable[[], object], flush: Callable[[], object], device: str) -> float:
    """Seconds by the GPU's clock, which is kept busy until everything is queued; on the CPU,
    wall time.
    """
    if device == "cpu":
        return wall_time(run)
    flush()
    return gpu_time(run)


def _tune(arguments: argparse.Namespace) -> None:
    """Print the times of one token with other sizes of the programs, the fastest first."""
    if arguments.device == "cpu":
        print("--tune needs --device cuda: the sizes are those of a GPU's kernel.", file=sys.stderr)
        raise SystemExit(2)
    from emp_llm.runtime import cuda_kernel

    flush = _flusher(arguments.device)
    for shape, zeros in itertools.product(arguments.shapes, arguments.zeros):
        weight, rows = _matrix(shape, zeros, arguments.device)
        matrix = cuda_kernel.device_rows(rows)
        x = torch.randn(1, rows.columns, device=arguments.device).to(weight.dtype)
        chosen = cuda_kernel.product_sizes(rows.rows, rows.columns, 1)
        tried: list[Any] = [chosen]
        for height, groups, warps in itertools.product(*TUNED.values()):
            columns = -(-chosen.split_columns // (4 * groups)) * 4 * groups
            splits = -(-rows.columns // columns)
            tried.append(
                chosen._replace(
                    rows=height, groups=groups, warps=warps, split_columns=columns, splits=splits
                )
            )
        ways: dict[str, Callable[[], object]] = {"dense": partial(functional.linear, x, weight)}
        ways |= {str(sizes): partial(cuda_kernel.multiply, matrix, x, sizes) for sizes in tried}
        times, failed = in_turn(
            ways, arguments.repeats, measure=lambda run: _time(run, flush, "cuda"), warm_up=True
        )
        print(f"{shape}, {zeros} % zeros; chosen: {chosen}")
        for name, taken in sorted(
            times.items(), key=lambda item: statistics.median(item[1] or [1])
        ):
            print(
                f"    {failed[name]}"
                if name in failed
                else f"    {1e6 * statistics.median(taken):8.1f} µs",
                name,
            )


def _page(arguments: argparse.Namespace, copy: float, lines: list[str]) -> str:
    command = (
        f"python scripts/bench_runtime_gpu.py --device {arguments.device} --shapes "
        f"{' '.join(arguments.shapes)}"
    )
    return (
        f"# Packed layers on a GPU\n\n`{command}`: {hardware(arguments.device)}. A copy within the "
        f"memory runs at {copy:,.0f} GB/s, read and written.\n\nbfloat16; medians, in turn with "
        "torch's dense layer, with a cold level 2 cache. GB/s: what is read once. limit: the ratio "
        "of the bytes.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
