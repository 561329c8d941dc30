"""SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774): the mask and the weights of a layer, in
one pass over its columns.

The problem, for the dense weights W and the second moments G of the inputs:

    minimise tr((V - W) G (V - W)^T) / 2 over all V with a number of weights other than zero

This is half the squared error of the outputs. For each row, its Hessian is H = G + lambda I, with
the damping lambda. The pass goes through the columns from left to right. At column j, the weights
to its left are fixed, and those to its right can still change. Let U be the upper triangular factor
of the inverse, H^-1 = U^T U. If weight w_j of a row is removed, and the weights to its right make
up for it as well as possible, the error grows by (w_j / U_jj)^2 / 2, and the weights become

    w_i <- w_i - (w_j / U_jj) U_ji    for i >= j

Columns are taken in blocks. The mask of a block is chosen by these errors. Then its columns change
one by one, and the columns to its right once, by a matrix product.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from emp_llm.common.declared import Flag
from emp_llm.selection.rule import NonFiniteError
from emp_llm.update.update import LEAST_DAMPING, Allowed, Moments, Search

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.update.least_squares import Solution

_COLUMNS = 128


@dataclass(frozen=True, kw_only=True)
class SparseGPT(Search):
    """Mask and values by `sparsegpt`, which spreads the kept weights of a matrix over its rows.

    Attributes:
        damping: lambda as a share of the mean second moment. The paper's is 0.01.
        columns: how many columns get their mask at a time.
    """

    name = "sparsegpt"
    title = "SparseGPT"
    keeps = "matrix"
    damping: Annotated[
        float,
        Flag("Damping of SparseGPT, as a share of the mean second moment.", above=0, maximum=1),
    ] = LEAST_DAMPING
    columns: Annotated[
        int, Flag("Columns that SparseGPT gives their mask at a time.", minimum=1)
    ] = _COLUMNS

    @property
    def restores_dense(self) -> bool:
        return self.refit is not None

    def damping_of(self, inputs: int, tokens: int) -> float:
        return self.damping if self.refit is None else super().damping_of(inputs, tokens)

    def solve(
        self, weight: "Tensor", moments: Moments, allowed: Allowed, damping: float
    ) -> "Solution":
        counts = allowed.counts
        return sparsegpt(
            weight,
            moments.gram,
            count=None if counts is None else int(counts.sum()),
            pattern=allowed.pattern,
            block=self.columns,
            damping=self.damping,
        )


def sparsegpt(
    weight: "Tensor",
    gram: "Tensor",
    *,
    count: int | None = None,
    pattern: tuple[int, int] | None = None,
    block: int = _COLUMNS,
    damping: float = LEAST_DAMPING,
) -> "Solution":
    """Prune a layer by SparseGPT, to a number of weights of the matrix or to an N:M pattern.

    With a count, the mask of a block of columns keeps its largest (w_ij / U_jj)^2 over all rows: of
    the R weights to remove, floor(R columns / inputs) lie in the columns up to the end of each
    block. Among equal scores, those with the lowest index are kept. An input that is always zero
    loses its weights.

    Args:
        weight: shape (outputs, inputs), any floating dtype.
        gram: second moments of the inputs, sum_t x_t x_t^T, float32, shape (inputs, inputs). Its
            scale does not matter.
        count: how many weights of the matrix are kept.
        pattern: (N, M): N of every M consecutive inputs are kept. Instead of a count.
        block: columns of a block. With a pattern, the largest multiple of M up to it, and at least
            M.
        damping: lambda as a share of the mean diagonal of the gram. The paper's is 0.01.

    Raises:
        NonFiniteError: weight or gram holds NaN or infinity, or `gram` is no matrix of second
            moments.
    """
    import torch

    from emp_llm.common.machine import float32_products
    from emp_llm.selection.reference import largest_mask
    from emp_llm.update.least_squares import Solution, check_finite, check_products

    check_finite(weight=weight, gram=gram)
    outputs, inputs = weight.shape
    if pattern is not None:  # a block holds whole groups
        block = max(block // pattern[1], 1) * pattern[1]
    with float32_products("highest"), torch.no_grad():
        weight = weight.float().clone()
        dead = gram.diagonal() <= 0
        weight[:, dead] = 0
        factor, damping = _inverse_factor(gram, dead, damping)
        mask = torch.empty_like(weight, dtype=torch.bool)
        starts = range(0, inputs, block)
        kept = None
        if count is not None:
            ends = [*starts, inputs]
            removed = [(weight.numel() - count) * end // inputs for end in ends]
            kept = outputs * torch.tensor(ends).diff() - torch.tensor(removed).diff()
            kept = kept.to(weight.device)
        for number, start in enumerate(starts):
            end = min(start + block, inputs)
            here = slice(start, end)
            if kept is not None:
                scores = (weight[:, here] / factor.diagonal()[here]).square().reshape(1, -1)
                mask[:, here] = largest_mask(scores, kept[number : number + 1]).reshape(outputs, -1)
            errors = _prune_block(weight[:, here], mask[:, here], factor[here, here], pattern)
            weight[:, end:].addmm_(errors, factor[here, end:], alpha=-1)
    check_products(weight)
    return Solution(weight, mask, damping)


def _inverse_factor(gram: "Tensor", dead: "Tensor", damping: float) -> "tuple[Tensor, float]":
    """U with H^-1 = U^T U, and the damping with which H is positive definite.

    U is the inverse of the upper triangular T with H = T T^T, which is the Cholesky factor of H
    with rows and columns in reverse order. So H^-1 is never formed.
    """
    import torch

    from emp_llm.update.least_squares import cholesky, raised_dampings

    scale = float(gram.diagonal().double().mean()) or 1.0
    identity = torch.eye(len(gram), device=gram.device)
    for raised in raised_dampings(damping):
        hessian = gram / scale
        hessian.diagonal().add_(dead.float() + raised)
        lower = cholesky(hessian.flip(0, 1))
        if lower is not None:
            factor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if bool(factor.isfinite().all()):
                return factor, raised
    raise NonFiniteError("gram is no matrix of second moments: it stays indefinite at any damping")


def _prune_block(
    weight: "Tensor", mask: "Tensor", factor: "Tensor", pattern: tuple[int, int] | None
) -> "Tensor":
    """Prune the columns of a block one after the other, in place; with a pattern, choose the mask
    on the way.

    Returns:
        w_j / U_jj of each removed weight when its column was reached, and 0 of a kept one; shape of
        the block.
    """
    import torch

    from emp_llm.common.machine import runs_triton
    from emp_llm.selection.reference import order_keys, pattern_mask

    if runs_triton(weight.device):
        from emp_llm.update.cuda_kernel import WIDEST, prune_columns

        if weight.shape[1] <= WIDEST:
            return prune_columns(weight, mask, factor, pattern)
    # a column of the block in one piece of memory
    columns = weight.t().contiguous()
    kept = mask.t().contiguous()
    errors = torch.empty_like(columns)
    diagonal = factor.diagonal()[:, None]
    # A weight that is kept is divided by infinity.
    divisor = torch.where(kept, torch.inf, diagonal)
    for column in range(len(columns)):
        if pattern is not None and column % pattern[1] == 0:
            group = slice(column, column + pattern[1])
            scores = (columns[group] / diagonal[group]).square().t().contiguous()
            kept[group] = pattern_mask(order_keys(scores), *pattern).t()
            divisor[group] = torch.where(kept[group], torch.inf, diagonal[group])
        torch.div(columns[column], divisor[column], out=errors[column])
        columns[column:].addr_(factor[column, column:], errors[column], alpha=-1)
    columns *= kept  # exactly zero where removed
    weight.copy_(columns.t())
    mask.copy_(kept.t())
    return errors.t()
