"""Refit: the kept weights of each row at the least-squares optimum on the calibration tokens, for a given mask.

Row r of the dense weights gives the output w_r . x_t on the dense inputs x_t. Its kept weights v_r shall give the same on the
inputs xhat_t of the pruned model. They minimise, over the kept positions S of the row,

    F(v_r) = E(v_r) + lambda |v_r - (w_r)_S|^2,    E(v_r) = sum_t omega_t (v_r . xhat_t - w_r . x_t)^2

The inputs enter only through the second moments G = sum_t omega_t xhat_t xhat_t^T and the cross moments C = sum_t omega_t
xhat_t x_t^T: (G_SS + lambda I) v_r = (C w_r)_S + lambda (w_r)_S, a system of its own for each row. `conjugate_gradients.py`
solves all rows at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.reconstruction.conjugate_gradients import IndefiniteError, Solution, System, solve
from emp_llm.reconstruction.precision import all_finite, full_float32
from emp_llm.reconstruction.preconditioner import rank_for
from emp_llm.selection.arithmetic.definitions import NonFiniteError

_BLOCK = 1 << 24  # numbers in a block of rows
_BLOCKS = 12  # blocks in memory at a time, at most
_CORES = 2  # small matrices of each row
_LEAST_ROWS = 256  # of a block: fewer make a product with a large matrix slow
_LEAST_DAMPING = 0.01
_MOST_RAISES = 12
_FIRST_RAISE = 1e-3  # the damping after 0


@dataclass(frozen=True)
class Refit:
    """The result of `refit_rows`.

    Attributes:
        weight: float32, shape (outputs, inputs), zero where not kept.
        damping: the damping used, relative to the mean diagonal of the gram. It is higher than the one asked for if the
            matrix was not positive definite to float32.
        iterations: of the slowest block of rows.
        residual: an estimate of the largest share of a row's objective that further steps would remove. Above the tolerance
            only if the iterations reached their limit.
        products: rows multiplied by the gram, in total; each takes 2 * inputs^2 operations.
        error_before, error_after: E of each row with its kept weights unmoved and refitted, float64, shape (outputs,). With
            `cross` and without `energy`, the constant sum_t omega_t (w_r . x_t)^2 is missing in both.
    """

    weight: Tensor
    damping: float
    iterations: int
    residual: float
    products: int
    error_before: Tensor
    error_after: Tensor


def refit_rows(
    weight: Tensor,
    mask: Tensor,
    gram: Tensor,
    cross: Tensor | None = None,
    *,
    damping: float = 0.01,
    tolerance: float = 1e-3,
    limit: int = 200,
    energy: Tensor | None = None,
    wanted: Tensor | None = None,
) -> Refit:
    """Move the kept weights of each row to the least-squares optimum F of this module.

    The result is deterministic and never NaN. A row whose fit would not lower E keeps its weights. If the matrix is not
    positive definite to float32, the damping is raised tenfold until it is.

    Args:
        weight: the dense weights, shape (outputs, inputs), any floating dtype.
        mask: bool, the same shape, true where kept.
        gram: G, float32, shape (inputs, inputs).
        cross: C, float32, shape (inputs, inputs), rows xhat and columns x; None: equal to G.
        damping: lambda as a share of the mean diagonal of G.
        tolerance: a row is solved when further steps would lower F by no more than this share of F.
        limit: the most iterations. Each is one product of a block of rows with G.
        energy: sum_t omega_t (w_r . x_t)^2 of each row, shape (outputs,). With `cross` it makes the errors complete, and the
            tolerance relative to F. Without it, the tolerance is relative to a tenth of what the fit has gained. Without
            `cross` it is not needed.
        wanted: sum_t omega_t y_t xhat_t^T, float32, shape (outputs, inputs): the outputs y_t to return in place of w . x_t.
            Instead of `cross`; `energy` is then sum_t omega_t y_tr^2.

    Raises:
        ValueError: shapes do not fit, or damping, tolerance or limit is out of range.
        NonFiniteError: gram, cross or weight holds NaN or infinity.
    """
    _check(weight, mask, gram, cross, damping, tolerance, limit, wanted)
    rights = RightSides(gram, cross, wanted)
    scale = float(gram.diagonal().double().mean())
    for _ in range(_MOST_RAISES if scale > 0 else 0):
        try:
            with full_float32(), torch.no_grad():
                return _refit(weight, mask, System.of(gram, scale, damping), rights, energy, tolerance, limit)
        except IndefiniteError:
            damping = max(10 * damping, _FIRST_RAISE)
    error = output_error(weight * mask, weight, gram, cross, energy, wanted)
    return Refit((weight * mask).float(), damping, 0, 0.0, 0, error, error.clone())


def damping_for(inputs: int, tokens: int) -> float:
    """A damping for a number of calibration tokens: inputs / tokens, at least 0.01.

    The fewer tokens there are for each input, the more of a fit is chance. On tokens that a fit has not seen, this is the best
    damping or within 2 % of it, on three models, from 2 to 250 tokens for each input (scripts/results/damping.md).
    """
    return max(_LEAST_DAMPING, inputs / max(tokens, 1))


def output_error(
    weight: Tensor,
    dense: Tensor,
    gram: Tensor,
    cross: Tensor | None = None,
    energy: Tensor | None = None,
    wanted: Tensor | None = None,
) -> Tensor:
    """E of each row: sum_t omega_t (v . xhat_t - w . x_t)^2, float64, shape (outputs,).

    Args:
        weight: v, shape (outputs, inputs).
        dense: w, the same shape.
        gram, cross, energy, wanted: as for `refit_rows`. With `cross` or `wanted` and without `energy`, the constant is
            missing: v G v - 2 v C w.
    """
    parts, rights = [], RightSides(gram, cross, wanted)
    with full_float32(), torch.no_grad():
        for rows in _blocks(*weight.shape):
            v, w = weight[rows].float(), dense[rows].float()
            if rights.dense_outputs:
                parts.append(_dot(v - w, (v - w) @ gram))
            else:
                parts.append(_dot(v, v @ gram) - 2 * _dot(v, rights.of(w, rows)))
    error = torch.cat(parts)
    return error if rights.dense_outputs or energy is None else error + energy.double()


def workspace_bytes(outputs: int, inputs: int) -> int:
    """The memory that `refit_rows` needs beside its arguments, in bytes, with the weights that it returns."""
    rows = min(outputs, _rows_of_a_block(inputs))
    return 4 * (inputs * outputs + rows * (_BLOCKS * inputs + _CORES * rank_for(inputs) ** 2))


def exact_rows(weight: Tensor, mask: Tensor, gram: Tensor, cross: Tensor | None = None, damping: float = 0.01) -> Tensor:
    """The minimum of F by a float64 factorisation for each row; the reference for `refit_rows`. Arguments as there.

    Returns:
        float64, shape (outputs, inputs), zero where not kept.

    Raises:
        torch.linalg.LinAlgError: a matrix G_SS + lambda I is not positive definite.
    """
    gram, dense = gram.double(), weight.double()
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


@dataclass(frozen=True)
class RightSides:
    """The right-hand sides C w of the normal equations."""

    gram: Tensor
    cross: Tensor | None
    wanted: Tensor | None

    @property
    def dense_outputs(self) -> bool:
        """Whether the fit is to the dense weights' outputs on the same inputs, so that C is G."""
        return self.cross is None and self.wanted is None

    def of(self, dense: Tensor, rows: slice) -> Tensor:
        """C w for some rows, in memory of its own."""
        if self.wanted is not None:
            return self.wanted[rows].clone()
        return dense @ (self.gram if self.cross is None else self.cross).T


