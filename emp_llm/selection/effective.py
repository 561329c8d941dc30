"""Effective Model Pruning (EMP, arXiv 2509.25606): Algorithm 1, from importance scores to a mask,
and its guarantees.

    from emp_llm import effective_mask
    mask = effective_mask(scores)  # each row is a group; `dim` chooses other groups

Algorithm 1, for the scores s of a group of N components:

1. omega = |s| / sum |s|
2. N_eff = 1 / sum omega^2, the number of equally important components that the scores are worth
3. k = clip(floor(beta * N_eff), 1, N)
4. keep the k largest |s|
"""

import math

import numpy as np
import torch
from torch import Tensor

from emp_llm.common.errors import UserError
from emp_llm.common.machine import exact_device
from emp_llm.selection.reference import (
    PowerSums,
    largest_mask,
    mass_of_largest,
    order_keys,
    row_cuts,
    sum_rows,
)
from emp_llm.selection.rows import has_kernel, mask_by_kernel
from emp_llm.selection.rule import KeepRule, check_beta, floor_count, mass_bound

Dim = int | tuple[int, ...] | None
# scores; with fewer, a kernel saves less time than its compiler takes to load.
_LEAST_FOR_KERNEL = 1 << 20


def effective_mask(
    scores: Tensor, dim: Dim = -1, *, beta: float = 1.0, order: float = 2.0
) -> Tensor:
    """Algorithm 1: keep the clip(floor(beta * N_eff), 1, N) largest |scores| of every group.

    Args:
        scores: importance scores, any shape, floating or integer dtype, finite. Only magnitudes
            matter. If the sign has a meaning, first map the scores with `shift` or `exponential`.
        dim: the dimension or dimensions of a group; None: the whole tensor is one group.
        beta: multiple of the effective number to keep. The method is beta = 1; other values are a
            deployment knob.
        order: Hill order of the effective number. The paper uses 2.

    Returns:
        bool, shape and device of `scores`, true where kept. Among equal scores, those with the
        lowest index are kept. A group of zeros is kept whole.

    Raises:
        NonFiniteError: scores hold NaN or infinity.
        ValueError: scores are no tensor, or empty, beta is not positive and finite, order is
            negative or NaN, or `dim` names a dimension twice.
        IndexError: `dim` is out of range.
    """
    rows, shape, permutation = _as_rows(scores, dim)
    check_beta(beta)
    rule = KeepRule(beta=beta, order=order)
    if rows.numel() >= _LEAST_FOR_KERNEL and has_kernel(rows, rule):
        mask = mask_by_kernel(rows, rule)  # the same mask, compiled
    else:
        sums = PowerSums.of_rows(rows, order)  # N_eff = (sum |s|)^2 / sum s^2
        counts = sums.counts(beta)  # clip(floor(beta * N_eff), 1, N)
        mask = largest_mask(rows, counts)
    return mask.reshape(shape).permute(permutation).to(scores.device)


def effective_number(scores: Tensor, dim: Dim = -1, *, order: float = 2.0) -> Tensor:
    """N_eff = 1 / sum omega^2 with omega = |s| / sum |s| (equation 1), not floored; or the Hill
    number of another order.

    Args and errors as for `effective_mask`.

    Returns:
        float64, the shape of `scores` without `dim`, on their device, or on the CPU if that has no
        float64; between 1 and N. Uniform scores and groups of zeros give exactly N.
    """
    rows, shape, _ = _as_rows(scores, dim)
    return (
        PowerSums.of_rows(rows, order)
        .number()
        .reshape(shape[: scores.dim() - len(_dims(scores, dim))])
    )


def effective_mass(scores: Tensor, dim: Dim = -1, *, order: float = 2.0) -> Tensor:
    """s_eff: the share of sum |s| that the floor(N_eff) largest scores hold (section 3.2).

    Args and errors as for `effective_mask`.

    Returns:
        float64, the shape and device of `effective_number`, above 0 and at most 1; 1 for groups of
        zeros.
    """
    rows, shape, _ = _as_rows(scores, dim)
    sums = PowerSums.of_rows(rows, order)
    keys = order_keys(rows)
    (cut,) = row_cuts(keys, sums.counts())
    mass = mass_of_largest(keys, rows.dtype, cut, sums)
    return mass.reshape(shape[: scores.dim() - len(_dims(scores, dim))])


