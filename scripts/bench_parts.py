"""The parts of SparseGPT, ADMM and the refit on one device, in the way of today and, where it is
still here, in an earlier or another one; `scripts/bench_gpu.py` measures them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from bench_helpers import in_turn
from torch import Tensor

from emp_llm.common import machine
from emp_llm.common.machine import float32_products
from emp_llm.selection import reference
from emp_llm.selection.rule import KeepRule
from emp_llm.update import admm, least_squares, sparsegpt
from emp_llm.update.admm import Admm
from emp_llm.update.sparsegpt import SparseGPT
from emp_llm.update.update import Allowed, Moments, Refit

Way = Callable[[], object]
_BLOCK = 128  # columns of SparseGPT's block
_OLD_PIECE = 1 << 15


class Part(NamedTuple):
    """A part: its name, the seconds of each way, and of a way that fails, why."""

    name: str
    seconds: dict[str, list[float]]
    failed: dict[str, str]


def parts(
    device: str, shapes: tuple[tuple[int, int], ...], tokens: int, repeats: int, seconds: float
) -> Iterator[Part]:
    """Measure the parts.

    Args:
        shapes: (outputs, inputs) of layers.
        tokens: of a batch.
        repeats: of each way at most.
        seconds: of a part, after which no further round starts.
    """
    for outputs, inputs in shapes:
        generator = torch.Generator(device).manual_seed(0)
        weight = torch.randn(outputs, inputs, generator=generator, device=device)
        x = torch.randn(tokens, inputs, generator=generator, device=device).bfloat16()
        gram = least_squares.symmetric(least_squares.add_moments(x, x))
        for name, ways in _ways(weight, x, gram).items():
            title = f"{outputs} x {inputs}, {name}"
            yield Part(title, *in_turn(ways, repeats, seconds, warm_up=True))
        del weight, x, gram
        if device == "cuda":
            torch.cuda.empty_cache()


def _ways(weight: Tensor, x: Tensor, gram: Tensor) -> dict[str, dict[str, Way]]:
    """Part -> way -> what to do."""
    outputs, inputs = weight.shape
    counts = torch.full((outputs,), inputs // 2, device=weight.device)
    mask = reference.largest_mask(weight, counts)
    half = weight.bfloat16()
    rule = KeepRule(counts=inputs // 2)
    moments = Moments(gram, None, torch.ones(outputs, device=weight.device).double(), len(x))
    columns = weight[:, :_BLOCK].clone()
    factor = torch.eye(columns.shape[1], device=weight.device)
    system = gram / gram.diagonal().mean()
    system.diagonal().add_(1)

    def prune_block() -> object:
        return sparsegpt._prune_block(columns, mask[:, :_BLOCK].clone(), factor, None)

    def masks(weight: Tensor) -> object:
        return reference.select_rows(weight[: max(1, (1 << 21) // inputs)].abs(), rule)

    allowed = Allowed(counts=counts)
    of_matrix = Allowed(counts=counts.sum().reshape(1))
    products: dict[str, Way] = {"now": partial(_product, weight, gram)}
    if least_squares._factors(weight[:1])[0].dtype == torch.bfloat16:
        products["two parts"] = partial(_product, weight, gram, 2)
    return {
        f"moments of {len(x):,} tokens": {
            "now": lambda: least_squares.add_moments(x, x),
            "panels": lambda: _panel_moments(x),
        },
        "float32 product": products | {"torch": lambda: _float32(weight, gram)},
        f"SparseGPT, {_BLOCK} columns": {
            "now": prune_block,
            "loop": _with([(machine, "runs_triton", lambda device: False)], prune_block),
        },
        "masks of ADMM": {
            "now": lambda: reference.largest_mask(weight, counts),
            "sort": lambda: _sorted_mask(weight, counts),
        },
        "factor and inverse of ADMM": {
            "now": lambda: admm._inverse(system.clone()),
            "panels": lambda: _panel_inverse(system.clone()),
        },
        "masks, 2 M weights": {
            "now": lambda: masks(half),
            "small pieces, sort": _with(
                [
                    (reference, "_GPU_PIECE", _OLD_PIECE),
                    (reference, "_has_kernel", lambda keys: False),
                ],
                lambda: masks(half),
            ),
        },
        "SparseGPT": {"now": lambda: SparseGPT().solve(weight, moments, of_matrix, 0.01)},
        "refit": {"now": lambda: Refit().solve(weight, moments, Allowed(mask=mask), 0.01)},
        "ADMM": {"now": lambda: Admm().solve(weight, moments, allowed, 0.01)},
    }


def _with(changes: list[tuple[object, str, object]], way: Way) -> Way:
    """A way, with other values of some names of modules."""

    def run() -> None:
        with ExitStack() as stack:
            for module, name, value in changes:
                stack.enter_context(patch.object(module, name, value))
            way()

    return run


def _float32(left: Tensor, right: Tensor) -> Tensor:
    with float32_products("highest"):
        return left @ right


def _product(left: Tensor, right: Tensor, parts: int | None = None) -> Tensor:
    if parts is None:
        return least_squares.add_product(left, right)
    factors = [least_squares._factors(each, parts) for each in (left, right)]
    return least_squares._add_product_on_gpu(factors[0], factors[1])


def _panel_moments(x: Tensor) -> Tensor:
    """The upper triangle of x^T x, as on a CPU."""
    total = torch.zeros(x.shape[1], x.shape[1], device=x.device)
    values = x.float()
    with float32_products("medium"):
        for first in range(0, len(x), 512):
            rows = slice(first, first + 512)
            for start in range(0, x.shape[1], 256):
                panel = slice(start, start + 256)
                total[panel, start:].addmm_(values[rows, panel].T, values[rows, start:])
    return total


def _sorted_mask(weight: Tensor, counts: Tensor) -> Tensor:
    """`largest_mask` by the sorted keys."""
    keys = reference.order_keys(weight)
    with patch.object(reference, "_has_kernel", lambda keys: False):
        (cut,) = reference.row_cuts(keys, counts)
    return reference.keep_mask(keys, cut)


def _panel_inverse(lower: Tensor) -> Tensor:
    """The inverse of a matrix by factors of 128 columns, and products of 256."""
    identity = torch.eye(len(lower), device=lower.device)
    for first in range(0, len(lower), 128):
        here = slice(first, first + 128)
        rest = slice(first + 128, None)
        lower[here, here], failed = torch.linalg.cholesky_ex(lower[here, here])
        if int(failed):
            raise SystemExit("the matrix is not positive definite")
        lower[rest, here] = torch.linalg.solve_triangular(
            lower[here, here].T, lower[rest, here], upper=True, left=False
        )
        lower[rest, rest].addmm_(lower[rest, here], lower[rest, here].T, alpha=-1)
    factor = torch.linalg.solve_triangular(lower.tril_(), identity, upper=False)
    inverse = torch.empty_like(factor)
    for start in range(0, len(factor), 256):
        panel = slice(start, start + 256)
        rest = slice(start, None)
        inverse[panel, rest] = factor[rest, panel].T @ factor[rest, rest]
    return least_squares.symmetric(inverse)
