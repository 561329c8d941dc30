"""Time of pruning a matrix relative to a plain copy and to sorting.

    python scripts/bench_masks.py [--threads 2] [--repeats 7] [--rows N] [--write]
    python scripts/bench_masks.py --device cuda [--repeats 30] [--write]

bfloat16 matrices of a 7B model's MLP. "sort" is pruning as described in Wanda's paper: scores, a
stable sort of every row, and zeros scattered to the places of the smallest; for EMP, with the
counts of Algorithm 1. All runs use the same weights in turn; medians. On the CPU, "kernel" is the
compiled kernel, and "torch" the reference for machines without numba and for other dtypes; both
must give the same bits. `--write` writes the table to scripts/results: bench_masks.md or
bench_masks_cuda.md.

On a GPU the reference prunes whole matrices, and the copy is one within its memory; times are read
from the GPU's clock.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bench_helpers import gpu_time, processor, wall_time
from torch import Tensor

from emp_llm.selection.criteria import InputStatistics, magnitude, wanda
from emp_llm.selection.reference import apply_selection, select_rows
from emp_llm.selection.rows import has_kernel, prune_words, words_of
from emp_llm.selection.rule import KeepRule

SHAPES = ((11008, 4096), (4096, 11008))
# name, with norms, rule; None: half of each row.
RUNS: tuple[tuple[str, bool, KeepRule | None], ...] = (
    ("emp-magnitude", False, KeepRule(beta=1.0)),
    ("emp-wanda", True, KeepRule(beta=1.0)),
    ("magnitude 50 %", False, None),
    ("wanda 50 %", True, None),
    ("magnitude 2:4", False, KeepRule(pattern=(2, 4))),
)
CHUNK = 1 << 21  # weights at a time, as in `emp-llm prune`


def main(line: list[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--rows", type=int, help="on the CPU: only the first rows of each matrix; default: all"
    )
    parser.add_argument(
        "--repeats", type=int, help="times that each run is measured; default: 7, on a GPU 30"
    )
    parser.add_argument("--write", action="store_true", help="write the table to scripts/results")
    arguments = parser.parse_args(line)
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        _on_gpu(arguments.repeats or 30, arguments.write)
        return
    repeats = arguments.repeats or 7
    lines = [
        "| matrix | method | copy | kernel | GB/s | kernel / copy | torch | sort | sort / kernel |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        weight, norms = random_matrix((min(shape[0], arguments.rows or shape[0]), shape[1]))
        for name, with_norms, rule in RUNS:
            times = cpu_times(
                weight, norms if with_norms else None, rule_for(rule, weight), repeats
            )
            lines.append(_row(weight, name, times))
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(f"\n{table}")
    if arguments.write:
        _write(table, arguments.threads, repeats)


def random_matrix(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random bfloat16 weights, and norms of their inputs."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
    return weight, torch.rand(shape[1], generator=generator) + 0.1


def rule_for(rule: KeepRule | None, weight: Tensor) -> KeepRule:
    """A rule of `RUNS` for a matrix."""
    return rule or KeepRule(counts=weight.shape[1] - weight.shape[1] // 2)


def by_reference(weight: Tensor, norms: Tensor | None, rule: KeepRule) -> None:
    """Prune rows in place by the torch reference, on any device."""
    scores = magnitude(weight) if norms is None else wanda(weight, InputStatistics(norms))
    apply_selection(weight, select_rows(scores, rule))


def _row(weight: Tensor, name: str, times: dict[str, float]) -> str:
    copy, fast, plain, sort = (times[step] for step in ("copy", "kernel", "torch", "sort"))
    size = weight.nbytes / 1e9
    return (
        f"| {weight.shape[0]} x {weight.shape[1]} | {name} | {1e3 * copy:.1f} ms | "
        f"{1e3 * fast:.1f} ms | {size / fast:.2f} | {fast / copy:.1f} | "
        f"{1e3 * plain:.0f} ms | {1e3 * sort:.0f} ms | {sort / fast:.0f} |"
    )


def cpu_times(
    weight: Tensor, norms: Tensor | None, rule: KeepRule, repeats: int
) -> dict[str, float]:
    """Median seconds of a copy, of the kernel, of the reference, and of sorting; the last two are
    measured once.

    Raises:
        SystemExit: there is no kernel, or kernel and reference give different bits.
    """
    room = torch.empty_like(weight)
    work = weight.clone()
    step = max(1, CHUNK // weight.shape[1])
    if not has_kernel(work, rule):
        raise SystemExit("the compiled kernel does not load; is numba installed?")

    def in_chunks(prune: Callable[[Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            for first in range(0, len(work), step):
                prune(work[first : first + step])

        return run

    factors = None if norms is None else norms.numpy()
    kernel = in_chunks(lambda rows: prune_words(words_of(rows), "BF16", factors, rule))
    steps: dict[str, Callable[[], object]] = {"copy": lambda: room.copy_(weight), "kernel": kernel}
    slow: dict[str, Callable[[], object]] = {
        "torch": in_chunks(lambda rows: by_reference(rows, norms, rule)),
        "sort": lambda: _sorted(work, norms, rule),
    }
    times: dict[str, list[float]] = {step: [] for step in (*steps, *slow)}
    results: list[Tensor] = []
    kernel()  # compiles, and touches the pages of all tensors
    for repeat in range(repeats):
        for name, run in (steps if repeat else steps | slow).items():
            work.copy_(weight)
            times[name].append(wall_time(run))
            if not repeat and name in ("kernel", "torch"):
                results.append(work.view(torch.int16).clone())
    if not all(torch.equal(results[0], result) for result in results):
        raise SystemExit(f"{rule}: kernel and torch give different bits")
    return {name: statistics.median(taken) for name, taken in times.items()}


def _sorted(weight: Tensor, norms: Tensor | None, rule: KeepRule) -> None:
    """As published: sort every row's scores, and set the weights of the smallest to zero."""
    scores = weight.abs() if norms is None else weight.abs().float() * norms
    columns = weight.shape[1]
    if rule.pattern is not None:
        n, m = rule.pattern
        mask = torch.zeros_like(scores, dtype=torch.bool)
        for start in range(0, columns, m):
            smallest = scores[:, start : start + m].topk(m - n, dim=1, largest=False)[1]
            mask.scatter_(1, start + smallest, True)
        weight[mask] = 0
        return
    order = torch.sort(scores, dim=-1, stable=True)[1]
    if isinstance(rule.counts, int):
        weight.scatter_(1, order[:, : columns - rule.counts], 0)
        return
    omega = scores.float() / scores.float().sum(1, keepdim=True)
    removed = columns - (1 / omega.square().sum(1)).floor().long()
    ranks = torch.arange(columns, device=order.device).expand_as(order)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, ranks < removed[:, None])
    weight[mask] = 0