def effective_mass_bound(n_eff: Tensor | float, size: Tensor | int) -> Tensor:
    """The tight lower bound on s_eff, with nu = floor(N_eff) and N = size (theorem 4.2; order 2
    only).

    nu/N + (N-nu)/N * sqrt((N-nu-1) / ((nu+1)(N-1))) for 2 <= nu < N; 1/2 for nu = 1; 1 for nu = N.

    Args:
        n_eff: the effective number of each group, not floored.
        size: the number of scores in each group; broadcast with `n_eff`.

    Returns:
        float64, the broadcast shape of the arguments, on the device of the first tensor among them,
        else, or if that has no float64, the CPU.
    """
    device = next(
        (value.device for value in (n_eff, size) if isinstance(value, Tensor)), torch.device("cpu")
    )
    numbers = (
        value.cpu().numpy() if isinstance(value, Tensor) else value for value in (n_eff, size)
    )
    return torch.from_numpy(np.asarray(mass_bound(*numbers))).to(exact_device(device))


def loss_change_bound(weights: Tensor, hessian_trace: float, n_eff: float | None = None) -> float:
    """The asymptotic bound on the loss change under magnitude scores (equation 5): an upper bound
    as N grows.

    epsilon <~ |theta|_1^2 * Tr(H) * (1-rho)^4 / (2 rho) * (1 - sqrt((1-rho) / (N rho)))^2, rho =
    N_eff / N.

    Args:
        weights: theta, all weights of the group, any shape.
        hessian_trace: Tr(H) of the loss at theta.
        n_eff: number of kept weights; None: floor(N_eff) of the weights.

    Raises:
        NonFiniteError: weights hold NaN or infinity, and `n_eff` is None.
    """
    _check_tensor("weights", weights)
    theta = _in_floats(weights.detach()).reshape(1, -1)
    if n_eff is None:
        n_eff = float(floor_count(float(PowerSums.of_rows(theta).number()[0])))
    n = theta.shape[1]
    rho = n_eff / n
    l1 = float(sum_rows(theta, lambda s: s.abs())[0][0])
    gap = 1 - math.sqrt((1 - rho) / (n * rho))
    return l1 * l1 * hessian_trace * (1 - rho) ** 4 / (2 * rho) * gap * gap


def _check_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise UserError(
            f"{name} must be a tensor, got a value of type {type(given).__name__}. Write "
            f"torch.as_tensor({name})."
        )


def _in_floats(scores: Tensor) -> Tensor:
    """Scores of 16, 32 or 64 bits as they are; integers and 8-bit floats in float64, exact up to
    2^53. On the CPU, if their device has no float64.
    """
    scores = scores.to(exact_device(scores.device))
    return scores if scores.is_floating_point() and scores.element_size() > 1 else scores.double()


def _dims(scores: Tensor, dim: Dim) -> list[int]:
    """The dimensions of a group, in ascending order."""
    count = scores.dim()
    if dim is None or (count == 0 and dim in (-1, 0)):
        return list(range(count))
    dims = (dim,) if isinstance(dim, int) else dim
    if not all(-count <= d < count for d in dims):
        raise IndexError(f"dim {dim} is out of range: the scores have {count} dimensions")
    from_zero = sorted(d % count for d in dims)
    if len(set(from_zero)) < len(from_zero):
        raise ValueError(f"dim {dim} names a dimension twice")
    return from_zero


def _as_rows(scores: Tensor, dim: Dim) -> tuple[Tensor, list[int], list[int]]:
    """Groups as contiguous rows; the shape to reshape rows back to; and the permutation that
    restores the order of the dims.
    """
    _check_tensor("scores", scores)
    if scores.numel() == 0:
        raise ValueError(f"scores are empty: shape {tuple(scores.shape)}")
    group = _dims(scores, dim)
    forward = [d for d in range(scores.dim()) if d not in group] + group
    permuted = _in_floats(scores.detach()).permute(forward)
    size = math.prod(scores.shape[d] for d in group)
    inverse = [forward.index(d) for d in range(scores.dim())]
    return permuted.reshape(-1, size).contiguous(), list(permuted.shape), inverse
