"""Time of a refit, of SparseGPT and of ADMM against the machine's own matrix product.

    python scripts/bench_refit.py [--shapes 1024x2752] [--tokens 16384] [--repeats 3] [--output
    FILE] python scripts/bench_refit.py --device cuda

Half of the weights of a random matrix are removed by Wanda; the others are refitted. Inputs are the
products of two projections of hidden states, as in an MLP, with a spectrum that falls and a few
inputs that are much larger than the others. "refit" is the whole call, "steps" are those of its
slowest row, each of them one product of the weights with the matrix of moments, and "product" is
the time of one such product in float32, measured in turn with it. "gap" is the largest difference
of a row's objective from an exact float64 solution, relative to it, over some rows. "moments" is
the time that the sum of x x^T over the tokens takes in float32. Medians.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from bench_helpers import hardware, in_turn, wall_time
from torch import Tensor

from emp_llm.common.machine import float32_products
from emp_llm.update.least_squares import (
    Solution,
    output_error,
    refit_rows,
    workspace_bytes,
)
from emp_llm.update.update import admm, sparsegpt

SHAPES = {"cpu": ["1024x2752"], "cuda": ["1024x2752", "4096x4096", "11008x4096", "4096x11008"]}
TOKENS = {"cpu": 16384, "cuda": 65536}
DAMPING = 0.01
CHECKED_ROWS = 4
_BATCH = 4096  # tokens at a time
COLUMNS = (
    "matrix",
    "moments",
    "refit",
    "steps",
    "product",
    "gap",
    "error, relative to the output",
    "workspace",
    "SparseGPT",
    "its error",
    "ADMM",
    "its error, refitted",
)


class Layer(NamedTuple):
    """A matrix to prune: weights, mask, second moments of its inputs, and the seconds that these
    took.
    """

    weight: Tensor
    mask: Tensor
    gram: Tensor
    seconds: float


def main(line: list[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="OUTPUTSxINPUTS",
        help="default: 1024x2752, on a GPU also larger ones",
    )
    parser.add_argument(
        "--tokens", type=int, help="of the calibration; default: 16384, on a GPU 65536"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--output",
        type=Path,
        help="also write the table to this file, such as scripts/results/refit.md",
    )
    options = parser.parse_args(line)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "--device cuda needs an NVIDIA GPU and a torch that sees it; there is none here.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    torch.set_num_threads(options.threads)
    tokens = options.tokens or TOKENS[options.device]
    rows = [f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}"]
    print(rows[0])
    for shape in options.shapes or SHAPES[options.device]:
        outputs, inputs = (int(size) for size in shape.split("x"))
        rows.append(measured(outputs, inputs, tokens, options.device, options.repeats))
        print(rows[-1], flush=True)
        if options.output is not None:
            options.output.write_text(page(rows, tokens, options), encoding="utf-8")


def measured(outputs: int, inputs: int, tokens: int, device: str, repeats: int) -> str:
    """One row of the table."""
    layer = random_layer(outputs, inputs, tokens, device)
    found: list[Solution] = []
    room = torch.empty_like(layer.weight)

    def refit() -> None:
        found[:] = [refit_rows(layer.weight, layer.mask, layer.gram, damping=DAMPING)]

    def product() -> None:
        with float32_products("highest"):
            torch.mm(layer.weight, layer.gram, out=room)

    times, failed = in_turn({"product": product, "refit": refit}, repeats, warm_up=True)
    if failed:
        raise SystemExit(f"{outputs} x {inputs}: {failed}")
    one, all_of_it = (statistics.median(times[name]) for name in ("product", "refit"))
    result = found[0]
    energy = output_error(torch.zeros_like(layer.weight), layer.weight, layer.gram).sum()
    pruned = []
    searched = []
    pruning = wall_time(
        lambda: pruned.append(sparsegpt(layer.weight, layer.gram, count=layer.weight.numel() // 2))
    )
    counts = layer.mask.sum(1)
    searching = wall_time(
        lambda: searched.append(admm(layer.weight, layer.gram, counts=counts, damping=DAMPING))
    )
    best = refit_rows(layer.weight, searched[0].mask, layer.gram, damping=DAMPING)

    def error(weight: Tensor) -> float:
        return float(output_error(weight, layer.weight, layer.gram).sum() / energy)

    return (
        f"| {outputs} x {inputs} | {layer.seconds:.2f} s | {all_of_it:.2f} s | {result.steps} | "
        f"{one:.3f} s | {gap(layer, result):.0e} | {error(layer.weight * layer.mask):.2%} → "
        f"{error(result.weight):.2%} | {workspace_bytes(outputs, inputs) / 1e9:.2f} GB | "
        f"{pruning:.2f} s | {error(pruned[0].weight):.2%} | {searching:.2f} s | "
        f"{error(best.weight):.2%} |"
    )


def random_layer(outputs: int, inputs: int, tokens: int, device: str) -> Layer:
    """A random matrix, half of it kept by Wanda, and the second moments of random inputs."""
    generator = torch.Generator(device).manual_seed(0)
    width = max(inputs // 4, 1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    spectrum = torch.arange(1, width + 1, device=device) ** -0.5
    gate, up = (spectrum[:, None] * random(width, inputs) for _ in range(2))
    sizes = torch.ones(inputs, device=device)
    sizes[torch.randperm(inputs, generator=generator, device=device)[: max(1, inputs // 1000)]] = 30
    gram = torch.zeros(inputs, inputs, device=device)
    seconds = 0.0
    for start in range(0, tokens, _BATCH):
        hidden = random(min(_BATCH, tokens - start), width)
        x = torch.nn.functional.silu(hidden @ gate) * (hidden @ up) * sizes
        seconds += wall_time(lambda x=x: gram.addmm_(x.T, x))  # type: ignore[misc]
    weight = 0.02 * random(outputs, inputs)
    scores = weight.abs() * gram.diagonal().sqrt()
    places = scores.topk(inputs - inputs // 2, dim=1).indices
    mask = torch.zeros_like(weight, dtype=torch.bool).scatter_(1, places, True)
    return Layer(weight, mask, gram, seconds)


def exact_rows(
    weight: Tensor, mask: Tensor, gram: Tensor, cross: Tensor | None = None, damping: float = 0.01
) -> Tensor:
    """The minimum of F by a float64 factorisation for each row; the reference for `refit_rows`,
    with its arguments.

    Returns:
        float64, shape (outputs, inputs), zero where not kept.

    Raises:
        torch.linalg.LinAlgError: a matrix G_SS + lambda I is not positive definite.
    """
    gram = gram.double()
    dense = weight.double()
    shift = damping * gram.diagonal().mean()
    right = dense @ (gram if cross is None else cross.double()).T + shift * dense
    fitted = torch.zeros_like(dense)
    for row, kept in enumerate(mask):
        places = kept.nonzero()[:, 0]
        matrix = gram[places][:, places]
        matrix.diagonal().add_(shift)
        factor = torch.linalg.cholesky(matrix)
        fitted[row, places] = torch.cholesky_solve(right[row, places, None], factor)[:, 0]
    return fitted


def gap(layer: Layer, found: Solution) -> float:
    """The largest difference of a row's objective from that of an exact solution, relative to
    it, over the first rows.
    """
    weight = layer.weight[:CHECKED_ROWS].double()
    mask = layer.mask[:CHECKED_ROWS]
    gram = layer.gram.double()
    shift = DAMPING * gram.diagonal().mean()
    exact = exact_rows(weight, mask, gram, damping=DAMPING)

    def objective(fitted: Tensor) -> Tensor:
        change = fitted - weight
        return ((change @ gram) * change).sum(1) + shift * (change * mask).square().sum(1)

    best = objective(exact)
    reached = objective(found.weight[:CHECKED_ROWS].double())
    return float(((reached - best) / best).abs().max())


def page(rows: list[str], tokens: int, options: argparse.Namespace) -> str:
    """The table, and what it was made with."""
    command = (
        f"python scripts/bench_refit.py --device {options.device} --tokens {tokens} "
        f"--repeats {options.repeats}"
    )
    about = (
        f"`{command}`: {hardware(options.device)}; {options.threads} threads. Half of the weights "
        f"are removed, {tokens:,} tokens, damping {DAMPING:g}. The script explains the columns. "
        "Medians of one run, in turn."
    )
    return (
        f"# Refit against the matrix product of the machine\n\n{about}\n\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    main()
