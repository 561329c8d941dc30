"""ADMM: the mask and the weights of a layer, searched for together by the alternating direction
method of multipliers.

A row keeps k of its weights. Which ones, and at which values, so that the layer returns as much as
possible of what it returned? The squared error of the outputs and the limit on the number of
weights are split between two copies of the weights, which are drawn towards each other (Boza 2024,
arXiv 2401.02938, and Meng et al. 2024, arXiv 2406.07831):

    Z <- the k largest of X + U by row, the others zero
    U <- U + X - Z
    X <- argmin of the error + rho |X - Z + U|^2 = C W (G + rho I)^-1 + (Z - U) rho (G + rho I)^-1

G are the second moments of the inputs. Each input is scaled so that its own is 1, which makes "the
largest" mean: largest in the output. The penalty rho grows in stages. While it is small the mask
moves freely. At 1 the search rests where no removed weight would take away more of the error, by
its gradient, than the least of the kept weights is worth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.common.machine import has_bfloat16
from emp_llm.selection.reference import largest_mask, order_keys, pattern_mask
from emp_llm.selection.rule import NonFiniteError
from emp_llm.update.least_squares import (
    Solution,
    add_product,
    check_finite,
    check_products,
    cholesky,
    float32_products,
    symmetric,
    workspace_bytes,
)
from emp_llm.update.update import Allowed, Moments, Search

# rho of each stage, from 0.1 to 1, relative to an input's own second moment
_PENALTIES = tuple(10 ** (stage / 7 - 1) for stage in range(8))
_STEPS = 5  # of each stage
_PANEL = 256  # columns of a symmetric product that are computed at a time


@dataclass(frozen=True, kw_only=True)
class Admm(Search):
    """Mask and values by the alternating direction method of multipliers (`admm`)."""

    name = "admm"
    title = "masks and weights searched for together (ADMM)"

    def solve(self, weight: Tensor, moments: Moments, allowed: Allowed, damping: float) -> Solution:
        return admm(
            weight,
            moments.gram,
            counts=allowed.counts,
            pattern=allowed.pattern,
            right=moments.right,
            damping=damping,
        )

    def workspace_bytes(self, outputs: int, inputs: int) -> int:
        return max(
            4 * (6 * inputs * inputs + 10 * outputs * inputs), workspace_bytes(outputs, inputs)
        )


def admm(
    weight: Tensor,
    gram: Tensor,
    *,
    counts: Tensor | None = None,
    pattern: tuple[int, int] | None = None,
    right: Tensor | None = None,
    damping: float = 0.01,
) -> Solution:
    """Choose the kept weights of a layer, and their values, by ADMM.

    The values come close to the least-squares optimum for the mask; `refit_rows` gets there.

    Args:
        weight: the dense weights, shape (outputs, inputs), any floating dtype.
        gram: second moments of the inputs, sum_t x_t x_t^T, float32, shape (inputs, inputs). Its
            scale does not matter.
        counts: int64; shape (outputs,): how many weights of each row are kept; shape (1,): of the
            matrix.
        pattern: (N, M): N of every M consecutive inputs are kept. Instead of counts.
        right: what the layer shall return, as in `refit_rows`; None: what the dense weights return
            on the same inputs.
        damping: pull towards the dense weights, as a share of the mean diagonal of `gram`; above 0.

    Raises:
        NonFiniteError: an argument holds NaN or infinity, or values too large for their products,
            or `gram` is no matrix of second moments.
    """
    check_finite(weight=weight, gram=gram, right=right)
    with float32_products("highest"), torch.no_grad():
        point = weight.float()
        scale = float(gram.diagonal().double().mean()) or 1.0
        aim = ((add_product(point, gram) if right is None else right) / scale).add_(
            point, alpha=damping
        )
        system = gram / scale
        system.diagonal().add_(damping)
        root = system.diagonal().sqrt()
        system.div_(root).div_(root[:, None])
        aim.div_(root)
        point = point * root
        dual = torch.zeros_like(point)
        before = _PENALTIES[0]
        identity = torch.eye(len(gram), device=gram.device)
        coarse = torch.bfloat16 if has_bfloat16(weight.device) else torch.float32
        for penalty in _PENALTIES:
            factor = system.clone()
            factor.diagonal().add_(penalty)
            if cholesky(factor) is None:
                raise NonFiniteError("gram is no matrix of second moments: it is indefinite")
            factor = torch.linalg.solve_triangular(factor, identity, upper=False)
            # Solves with the factor would depend on the number of threads.
            inverse = _gram_of_lower(factor)
            constant = add_product(aim, inverse)
            # Until the last stage, the digits of bfloat16 are enough for the search.
            digits = torch.float32 if penalty == _PENALTIES[-1] else coarse
            pull = inverse.mul_(penalty).to(digits)
            dual.mul_(before / penalty)  # it is relative to the penalty
            for _ in range(_STEPS):
                point.add_(dual)
                mask = _largest(point, counts, pattern)
                kept = point * mask
                torch.sub(point, kept, out=dual)
                torch.sub(kept, dual, out=point)
                if digits == torch.float32:
                    point = add_product(point, pull, constant.clone())
                else:
                    point = constant + point.to(digits) @ pull
            before = penalty
        check_products(kept.div_(root))
        return Solution(kept, mask, damping)


def _gram_of_lower(factor: Tensor) -> Tensor:
    """factor^T @ factor of a lower triangular matrix, float32, shape (n, n). The bits are the same
    for any number of threads.
    """
    gram = torch.empty_like(factor)
    for start in range(0, len(factor), _PANEL):
        panel = slice(start, start + _PANEL)
        rest = slice(start, None)
        gram[panel, rest] = add_product(factor[rest, panel].T, factor[rest, rest])
    return symmetric(gram)


def _largest(values: Tensor, counts: Tensor | None, pattern: tuple[int, int] | None) -> Tensor:
    """The mask of the largest values of a matrix."""
    if pattern is not None:
        return pattern_mask(order_keys(values), *pattern)
    assert counts is not None
    if len(counts) == 1:
        return largest_mask(values.reshape(1, -1), counts).reshape(values.shape)
    return largest_mask(values, counts)