def _refit(
    weight: Tensor,
    mask: Tensor,
    system: System,
    rights: RightSides,
    energy: Tensor | None,
    tolerance: float,
    limit: int,
) -> Refit:
    fitted = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    before, gains, solutions = [], [], []
    for rows in _blocks(*weight.shape):
        dense, kept = weight[rows].float(), mask[rows].float()
        torch.mul(dense, kept, out=fitted[rows])
        right, error = _unfitted(dense, fitted[rows], system, rights, rows, None if energy is None else energy[rows])
        right.mul_(kept)
        del dense
        known = error if rights.dense_outputs or energy is not None else None
        solution = solve(system, kept, right, known, tolerance, limit)
        gains.append(_keep_what_helps(solution, system, right))
        fitted[rows] += solution.change
        before.append(error.double() * system.scale)
        solutions.append((solution.iterations, solution.residual, solution.products))
    error_before = torch.cat(before)
    error_after = error_before - torch.cat(gains) * system.scale
    iterations, residuals, products = zip(*solutions, strict=True)
    total = sum(products) + 2 * len(weight)  # one for the start, one for the gains
    return Refit(fitted, system.damping, max(iterations), max(residuals), total, error_before, error_after)


def _unfitted(
    dense: Tensor, start: Tensor, system: System, rights: RightSides, rows: slice, energy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """C w - G v and E(v) for the unmoved kept weights v, both divided by the scale of the system."""
    if rights.dense_outputs:
        removed = dense - start
        right = (removed @ system.gram).div_(system.scale)
        return right, torch.linalg.vecdot(removed, right)
    right = rights.of(dense, rows)
    error = torch.linalg.vecdot(start, right).mul_(-2)
    product = start @ system.gram
    error += torch.linalg.vecdot(start, product)
    if energy is not None:
        error += energy
    return right.sub_(product).div_(system.scale), error / system.scale


def _keep_what_helps(solution: Solution, system: System, right: Tensor) -> Tensor:
    """The decrease of E / scale of each row, float64; the changes of rows that would raise it are set to zero."""
    change = solution.change
    product = (change @ system.gram).div_(-system.scale)
    gain = torch.linalg.vecdot(change, product.add_(right, alpha=2)).double()
    helps = (gain > 0) & change.isfinite().all(1)
    change.masked_fill_(~helps[:, None], 0)
    return torch.where(helps, gain, 0)


def _check(
    weight: Tensor,
    mask: Tensor,
    gram: Tensor,
    cross: Tensor | None,
    damping: float,
    tolerance: float,
    limit: int,
    wanted: Tensor | None,
) -> None:
    inputs = weight.shape[1]
    if mask.shape != weight.shape or mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool of shape {tuple(weight.shape)}, got {mask.dtype} {tuple(mask.shape)}")
    for name, moments in (("gram", gram), ("cross", cross)):
        if moments is not None and (moments.shape != (inputs, inputs) or moments.dtype != torch.float32):
            raise ValueError(f"{name} must be float32 of shape {(inputs, inputs)}, got {moments.dtype} {tuple(moments.shape)}")
    if wanted is not None and (wanted.shape != weight.shape or wanted.dtype != torch.float32 or cross is not None):
        raise ValueError(f"wanted must be float32 of shape {tuple(weight.shape)}, and given without cross")
    if not 0 <= damping < float("inf") or not 0 < tolerance < 1 or limit < 1:
        raise ValueError(f"damping must be at least 0, tolerance in (0, 1), limit at least 1: {damping}, {tolerance}, {limit}")
    for name, values in (("weight", weight), ("gram", gram), ("cross", cross), ("wanted", wanted)):
        if values is not None and not all_finite(values):
            raise NonFiniteError(f"{name} holds NaN or infinity")


def _rows_of_a_block(inputs: int) -> int:
    return max(_LEAST_ROWS, _BLOCK // max(inputs, 1))


def _blocks(outputs: int, inputs: int) -> Iterator[slice]:
    step = _rows_of_a_block(inputs)
    return (slice(start, min(start + step, outputs)) for start in range(0, outputs, step))


def _dot(first: Tensor, second: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(first, second)
    return products.double()
