"""ADMM: the mask and the weights of a layer, found together by the alternating direction method
of multipliers (Boza 2024, arXiv 2401.02938; Meng et al. 2024, arXiv 2406.07831).

The problem, for the dense weights W and the second moments G of the inputs:

    minimise tr((V - W) G (V - W)^T) over all V with at most k weights other than zero in each row

The trace is the squared error of the outputs. ADMM keeps two copies of the weights: X has a low
error, Z keeps to the limit, and the dual U draws them together. A step is

    Z <- the k largest of X + U in each row, the others zero
    U <- U + X - Z
    X <- argmin of the error of X + rho ||X - Z + U||^2 = (W G + rho (Z - U)) (G + rho I)^-1

The result is Z. Two things are added:

- Inputs are scaled so that each has the second moment 1. Then the largest weights are those that
  change the outputs most.
- The penalty rho grows in stages, from 0.15 to 1. While it is small, the mask changes freely. At
  rho = 1, it rests where no removed weight, restored alone, would lower the error by more than the
  square of the row's smallest kept weight. A stage takes a factorisation, which costs as much as
  eight steps; so stages are few, and those that find the values are longer.

The damping adds lambda ||V - W||^2 to the error. Where the layer shall return other outputs than W
does, their products with the inputs (`right` of `admm`) take the place of W G.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from emp_llm.common.declared import Flag
from emp_llm.selection.rule import NonFiniteError
from emp_llm.update.update import Allowed, Moments, Search

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.update.least_squares import Solution

_PENALTY = 0.15
_STAGES = 6
_INDEFINITE = "gram is no matrix of second moments: it is indefinite"
_PANEL = 256  # columns of a symmetric product that are computed at a time


@dataclass(frozen=True, kw_only=True)
class Admm(Search):
    """Mask and values by `admm`.

    Attributes:
        penalty: rho of the first stage; that of the last is 1.
        stages: their number.
    """

    name = "admm"
    title = "masks and weights searched for together (ADMM)"
    penalty: Annotated[
        float,
        Flag("First penalty of ADMM, as a share of each second moment.", above=0, maximum=1),
    ] = _PENALTY
    stages: Annotated[
        int, Flag("Stages in which the penalty of ADMM grows to 1.", minimum=2, maximum=100)
    ] = _STAGES

    def solve(
        self, weight: "Tensor", moments: Moments, allowed: Allowed, damping: float
    ) -> "Solution":
        return admm(
            weight,
            moments.gram,
            counts=allowed.counts,
            pattern=allowed.pattern,
            right=moments.right,
            damping=damping,
            penalty=self.penalty,
            stages=self.stages,
        )

    def workspace_bytes(self, outputs: int, inputs: int) -> int:
        of_refit = super().workspace_bytes(outputs, inputs)
        return max(4 * (7 * inputs * inputs + 12 * outputs * inputs), of_refit)

    def operations(self, outputs: int, inputs: int) -> float:
        of_search = (70 * outputs + 14 * inputs) * float(inputs * inputs)
        return of_search + (0 if self.refit is None else super().operations(outputs, inputs))


def admm(
    weight: "Tensor",
    gram: "Tensor",
    *,
    counts: "Tensor | None" = None,
    pattern: tuple[int, int] | None = None,
    right: "Tensor | None" = None,
    damping: float = 0.01,
    penalty: float = _PENALTY,
    stages: int = _STAGES,
) -> "Solution":
    """Choose the kept weights of a layer, and their values, by ADMM.

    The values are close to the least-squares optimum of the mask; `refit_rows` reaches it.

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
        penalty: rho of the first stage, relative to an input's own second moment; above 0.
        stages: their number, at least 2.

    Raises:
        NonFiniteError: an argument holds NaN or infinity, or values too large for their products,
            or `gram` is no matrix of second moments.
    """
    import torch

    from emp_llm.common.machine import float32_products, has_bfloat16
    from emp_llm.update.least_squares import Solution, add_product, check_finite, check_products

    check_finite(weight=weight, gram=gram, right=right)
    penalties = [penalty ** (1 - stage / (stages - 1)) for stage in range(stages)]
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
        before = penalty
        failed = []
        coarse = torch.bfloat16 if has_bfloat16(weight.device) else torch.float32
        for stage, rho in enumerate(penalties):
            factor = system.clone()
            factor.diagonal().add_(rho)
            inverse, indefinite = _inverse(factor)
            failed.append(indefinite)
            constant = add_product(aim, inverse)
            # Until the last stage, the digits of bfloat16 are enough for the search.
            last = stage == stages - 1
            steps = 5 if last else 4 + stage
            digits = torch.float32 if last else coarse
            pull = inverse.mul_(rho).to(digits)
            dual.mul_(before / rho)  # it is relative to the penalty
            for step in range(steps):
                point.add_(dual)
                mask = _mask_of_largest(point, counts, pattern)
                kept = point * mask
                torch.sub(point, kept, out=dual)
                if last and step == steps - 1:
                    break
                torch.sub(kept, dual, out=point)
                if digits == torch.float32:
                    point = add_product(point, pull, constant.clone())
                else:
                    point = constant + point.to(digits) @ pull
            before = rho
        if bool(torch.stack(failed).any()):
            raise NonFiniteError(_INDEFINITE)
        check_products(kept.div_(root))
        return Solution(kept, mask, damping)


def _inverse(matrix: "Tensor") -> "tuple[Tensor, Tensor]":
    """The inverse of a positive definite matrix, float32, shape (n, n), which is overwritten; and
    whether it is not positive definite, on a GPU. Else that is an error.
    """
    import torch

    from emp_llm.update.least_squares import cholesky

    if matrix.is_cuda:  # without waiting for it
        factor, failed = torch.linalg.cholesky_ex(matrix)
        identity = torch.eye(len(matrix), device=matrix.device)
        return torch.cholesky_solve(identity, factor), failed != 0
    if cholesky(matrix) is None:
        raise NonFiniteError(_INDEFINITE)
    factor = torch.linalg.solve_triangular(matrix, torch.eye(len(matrix)), upper=False)
    # Solves with the factor would depend on the number of threads.
    return _gram_of_lower(factor), torch.tensor(False)


def _gram_of_lower(factor: "Tensor") -> "Tensor":
    """factor^T @ factor of a lower triangular matrix, float32, shape (n, n). The bits are the same
    for any number of threads.
    """
    import torch

    from emp_llm.update.least_squares import add_product, symmetric

    gram = torch.empty_like(factor)
    for start in range(0, len(factor), _PANEL):
        panel = slice(start, start + _PANEL)
        rest = slice(start, None)
        gram[panel, rest] = add_product(factor[rest, panel].T, factor[rest, rest])
    return symmetric(gram)


def _mask_of_largest(
    values: "Tensor", counts: "Tensor | None", pattern: tuple[int, int] | None
) -> "Tensor":
    """The mask of the largest values of a matrix."""
    from emp_llm.selection.reference import largest_mask, order_keys, pattern_mask

    if pattern is not None:
        return pattern_mask(order_keys(values), *pattern)
    assert counts is not None
    if len(counts) == 1:
        return largest_mask(values.reshape(1, -1), counts).reshape(values.shape)
    return largest_mask(values, counts)
