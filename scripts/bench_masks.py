"""Masks against a plain copy and against sorting: GB/s of weights, and ratios, in one run.

    python scripts/bench_masks.py [--threads 2] [--repeats 7] [--write]

bfloat16 matrices of a 7 B model's MLP. The sort is pruning as Wanda's paper describes it: scores, a stable sort of every row,
and zeros scattered to the places of the smallest; EMP's as the paper does it, with the counts of Algorithm 1. All
three work on the same weights in turn; medians. `--write` puts the table in scripts/results/bench_masks.md.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from emp_llm.selection.budgets import Budget, EffectiveBudget, PatternBudget, RatioBudget
from emp_llm.selection.kernels.rows import has_kernel, prune_rows, prune_rows_plainly

SHAPES = ((11008, 4096), (4096, 11008))
RUNS: tuple[tuple[str, str, Budget], ...] = (
    ("emp-magnitude", "magnitude", EffectiveBudget()),
    ("emp-wanda", "wanda", EffectiveBudget()),
    ("magnitude 50 %", "magnitude", RatioBudget(0.5)),
    ("wanda 50 %", "wanda", RatioBudget(0.5)),
    ("magnitude 2:4", "magnitude", PatternBudget(2, 4)),
)
BLOCK = 1 << 20  # weights, as a checkpoint is pruned


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = [
        "| matrix | method | copy | kernel | GB/s | kernel / copy | torch, no kernel | sort | sort / kernel |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        norms = torch.rand(shape[1], generator=generator) + 0.1
        for name, criterion, budget in RUNS:
            lines.append(_row(weight, norms, name, criterion, budget, arguments.repeats))
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(f"\n{table}")
    if arguments.write:
        _write(table, arguments.threads, arguments.repeats)


def _row(weight: Tensor, norms: Tensor, name: str, criterion: str, budget: Budget, repeats: int) -> str:
    factors = norms if criterion == "wanda" else None
    room = torch.empty_like(weight)
    work, step = weight.clone(), max(1, BLOCK // weight.shape[1])
    if not has_kernel(work, criterion, budget):
        raise SystemExit("numba is not installed: pip install 'emp-llm[fast]'")

    def kernel() -> None:
        for first in range(0, len(work), step):
            prune_rows(work[first : first + step], criterion, factors, budget)

    def plain() -> None:
        for first in range(0, len(work), step):
            prune_rows_plainly(work[first : first + step], criterion, factors, budget)

    steps: dict[str, Callable[[], object]] = {"copy": lambda: room.copy_(weight), "kernel": kernel}
    slow: dict[str, Callable[[], object]] = {"plain": plain, "sort": lambda: _sorted(work, factors, budget)}
    times: dict[str, list[float]] = {step: [] for step in (*steps, *slow)}
    kernel()  # compiled, and the pages of all tensors at hand
    for repeat in range(repeats):
        for name_of_step, run in (steps if repeat else steps | slow).items():
            work.copy_(weight)
            start = time.perf_counter()
            run()
            times[name_of_step].append(time.perf_counter() - start)
    copy, fast, plainly, sort = (statistics.median(times[step]) for step in ("copy", "kernel", "plain", "sort"))
    size = weight.nbytes / 1e9
    return (
        f"| {weight.shape[0]} x {weight.shape[1]} | {name} | {1e3 * copy:.1f} ms | {1e3 * fast:.1f} ms | {size / fast:.2f} "
        f"| {fast / copy:.1f} | {1e3 * plainly:.0f} ms | {1e3 * sort:.0f} ms | {sort / fast:.0f} |"
    )


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
    ranks = torch.arange(columns).expand_as(order)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, ranks < removed[:, None])
    weight[mask] = 0


def _write(table: str, threads: int, repeats: int) -> None:
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    about = (
        "# Masks at memory speed\n\n"
        f"`python scripts/bench_masks.py --threads {threads} --repeats {repeats} --write`: {model}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, {threads} threads. bfloat16 weights, in place; medians of one run, in turn (the slow "
        "ones once).\n\n"
    )
    (Path(__file__).parent / "results" / "bench_masks.md").write_text(about + table + "\n", encoding="utf-8")


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


if __name__ == "__main__":
    main()