def _on_gpu(repeats: int, write: bool) -> None:
    """The table for the current GPU."""
    if not torch.cuda.is_available():
        print(
            "--device cuda needs an NVIDIA GPU and a torch that sees it; there is none here.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    lines = [
        "| matrix | method | copy | torch | GB/s | torch / copy | sort |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        weight, norms = (tensor.cuda() for tensor in random_matrix(shape))
        for name, with_norms, rule in RUNS:
            times = gpu_times(
                weight, norms if with_norms else None, rule_for(rule, weight), repeats
            )
            copy, plain, sort = (times[step] for step in ("copy", "torch", "sort"))
            lines.append(
                f"| {shape[0]} x {shape[1]} | {name} | {1e3 * copy:.3f} ms | {1e3 * plain:.1f} ms "
                f"| {2 * weight.nbytes / 1e9 / plain:.0f} | {plain / copy:.0f} | {1e3 * sort:.1f} "
                "ms |"
            )
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(f"\n{table}")
    if write:
        about = (
            "# Masks on a GPU\n\n"
            f"`python scripts/bench_masks.py --device cuda --repeats {repeats} --write`: "
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}. bfloat16 weights, in "
            "place, by the torch reference (`--mask-device cuda`); medians of one run, in turn. "
            "GB/s: weights read once and written once.\n\n"
        )
        (Path(__file__).parent / "results" / "bench_masks_cuda.md").write_text(
            about + table + "\n", encoding="utf-8"
        )


def gpu_times(
    weight: Tensor, norms: Tensor | None, rule: KeepRule, repeats: int
) -> dict[str, float]:
    """Median seconds, by the clock of the GPU, of a copy, of the reference, and of sorting;
    weight and norms are on the GPU.
    """
    room = torch.empty_like(weight)
    work = weight.clone()
    steps: dict[str, Callable[[], object]] = {
        "copy": lambda: room.copy_(work),
        "torch": lambda: by_reference(work, norms, rule),
        "sort": lambda: _sorted(work, norms, rule),
    }
    times: dict[str, list[float]] = {step: [] for step in steps}
    for repeat in range(-2, repeats):  # the first two are not counted
        for step, run in steps.items():
            work.copy_(weight)
            taken = gpu_time(run)
            if repeat >= 0:
                times[step].append(taken)
    return {step: statistics.median(taken) for step, taken in times.items()}


def _write(table: str, threads: int, repeats: int) -> None:
    about = (
        "# Masks at memory speed\n\n"
        f"`python scripts/bench_masks.py --threads {threads} --repeats {repeats} --write`: "
        f"{processor()}; torch {torch.__version__}, {threads} threads. bfloat16 weights, in place; "
        "medians of one run, in turn (torch and sort once).\n\n"
    )
    (Path(__file__).parent / "results" / "bench_masks.md").write_text(
        about + table + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
