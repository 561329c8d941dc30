"""The masks of EMP against a float64 oracle, weight by weight: a stable sort in numpy, with counts
from float64 sums.

    python scripts/check_masks.py [--weights 100000000] [--write]

Both ways to prune rows on a CPU are checked: the compiled kernel, and plain torch (small models, no
numba, and other dtypes). Each dtype and criterion gets that many weights, in rows of odd lengths:
Gaussian, heavy-tailed, few values (ties are the rule), mostly zeros, uniform, and subnormal next to
huge. Prints the number of weights that differ; the exit code is 1 if there are any.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emp_llm.selection.criteria import InputStatistics, magnitude, wanda
from emp_llm.selection.reference import apply_selection, select_rows
from emp_llm.selection.rows import has_kernel, prune_words, words_of
from emp_llm.selection.rule import KeepRule

WIDTHS = (4096, 11008, 1000, 333, 64)
KINDS = ("gaussian", "heavy", "ties", "sparse", "uniform", "extreme")
# dtype -> (its name in safetensors, the unsigned and the signed integer dtype of its bits)
DTYPES = {
    torch.bfloat16: ("BF16", torch.uint16, torch.int16),
    torch.float16: ("F16", torch.uint16, torch.int16),
    torch.float32: ("F32", torch.uint32, torch.int32),
    torch.float64: ("F64", torch.uint64, torch.int64),
}
RULE = KeepRule(beta=1.0)
BLOCK = 1 << 19  # weights that are checked at a time; 30 blocks cover all kinds and widths


def main(line: list[str] | None = None) -> None:
    """Check, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weights",
        type=int,
        default=100_000_000,
        help="for each dtype and criterion; default: 10^8",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to scripts/results/check_masks.md"
    )
    arguments = parser.parse_args(line)
    lines = [
        "| weights | criterion | checked | rows | ways | different |",
        "|---|---|---:|---:|---|---:|",
    ]
    wrong = 0
    for dtype in DTYPES:
        for criterion in ("magnitude", "wanda"):
            ways = ways_to_prune(dtype, criterion)
            checked, rows, different = _check(dtype, criterion, ways, arguments.weights)
            wrong += different
            name = str(dtype).removeprefix("torch.")
            lines.append(
                f"| {name} | {criterion} | {checked:,} | {rows:,} | {', '.join(ways)} | "
                f"{different} |"
            )
            print(lines[-1], flush=True)
    if arguments.write:
        head = (
            "# Masks against a float64 oracle\n\n`python scripts/check_masks.py --weights "
            f"{arguments.weights} --write`: EMP, "
        )
        head += (
            f"{', '.join(KINDS)} rows of {', '.join(map(str, WIDTHS))} weights, torch "
            f"{torch.__version__}.\n\n"
        )
        path = Path(__file__).parent / "results" / "check_masks.md"
        path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(wrong > 0)


def ways_to_prune(
    dtype: torch.dtype, criterion: str
) -> dict[str, Callable[[Tensor, Tensor], object]]:
    """The implementations that take a dtype, by name; each prunes weights in place, given the
    norms.
    """
    name = DTYPES[dtype][0]
    by_norms = criterion == "wanda"

    def by_words(weight: Tensor, norms: Tensor) -> object:
        return prune_words(words_of(weight), name, norms.numpy() if by_norms else None, RULE)

    ways: dict[str, Callable[[Tensor, Tensor], object]] = {}
    if has_kernel(torch.ones(1, 1, dtype=dtype), RULE):
        ways["compiled"] = by_words

    def by_torch(weight: Tensor, norms: Tensor) -> None:
        scores = wanda(weight, InputStatistics(norms)) if by_norms else magnitude(weight)
        apply_selection(weight, select_rows(scores, RULE))

    ways["torch"] = by_torch
    return ways


def _check(
    dtype: torch.dtype,
    criterion: str,
    ways: dict[str, Callable[[Tensor, Tensor], object]],
    weights: int,
) -> tuple[int, int, int]:
    """The number of checked weights, that of rows, and that of wrong weights by all ways."""
    generator = torch.Generator().manual_seed(0)
    checked = rows = different = turn = 0
    while checked < weights:
        width = WIDTHS[turn % len(WIDTHS)]
        kind = KINDS[turn % len(KINDS)]
        turn += 1
        weight = _weights(kind, (BLOCK // width, width), generator).to(dtype)
        norms = torch.rand(width, generator=generator) * 10
        scores = (weight if dtype == torch.float64 else weight.float()).abs()
        if criterion == "wanda":
            scores = scores * norms
        wanted = torch.where(torch.from_numpy(_oracle(scores.double().numpy())), weight, 0)
        for prune in ways.values():
            pruned = weight.clone()
            prune(pruned, norms)
            bits = DTYPES[dtype][2]
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
        return values.clamp(-3, 3) * torch.where(
            torch.rand(shape, generator=generator) < 0.5, 1e-7, 1e4
        )
    return values


def _oracle(scores: NDArray[Any]) -> NDArray[np.bool_]:
    """The mask of Algorithm 1, for float64 scores."""
    total = scores.sum(1)
    squares = np.square(scores).sum(1)
    with np.errstate(invalid="ignore"):
        counts = np.clip(np.floor(total * total / squares * (1 + 2.0**-44)), 1, scores.shape[1])
    counts = np.where(total == 0, scores.shape[1], counts).astype(np.int64)
    order = np.argsort(-scores, axis=1, kind="stable")
    mask = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(mask, order, np.arange(scores.shape[1])[None, :] < counts[:, None], axis=1)
    return mask


if __name__ == "__main__":
    main()
