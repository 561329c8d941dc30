"""Time of pruning a matrix relative to a plain copy and to sorting.

    python scripts/bench_masks.py [--threads 2] [--repeats 7] [--rows N] [--write]
    python scripts/bench_masks.py --device cuda [--repeats 30] [--write]

bfloat16 matrices of a 7B model's MLP. "sort" is pruning as described in Wanda's paper: scores, a stable sort of every row, and
zeros scattered to the places of the smallest; for EMP, with the counts of Algorithm 1. All runs use the same weights in turn;
medians. On the CPU, "numpy" is the pruning of machines without numba, and "torch" the reference for other dtypes; all must give
the same bits. `--write` writes the table to scripts/results: bench_masks.md or bench_masks_cuda.md.

On a GPU whole matrices are pruned, to another tensor and in place, and the copy is one within its memory. Times are read from
the GPU's clock, with work queued ahead so that it never waits for Python; "call" is the caller's wait for prune_rows.
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

from emp_llm.selection.budgets import Budget, EffectiveBudget, PatternBudget, RatioBudget
from emp_llm.selection.kernels.numpy_rows import prune_words_by_numpy
from emp_llm.selection.rows import has_kernel, prune_rows
from emp_llm.selection.row_pruning import prune_rows_plainly

SHAPES = ((11008, 4096), (4096, 11008))
RUNS: tuple[tuple[str, str, Budget], ...] = (
    ("emp-magnitude", "magnitude", EffectiveBudget()),
    ("emp-wanda", "wanda", EffectiveBudget()),
    ("magnitude 50 %", "magnitude", RatioBudget(0.5)),
    ("wanda 50 %", "wanda", RatioBudget(0.5)),
    ("magnitude 2:4", "magnitude", PatternBudget(2, 4)),
)
BLOCK = 1 << 21  # weights at a time, as in `emp-llm prune`


def main(line: list[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rows", type=int, help="on the CPU: only the first rows of each matrix; default: all")
    parser.add_argument("--repeats", type=int, help="times that each run is measured; default: 7, on a GPU 30")
    parser.add_argument("--write", action="store_true", help="write the table to scripts/results")
    arguments = parser.parse_args(line)
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        _on_gpu(arguments.repeats or 30, arguments.write)
        return
    repeats = arguments.repeats or 7
    lines = [
        "| matrix | method | copy | kernel | GB/s | kernel / copy | numpy | torch | sort | sort / kernel |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        weight, norms = random_matrix((min(shape[0], arguments.rows or shape[0]), shape[1]))
        for name, criterion, budget in RUNS:
            lines.append(_row(weight, norms, name, criterion, budget, repeats))
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


def _row(weight: Tensor, norms: Tensor, name: str, criterion: str, budget: Budget, repeats: int) -> str:
    times = cpu_times(weight, norms if criterion == "wanda" else None, criterion, budget, repeats)
    copy, fast, numpy, plainly, sort = (times[step] for step in ("copy", "kernel", "numpy", "plain", "sort"))
    size = weight.nbytes / 1e9
    return (
        f"| {weight.shape[0]} x {weight.shape[1]} | {name} | {1e3 * copy:.1f} ms | {1e3 * fast:.1f} ms | {size / fast:.2f} "
        f"| {fast / copy:.1f} | {1e3 * numpy:.0f} ms | {1e3 * plainly:.0f} ms | {1e3 * sort:.0f} ms | {sort / fast:.0f} |"
    )


def cpu_times(weight: Tensor, norms: Tensor | None, criterion: str, budget: Budget, repeats: int) -> dict[str, float]:
    """Median seconds of a copy, of the kernel, of numpy, of plain torch, and of sorting; the last three are measured once.

    Raises:
        SystemExit: there is no kernel, or kernel, numpy and torch give different bits.
    """
    room = torch.empty_like(weight)
    work, step = weight.clone(), max(1, BLOCK // weight.shape[1])
    if not has_kernel(work, criterion, budget):
        raise SystemExit("the compiled kernel does not load; is numba installed?")

    def kernel() -> None:
        for first in range(0, len(work), step):
            prune_rows(work[first : first + step], criterion, norms, budget)

    def by_numpy() -> None:
        factors = None if norms is None else norms.numpy()
        for first in range(0, len(work), step):
            block = work[first : first + step]
            prune_words_by_numpy(block.view(torch.uint16).numpy(), "BF16", factors, budget.keep_rule(block.shape))

    def plain() -> None:
        for first in range(0, len(work), step):
            prune_rows_plainly(work[first : first + step], criterion, norms, budget)

    steps: dict[str, Callable[[], object]] = {"copy": lambda: room.copy_(weight), "kernel": kernel}
    slow: dict[str, Callable[[], object]] = {"numpy": by_numpy, "plain": plain}
    slow["sort"] = lambda: _sorted(work, norms, budget)
    times: dict[str, list[float]] = {step: [] for step in (*steps, *slow)}
    results: list[Tensor] = []
    kernel()  # compiles, and touches the pages of all tensors
    for repeat in range(repeats):
        for name, run in (steps if repeat else steps | slow).items():
            work.copy_(weight)
            times[name].append(wall_time(run))
            if not repeat and name in ("kernel", "numpy", "plain"):
                results.append(work.view(torch.int16).clone())
    if not all(torch.equal(results[0], result) for result in results):
        raise SystemExit(f"{criterion}, {budget}: kernel, numpy and torch give different bits")
    return {name: statistics.median(taken) for name, taken in times.items()}


def _sorted(weight: Tensor, norms: Tensor | None, budget: Budget) -> None:
    """As published: sort every row's scores, and set the weights of the smallest to zero."""
    scores = weight.abs() if norms is None else weight.abs().float() * norms
    columns = weight.shape[1]
    if isinstance(budget, PatternBudget):
        mask = torch.zeros_like(scores, dtype=torch.bool)
        for start in range(0, columns, budget.m):
            smallest = scores[:, start : start + budget.m].topk(budget.m - budget.n, dim=1, largest=False)[1]
            mask.scatter_(1, start + smallest, True)
        weight[mask] = 0
        return
    order = torch.sort(scores, dim=-1, stable=True)[1]
    if isinstance(budget, RatioBudget):
        weight.scatter_(1, order[:, : int(columns * budget.sparsity)], 0)
        return
    omega = scores.float() / scores.float().sum(1, keepdim=True)
    removed = columns - (1 / omega.square().sum(1)).floor().long()
    ranks = torch.arange(columns, device=order.device).expand_as(order)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, ranks < removed[:, None])
    weight[mask] = 0


