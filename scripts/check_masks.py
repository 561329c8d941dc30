"""The kernel against a float64 oracle, weight by weight: numpy's stable sort of float64 scores, counts from float64 sums.

    python scripts/check_masks.py [--weights 100000000] [--write]

Each dtype and criterion gets that many weights, in rows of odd lengths: Gaussian, heavy-tailed, few values (ties are the rule),
mostly zeros, uniform, and subnormal next to huge. Prints how many weights differ; exit code 1 if any does.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from emp_llm.selection.budgets import EffectiveBudget
from emp_llm.selection.row_pruning import has_kernel, prune_rows

WIDTHS = (4096, 11008, 1000, 333, 64)
KINDS = ("gaussian", "heavy", "ties", "sparse", "uniform", "extreme")


def main() -> None:
    """Check, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=100_000_000)
    parser.add_argument("--write", action="store_true", help="put the table in scripts/results/check_masks.md")
    arguments = parser.parse_args()
    lines = ["| weights | criterion | checked | rows | different |", "|---|---|---:|---:|---:|"]
    wrong = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for criterion in ("magnitude", "wanda"):
            checked, rows, different = _check(dtype, criterion, arguments.weights)
            wrong += different
            lines.append(f"| {str(dtype).removeprefix('torch.')} | {criterion} | {checked:,} | {rows:,} | {different} |")
            print(lines[-1], flush=True)
    if arguments.write:
        head = f"# The kernel against a float64 oracle\n\n`python scripts/check_masks.py --weights {arguments.weights}`: EMP, "
        head += f"{', '.join(KINDS)} rows of {', '.join(map(str, WIDTHS))} weights, torch {torch.__version__}.\n\n"
        path = Path(__file__).parent / "results" / "check_masks.md"
        path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(wrong > 0)


def _check(dtype: torch.dtype, criterion: str, weights: int) -> tuple[int, int, int]:
    generator = torch.Generator().manual_seed(0)
    checked = rows = different = turn = 0
    while checked < weights:
        width, kind = WIDTHS[turn % len(WIDTHS)], KINDS[turn % len(KINDS)]
        turn += 1
        weight = _weights(kind, ((1 << 21) // width, width), generator).to(dtype)
        norms = torch.rand(width, generator=generator) * 10
        if not has_kernel(weight, criterion, EffectiveBudget()):
            raise SystemExit("numba is not installed: pip install numba")
        scores = weight.float().abs().numpy()
        if criterion == "wanda":
            scores = scores * norms.numpy()
        expected = _oracle(scores.astype(np.float64))
        pruned = weight.clone()
        prune_rows(pruned, criterion, norms, EffectiveBudget())
        wanted = torch.where(torch.from_numpy(expected), weight, 0)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        different += int((pruned.view(bits) != wanted.view(bits)).sum())
        checked += weight.numel()
        rows += weight.shape[0]
    return checked, rows, different


def _weights(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if kind == "heavy":
        return values.pow(5)
    if kind == "ties":
        return values.sign() * torch.randint(0, 4, shape, generator=generator)
    if kind == "sparse":
        return values * (torch.rand(shape, generator=generator) < 0.05)
    if kind == "uniform":
        return torch.full(shape, 0.1) * (torch.arange(shape[0])[:, None] % 7)
    if kind == "extreme":
        return values.clamp(-3, 3) * torch.where(torch.rand(shape, generator=generator) < 0.5, 1e-7, 1e4)
    return values


def _oracle(scores: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    total, squares = scores.sum(1), np.square(scores).sum(1)
    with np.errstate(invalid="ignore"):
        counts = np.clip(np.floor(total * total / squares * (1 + 2.0**-44)), 1, scores.shape[1])
    counts = np.where(total == 0, scores.shape[1], counts).astype(np.int64)
    order = np.argsort(-scores, axis=1, kind="stable")
    mask = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(mask, order, np.arange(scores.shape[1])[None, :] < counts[:, None], axis=1)
    return mask


if __name__ == "__main__":
    main()
