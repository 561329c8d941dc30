"""Refit: the kept weights of each row at the least-squares optimum on the calibration tokens, for a
given mask.

Row w_r of the dense weights returns w_r . x_t for the dense input x_t. The kept weights v_r of the
row, at the positions S, shall return the same for the input xhat_t of the pruned model. They
minimise

    F(v_r) = E(v_r) + lambda ||v_r - (w_r)_S||^2
    E(v_r) = sum_t omega_t (v_r . xhat_t - w_r . x_t)^2

with the weights omega_t of the tokens. The inputs enter only through the second moments G = sum_t
omega_t xhat_t xhat_t^T and the cross moments C = sum_t omega_t xhat_t x_t^T:

    (G_SS + lambda I) v_r = (C w_r)_S + lambda (w_r)_S

Each row has a system of its own, solved by conjugate gradients. A product with G_SS is one with G,
of a row that is zero outside of S, and is masked afterwards. So one matrix product serves all rows.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from emp_llm.common.machine import float32_products, has_bfloat16
from emp_llm.selection.rule import NonFiniteError

_CHUNK = 1 << 24  # numbers in a chunk of rows
_BUFFERS = 8  # of a chunk, in memory at a time
_LEAST_ROWS = 256  # of a chunk: fewer make a product with a large matrix slow
_SMALL = 5e-6  # a row is solved after a step that lowers F by no more than this share
_ROUNDING = 1e-7  # or by this share of F before the first step, which float32 does not see
_MOST_STEPS = 200
_GPU_STEPS = 4  # between two looks at which rows are solved: the CPU waits for a GPU there
_MOST_RAISES = 12
_INNER = 512  # length of the sums in a product: MKL splits longer ones between threads
_MOMENT_PANEL = 256  # columns of a symmetric product that are computed at a time
_GPU_TOKENS = 4096  # of a product on a GPU
_GPU_PANEL = 2048  # as _MOMENT_PANEL, on a GPU
_PANEL = 128  # columns that LAPACK factorises in the same way on any number of threads
_FIRST_RAISE = 1e-3  # the damping after 0


class Solution(NamedTuple):
    """What a solver found.

    Attributes:
        weight: float32, shape (outputs, inputs), zero where not kept.
        mask: bool, the same shape, true where kept.
        damping: the damping used, as a share of the mean diagonal of the gram. Higher than the one
            asked for if the matrix was not positive definite to float32.
        steps: of a refit, for the slowest row.
    """

    weight: Tensor
    mask: Tensor
    damping: float
    steps: int = 0


def refit_rows(
    weight: Tensor,
    mask: Tensor,
    gram: Tensor,
    right: Tensor | None = None,
    *,
    damping: float = 0.01,
    energy: Tensor | None = None,
    start: Tensor | None = None,
) -> Solution:
    """Move the kept weights of each row to the optimum F of this module, to about 0.01 % of F.

    The result is the same for any number of threads. If the matrix is not positive definite to
    float32, the damping is raised tenfold until it is.

    Args:
        weight: the dense weights, shape (outputs, inputs), any floating dtype.
        mask: bool, the same shape, true where kept.
        gram: G, float32, shape (inputs, inputs).
        right: C w_r of each row, float32, shape (outputs, inputs): sum_t omega_t y_tr xhat_t for
            the outputs y_t to return. None: those of the dense weights on the same inputs.
        damping: lambda as a share of the mean diagonal of G.
        energy: sum_t omega_t y_tr^2 of each row, shape (outputs,). Needed with `right`.
        start: kept weights near the optimum, float32, shape (outputs, inputs), zero where not kept;
            None: the dense ones. Needs `right`.

    Raises:
        NonFiniteError: weight, gram or right holds NaN or infinity, or values too large for their
            products.
    """
    check_finite(weight=weight, gram=gram, right=right)
    fitted = (weight * mask).float()
    most = 0
    raised = damping
    scale = float(gram.diagonal().double().mean())
    with float32_products("highest"), torch.no_grad():
        for raised in raised_dampings(damping) if scale > 0 else ():
            system = gram / scale
            system.diagonal().add_(raised)
            if cholesky(system.clone()) is not None:
                break
        else:  # no damping makes it positive definite
            return Solution(fitted, mask, raised)
        step = _rows_of_a_chunk(weight.shape[1])
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            begin = fitted[rows]
            kept = mask[rows].float()
            if right is None or energy is None:
                removed = weight[rows].float() - begin
                residual = add_product(removed, gram)
                error = torch.linalg.vecdot(removed, residual)
            else:
                moved = begin if start is None else start[rows]
                product = add_product(moved, gram)
                error = torch.linalg.vecdot(moved, product - 2 * right[rows]) + energy[rows].float()
                residual = right[rows] - product
                if start is not None:
                    change = moved - begin
                    error += raised * scale * torch.linalg.vecdot(change, change)
                    residual.sub_(change, alpha=raised * scale)
                    begin.copy_(moved)
            change, steps = _solve(system, kept, residual.div_(scale).mul_(kept), error / scale)
            fitted[rows] += change
            most = max(most, steps)
    check_products(fitted)
    return Solution(fitted, mask, raised, most)


def raised_dampings(damping: float) -> Iterator[float]:
    """The damping that is asked for, and higher ones to try until a matrix is positive definite
    to float32.
    """
    for _ in range(_MOST_RAISES):
        yield damping
        damping = max(10 * damping, _FIRST_RAISE)


def _solve(system: Tensor, mask: Tensor, residual: Tensor, objective: Tensor) -> tuple[Tensor, int]:
    """Minimise x A x - 2 x b over the masked positions of each row, from x = 0.

    Conjugate gradients, preconditioned by the diagonal of A: a few inputs of real layers are a
    thousand times larger than the others. `residual` is b, zero outside of the mask; `objective`
    the value at x = 0 with its constant, never negative. Both are overwritten. Returns x and the
    number of steps.
    """
    inverse = system.diagonal().reciprocal()
    solution = torch.zeros_like(residual)
    rows = torch.arange(len(residual), device=residual.device)
    change = torch.zeros_like(residual)
    product = torch.empty_like(residual)
    least = _ROUNDING * objective
    step = 0
    direction = residual * inverse
    descent = torch.linalg.vecdot(residual, direction)
    moving = descent > 0  # rows that are not solved
    every = _GPU_STEPS if residual.is_cuda else 1
    factors = _factors(system, 2)  # the steps need no more digits
    while step < _MOST_STEPS:
        left = int(moving.sum()) if step % every == 0 else len(moving)
        if not left:
            break
        if 2 * left <= len(moving):  # a few rows take most of the steps
            solution[rows] = change
            places = moving.nonzero()[:, 0]  # a GPU would look for them again for each tensor
            rows, mask, least, objective, moving = (
                values[places] for values in (rows, mask, least, objective, moving)
            )
            change, residual, direction, descent = (
                values[places] for values in (change, residual, direction, descent)
            )
            product = torch.empty_like(residual)
        if residual.is_cuda:
            product = _add_product_on_gpu(_factors(direction, 2), factors).mul_(mask)
        else:
            add_product(direction, system, product.zero_()).mul_(mask)
        curvature = torch.linalg.vecdot(direction, product)
        length = torch.where(moving & (curvature > 0), descent / curvature, 0)
        change.addcmul_(direction, length[:, None])
        residual.addcmul_(product, length[:, None], value=-1)
        decrease = length * descent
        objective -= decrease
        torch.mul(residual, inverse, out=product)
        before = descent
        descent = torch.linalg.vecdot(residual, product)
        moving &= (decrease > torch.maximum(_SMALL * objective, least)) & (descent > 0)
        direction.mul_(torch.where(moving, descent / before, 0)[:, None]).add_(product)
        step += 1
    solution[rows] = change
    return solution, step


def output_error(
    weight: Tensor,
    dense: Tensor,
    gram: Tensor,
    right: Tensor | None = None,
    energy: Tensor | None = None,
) -> Tensor:
    """E of each row: sum_t omega_t (v . xhat_t - y_tr)^2, float64, shape (outputs,).

    Args:
        weight: v, shape (outputs, inputs).
        dense: w, the same shape.
        gram, right, energy: those of `refit_rows`. With `right` and without `energy`, the constant
            is missing: v G v - 2 v C w.
    """
    with float32_products("highest"), torch.no_grad():
        v = weight.float() if right is not None else weight.float() - dense.float()
        error: Tensor = torch.linalg.vecdot(v, add_product(v, gram)).double()
        if right is not None:
            error -= 2 * torch.linalg.vecdot(v, right).double()
    return error if energy is None or right is None else error + energy.double()


def add_product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Add left @ right to `total`, or to zeros; returns `total`. The bits are the same for any
    number of threads.

    Args:
        left, right, total: float32, shapes (a, b), (b, c) and (a, c).
    """
    if left.is_cuda:
        return _add_product_on_gpu(_factors(left), _factors(right), total)
    if total is None:
        total = left.new_zeros(left.shape[0], right.shape[1])
    for first in range(0, left.shape[1], _INNER):
        total.addmm_(left[:, first : first + _INNER], right[first : first + _INNER])
    return total