def _on_gpu(repeats: int, write: bool) -> None:
    """The table for the current GPU."""
    if not torch.cuda.is_available():
        print("--device cuda needs an NVIDIA GPU and a torch that sees it; there is none here.", file=sys.stderr)
        raise SystemExit(2)
    lines = [
        "| matrix | method | copy | kernel | GB/s | of the copy's speed | in place | of the copy's speed | call "
        "| torch, no kernel | sort | sort / kernel |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        weight, norms = (tensor.cuda() for tensor in random_matrix(shape))
        for name, criterion, budget in RUNS:
            lines.append(_gpu_row(weight, norms if criterion == "wanda" else None, name, criterion, budget, repeats))
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(f"\n{table}")
    if write:
        about = (
            "# Masks at memory speed, on a GPU\n\n"
            f"`python scripts/bench_masks.py --device cuda --repeats {repeats} --write`: {torch.cuda.get_device_name()}, "
            f"torch {torch.__version__}. bfloat16 weights; medians of one run, in turn (the slow ones fewer times). GB/s: what "
            "is read once and written once. kernel: to another tensor; call: prune_rows in place, until the caller has it.\n\n"
        )
        (Path(__file__).parent / "results" / "bench_masks_cuda.md").write_text(about + table + "\n", encoding="utf-8")


def _gpu_row(weight: Tensor, norms: Tensor | None, name: str, criterion: str, budget: Budget, repeats: int) -> str:
    times = gpu_times(weight, norms, criterion, budget, repeats)
    copy, kernel, in_place, call, plain, sort = (
        1e3 * times[step] for step in ("copy", "kernel", "in place", "call", "plain", "sort")
    )
    speed = 2 * weight.nbytes / 1e6 / kernel
    return (
        f"| {weight.shape[0]} x {weight.shape[1]} | {name} | {copy:.3f} ms | {kernel:.3f} ms | {speed:.0f} "
        f"| {copy / kernel:.0%} | {in_place:.3f} ms | {copy / in_place:.0%} | {call:.3f} ms | {plain:.1f} ms | {sort:.2f} ms "
        f"| {sort / kernel:.0f} |"
    )


def gpu_times(weight: Tensor, norms: Tensor | None, criterion: str, budget: Budget, repeats: int) -> dict[str, float]:
    """Median seconds on a GPU: by its own clock, except for `call`, which is the wall time of prune_rows in place.

    Args:
        weight, norms: on the GPU.
        repeats: of each way; of plain torch and of sorting, at most three.
    """
    if not has_kernel(weight, criterion, budget):
        raise SystemExit("there is no kernel for this GPU here: it takes compute capability 8.0 and Triton")
    from emp_llm.selection.kernels.cuda import enqueue

    rule = budget.keep_rule(tuple(weight.shape))
    room, work = torch.empty_like(weight), weight.clone()
    steps: dict[str, Callable[[], object]] = {
        "copy": lambda: room.copy_(work),
        "kernel": lambda: enqueue(work, norms, rule, out=room),
        "in place": lambda: enqueue(work, norms, rule),
        "call": lambda: prune_rows(work, criterion, norms, budget),
        "plain": lambda: prune_rows_plainly(work, criterion, norms, budget),
        "sort": lambda: _sorted(work, norms, budget),
    }
    times: dict[str, list[float]] = {step: [] for step in steps}
    for repeat in range(-2, repeats):  # the first two, in which kernels are compiled, are not counted
        for step, run in steps.items():
            if step in ("plain", "sort") and repeat > 2:
                continue
            work.copy_(weight)
            taken = wall_time(run) if step == "call" else gpu_time(run)
            if repeat >= 0:
                times[step].append(taken)
    return {step: statistics.median(taken) for step, taken in times.items()}


def _write(table: str, threads: int, repeats: int) -> None:
    about = (
        "# Masks at memory speed\n\n"
        f"`python scripts/bench_masks.py --threads {threads} --repeats {repeats} --write`: {processor()}; torch "
        f"{torch.__version__}, {threads} threads. bfloat16 weights, in place; medians of one run, in turn (numpy, torch and "
        "sort once).\n\n"
    )
    (Path(__file__).parent / "results" / "bench_masks.md").write_text(about + table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
