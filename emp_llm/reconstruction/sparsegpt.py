"""SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774): masks and weights of a layer in one pass over its columns.

H = G + lambda I is the Hessian of a row's squared output error. Let U be the upper triangular factor of its inverse, H^-1 =
U^T U. Its row j, scaled, is row j of the inverse of the part of H that remains once the columns before j are fixed. Removing
weight w_j of a row then costs (w_j / U_jj)^2 / 2 and is made up for by the weights to its right, as well as possible:

    w_i <- w_i - (w_j / U_jj) U_ji    for i >= j

The columns are taken in blocks. Within a block, the mask is chosen first and the updates are made column by column; the columns
behind it are updated once, by a matrix product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.reconstruction.precision import all_finite, full_float32
from emp_llm.selection.arithmetic.definitions import NonFiniteError, floor_count
from emp_llm.selection.arithmetic.masks import largest_mask, order_keys, pattern_mask

SPARSEGPT_DAMPING = 0.01  # the paper's
_MOST_RAISES = 12
_FIRST_RAISE = 1e-3  # the damping after 0


@dataclass(frozen=True)
class SparseGPTResult:
    """The result of `sparsegpt`.

    Attributes:
        weight: float32, shape (outputs, inputs), zero where not kept.
        mask: bool, the same shape, true where kept.
        damping: the damping used, relative to the mean diagonal; higher than the one asked for if H was not positive definite
            to float32.
    """

    weight: Tensor
    mask: Tensor
    damping: float


def sparsegpt(
    weight: Tensor,
    gram: Tensor,
    *,
    sparsity: float | None = None,
    pattern: tuple[int, int] | None = None,
    block: int = 128,
    damping: float = SPARSEGPT_DAMPING,
) -> SparseGPTResult:
    """Prune a layer by SparseGPT, to a sparsity of the matrix or to an N:M pattern.

    With a sparsity, the mask of a block of columns keeps its largest (w_ij / U_jj)^2 over all rows, and exactly
    floor(sparsity * outputs * inputs) weights of the matrix are removed: floor(sparsity * outputs * columns) of those up to
    the end of each block. Among equal scores, those with the lowest index are kept. An input that is always zero loses its
    weights.

    Args:
        weight: shape (outputs, inputs), any floating dtype.
        gram: second moments of the inputs, sum_t x_t x_t^T, float32, shape (inputs, inputs). Its scale does not matter.
        sparsity: at least 0 and below 1.
        pattern: (N, M): N of every M consecutive inputs are kept. Instead of a sparsity.
        block: columns of a block; a multiple of M.
        damping: lambda as a share of the mean diagonal of the gram.

    Raises:
        ValueError: shapes do not fit; or not exactly one of sparsity and pattern is given; or a value is out of range.
        NonFiniteError: weight or gram holds NaN or infinity.
    """
    _check_arguments(weight, gram, sparsity, pattern, block, damping)
    with full_float32(), torch.no_grad():
        weight = weight.float().clone()
        dead = gram.diagonal() <= 0
        weight[:, dead] = 0
        factor, damping = _inverse_factor(gram, dead, damping)
        mask = torch.empty_like(weight, dtype=torch.bool)
        for start in range(0, weight.shape[1], block):
            end = min(start + block, weight.shape[1])
            here = slice(start, end)
            if sparsity is not None:
                mask[:, here] = _block_mask(weight[:, here], factor.diagonal()[here], sparsity, start)
            errors = _prune_block(weight[:, here], mask[:, here], factor[here, here], pattern)
            weight[:, end:].addmm_(errors, factor[here, end:], alpha=-1)
    return SparseGPTResult(weight, mask, damping)


def _inverse_factor(gram: Tensor, dead: Tensor, damping: float) -> tuple[Tensor, float]:
    """U with H^-1 = U^T U, and the damping that it took.

    H = T T^T with T upper triangular is a Cholesky factorisation with the order of the columns reversed, and U = T^-1. So the
    inverse itself is never formed.
    """
    scale = float(gram.diagonal().double().mean()) or 1.0
    identity = torch.eye(len(gram), device=gram.device)
    for _ in range(_MOST_RAISES):
        hessian = gram / scale
        hessian.diagonal().add_(dead.float() + damping)
        lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        if not int(failed):
            factor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if bool(factor.isfinite().all()):
                return factor, damping
        damping = max(10 * damping, _FIRST_RAISE)
    raise NonFiniteError("gram is no matrix of second moments: it stays indefinite at any damping")


def _block_mask(weight: Tensor, diagonal: Tensor, sparsity: float, start: int) -> Tensor:
    """The mask of a block of columns that starts at a column, over all its rows."""
    outputs, columns = weight.shape
    removed = floor_count(sparsity * outputs * (start + columns)) - floor_count(sparsity * outputs * start)
    scores = (weight / diagonal).square().reshape(1, -1)
    return largest_mask(scores, torch.tensor([weight.numel() - removed], device=weight.device)).reshape(weight.shape)


def _prune_block(weight: Tensor, mask: Tensor, factor: Tensor, pattern: tuple[int, int] | None) -> Tensor:
    """Prune the columns of a block one after the other, in place; with a pattern, choose the mask on the way.

    Returns:
        (w_j - w_j kept) / U_jj of each weight, when its column was reached; shape of the block.
    """
    columns, kept = weight.t().contiguous(), mask.t().contiguous()  # a column of the block in one piece of memory
    errors = torch.empty_like(columns)
    diagonal = factor.diagonal()
    for column in range(len(columns)):
        if pattern is not None and column % pattern[1] == 0:
            group = slice(column, column + pattern[1])
            scores = (columns[group] / diagonal[group, None]).square().t().contiguous()
            kept[group] = pattern_mask(order_keys(scores), *pattern).t()
        torch.div(columns[column] * ~kept[column], diagonal[column], out=errors[column])
        columns[column:].addr_(factor[column, column:], errors[column], alpha=-1)
        columns[column] *= kept[column]  # exactly zero where removed
    weight.copy_(columns.t())
    mask.copy_(kept.t())
    return errors.t()


def _check_arguments(
    weight: Tensor, gram: Tensor, sparsity: float | None, pattern: tuple[int, int] | None, block: int, damping: float
) -> None:
    inputs = weight.shape[1]
    if gram.shape != (inputs, inputs) or gram.dtype != torch.float32:
        raise ValueError(f"gram must be float32 of shape {(inputs, inputs)}, got {gram.dtype} {tuple(gram.shape)}")
    if (sparsity is None) == (pattern is None):
        raise ValueError("give a sparsity or a pattern, and not both")
    if sparsity is not None and not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be at least 0 and below 1, got {sparsity:g}")
    if pattern is not None:
        n, m = pattern
        if not 1 <= n < m:
            raise ValueError(f"pattern N:M keeps N of every M weights, 1 <= N < M, got {n}:{m}")
        if inputs % m or block % m:
            raise ValueError(f"{inputs} inputs and a block of {block} must both be multiples of {m} (pattern {n}:{m})")
    if block < 1 or not 0 <= damping < float("inf"):
        raise ValueError(f"block must be at least 1 and damping at least 0, got {block} and {damping:g}")
    for name, values in (("weight", weight), ("gram", gram)):
        if not all_finite(values):
            raise NonFiniteError(f"{name} holds NaN or infinity")