def _factors(matrix: Tensor, parts: int = 3) -> list[Tensor]:
    """A float32 matrix as a factor of products on a GPU: itself, or bfloat16 matrices whose sum it
    is. Their products take a fraction of the time. Three have all digits of float32, and two have
    16 bits.
    """
    if matrix.is_cuda and _multiplies_bfloat16(matrix.device):
        return _in_bfloat16(matrix, parts)
    return [matrix]


def _add_product_on_gpu(
    left: list[Tensor], right: list[Tensor], total: Tensor | None = None
) -> Tensor:
    """Add the product of two matrices to `total`, or to zeros. Products of small parts with small
    parts are left out.
    """
    for place, one in enumerate(left):
        for other in right[: len(right) - place]:
            if one.dtype == torch.float32:
                return one @ other if total is None else total.addmm_(one, other)
            product = torch.mm(one, other, out_dtype=torch.float32)
            total = product if total is None else total.add_(product)
    assert total is not None
    return total


def add_moments(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Add the moments left^T @ right of some tokens to `total`, or to zeros; returns `total`.

    Where left and right are the same tensor, only the upper triangle is added: `symmetric` makes
    the matrix of it. Products of bfloat16 numbers are exact in any precision, so they take the
    fastest instructions, and their sums are in float32. The bits are the same for any number of
    threads.

    Args:
        left, right: shapes (tokens, a) and (tokens, b), any floating dtype.
        total: float32, shape (a, b).
    """
    if left.is_cuda:
        return _add_moments_on_gpu(left, right, total)
    same = left is right
    exact = left.dtype == right.dtype == torch.bfloat16
    left = left.float()
    right = left if same else right.float()
    if total is None:
        total = left.new_zeros(left.shape[1], right.shape[1])
    width = _MOMENT_PANEL if same else left.shape[1]
    with float32_products("medium" if exact else "highest"):
        for first in range(0, len(left), _INNER):
            rows = slice(first, first + _INNER)
            for start in range(0, left.shape[1], width):
                panel = slice(start, start + width)
                rest = slice(start if same else 0, None)
                total[panel, rest].addmm_(left[rows, panel].T, right[rows, rest])
    return total


def _add_moments_on_gpu(left: Tensor, right: Tensor, total: Tensor | None) -> Tensor:
    """`add_moments`, in products as large as a GPU wants them. A factor in float32 is the sum of
    three in bfloat16 if the other one has that dtype, so that these products are exact, too.
    """
    same = left is right
    if total is None:
        total = torch.zeros(left.shape[1], right.shape[1], device=left.device)
    width = _GPU_PANEL if same else left.shape[1]
    exact = right.dtype == torch.bfloat16 and left.dtype in (torch.bfloat16, torch.float32)
    with float32_products("medium" if exact else "highest"):
        for first in range(0, len(left), _GPU_TOKENS):
            tokens = slice(first, first + _GPU_TOKENS)
            parts = _in_bfloat16(left[tokens]) if exact else [left[tokens].float()]
            for start in range(0, left.shape[1], width):
                panel = slice(start, start + width)
                rest = slice(start if same else 0, None)
                for part in parts:
                    _add_to(total[panel, rest], part[:, panel].T, right[tokens, rest])
    return total


def _in_bfloat16(values: Tensor, most: int = 3) -> list[Tensor]:
    """Tensors of bfloat16, at most three, whose sum is `values`, or nearly so."""
    parts = [values.bfloat16()]
    while values.dtype != torch.bfloat16 and len(parts) < most:
        values = values - parts[-1]
        parts.append(values.bfloat16())
    return parts


def _add_to(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, with sums in float32, to `total`."""
    if left.dtype == torch.bfloat16 and _multiplies_bfloat16(left.device):
        total.add_(torch.mm(left, right, out_dtype=torch.float32))
    else:
        total.addmm_(left.float(), right.float())


@cache
def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether torch multiplies bfloat16 numbers on a device, and returns the sums in float32."""
    if not has_bfloat16(device):
        return False
    some = torch.full((16, 16), 1.0078125, dtype=torch.bfloat16, device=device)
    try:
        product = torch.mm(some, some, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(product, some.float() @ some.float())


def symmetric(upper: Tensor) -> Tensor:
    """The symmetric matrix with an upper triangle."""
    return upper.triu().add_(upper.triu(1).T)


def cholesky(lower: Tensor) -> Tensor | None:
    """The lower triangular factor of a matrix, float32, shape (n, n), in its place on a CPU; None
    if it is not positive definite.

    The bits are the same for any number of threads, which is not true of LAPACK's.
    """
    if lower.is_cuda:
        factor, failed = torch.linalg.cholesky_ex(lower)
        return None if int(failed) else factor
    for first in range(0, len(lower), _PANEL):
        here = slice(first, first + _PANEL)
        rest = slice(first + _PANEL, None)
        corner, failed = torch.linalg.cholesky_ex(lower[here, here])
        if int(failed):
            return None
        lower[here, here] = corner
        lower[rest, here] = torch.linalg.solve_triangular(
            corner.T, lower[rest, here], upper=True, left=False
        )
        lower[rest, rest].addmm_(lower[rest, here], lower[rest, here].T, alpha=-1)
    return lower.tril_()


def workspace_bytes(outputs: int, inputs: int) -> int:
    """The memory that `refit_rows` needs beside its arguments, in bytes, with `right`, the weights
    that it returns, and on a GPU the factors in bfloat16.
    """
    chunk = _BUFFERS * min(outputs, _rows_of_a_chunk(inputs))
    return 4 * inputs * (4 * inputs + 3 * outputs + chunk)


def check_finite(**tensors: Tensor | None) -> None:
    """Raise NonFiniteError for an argument with NaN or infinity."""
    given = {name: values for name, values in tensors.items() if values is not None}
    # The float64 sum is finite if and only if all values are. One pass, without a copy.
    sums = torch.stack([values.sum(dtype=torch.float64) for values in given.values()])
    for name, finite in zip(given, sums.isfinite().tolist(), strict=True):
        if not finite:
            raise NonFiniteError(f"{name} holds NaN or infinity")


def check_products(weight: Tensor) -> None:
    """Raise NonFiniteError if a solver's weights hold NaN or infinity: a product went beyond
    float32.
    """
    if not bool(weight.isfinite().all()):
        raise NonFiniteError("weight and gram are too large: their products go beyond float32")


def _rows_of_a_chunk(inputs: int) -> int:
    return max(_LEAST_ROWS, _CHUNK // max(inputs, 1))
