"""Effective Model Pruning: given importance scores, how many to keep (Algorithm 1), and what that guarantees.

    from emp_llm import effective_mask
    mask = effective_mask(scores)          # one budget for each row; any tensor, any dim, any device

Scores s of a group of N components give omega = |s| / sum |s| and N_eff = 1 / sum omega^2, the number of equally important
components they are worth; the floor(beta * N_eff) largest are kept.
"""

import math

import torch
from torch import Tensor

from emp_llm.selection.hill import RELATIVE_TOLERANCE, Moments
from emp_llm.selection.masks import Threshold, key_values, largest_mask, order_keys, row_thresholds
from emp_llm.selection.sums import sum_rows

Dim = int | tuple[int, ...] | None


def effective_mask(scores: Tensor, dim: Dim = -1, *, beta: float = 1.0, order: float = 2.0) -> Tensor:
    """Algorithm 1: keep the clip(floor(beta * N_eff), 1, N) largest |scores| of every group.

    Args:
        scores: importance scores, any shape, floating or integer dtype, finite. Only magnitudes count: map signed scores
            whose sign means something first, with `shift` or `exponential`.
        dim: the dimension or dimensions that make up a group; None: the whole tensor is one group.
        beta: keep beta times the effective number; 1 is the method, anything else a deployment knob.
        order: Hill order of the effective number; 2 is the paper's.

    Returns:
        bool, shape and device of `scores`, true where kept. Equal scores: the lowest index of the group is kept.
        A group of zeros is kept whole.

    Raises:
        NonFiniteError: scores hold NaN or infinity.
        ValueError: beta <= 0, or order < 0.
    """
    rows, shape, order_of_dims = _as_rows(scores, dim)
    counts = keep_counts(Moments.of_rows(rows, order), beta)
    mask = largest_mask(rows, counts)
    return mask.reshape(shape).permute(order_of_dims)


def effective_number(scores: Tensor, dim: Dim = -1, *, order: float = 2.0) -> Tensor:
    """N_eff = 1 / sum omega^2 with omega = |s| / sum |s| (equation 1), or the Hill number of another order; not floored.

    Args and errors as for `effective_mask`.

    Returns:
        float64, the shape of `scores` without `dim`, between 1 and N. Uniform scores give exactly N, zeros N as well.
    """
    rows, shape, _ = _as_rows(scores, dim)
    kept_shape = shape[: len(shape) - _group_dims(scores, dim)]
    return Moments.of_rows(rows, order).number().reshape(kept_shape)


def effective_mass(scores: Tensor, dim: Dim = -1, *, order: float = 2.0) -> Tensor:
    """s_eff: the share of sum |s| that the floor(N_eff) largest scores hold (section 3); float64, shape without `dim`."""
    rows, shape, _ = _as_rows(scores, dim)
    moments = Moments.of_rows(rows, order)
    mass = kept_mass(rows, row_thresholds(order_keys(rows), keep_counts(moments)), moments)
    return mass.reshape(shape[: len(shape) - _group_dims(scores, dim)])


def effective_mass_bound(n_eff: Tensor | float, size: Tensor | int) -> Tensor:
    """The tight lower bound on s_eff, with nu = floor(N_eff) and N = size (theorem 4.2; order 2 only).

    nu/N + (N-nu)/N * sqrt((N-nu-1) / ((nu+1)(N-1))) for 2 <= nu < N; 1/2 for nu = 1; 1 for nu = N. Float64, broadcast.
    """
    nu = floor(torch.as_tensor(n_eff, dtype=torch.float64))
    n = torch.as_tensor(size, dtype=torch.float64, device=nu.device)
    inner = (n - nu - 1).clamp(min=0) / ((nu + 1) * (n - 1).clamp(min=1))
    bound = nu / n + (n - nu) / n * inner.sqrt()
    bound = torch.where(nu <= 1, 0.5, bound)
    return torch.where(nu >= n, 1.0, bound)


def loss_change_bound(weights: Tensor, hessian_trace: float, n_eff: float | None = None) -> float:
    """The asymptotic bound on the loss change when magnitude scores decide (equation 5): an upper bound as N grows.

    epsilon <~ |theta|_1^2 * Tr(H) * (1-rho)^4 / (2 rho) * (1 - sqrt((1-rho) / (N rho)))^2, rho = N_eff / N.

    Args:
        weights: theta, all weights that compete, any shape.
        hessian_trace: Tr(H) of the loss at theta.
        n_eff: how many are kept; default: floor(N_eff) of the weights themselves.
    """
    theta = weights.detach().reshape(1, -1)
    if n_eff is None:
        n_eff = float(floor(Moments.of_rows(_floating(theta)).number())[0])
    n = theta.shape[1]
    rho = n_eff / n
    l1 = float(sum_rows(theta, lambda s: s.abs())[0][0])
    gap = 1 - math.sqrt((1 - rho) / (n * rho))
    return l1 * l1 * hessian_trace * (1 - rho) ** 4 / (2 * rho) * gap * gap


def keep_counts(moments: Moments, beta: float = 1.0) -> Tensor:
    """clip(floor(beta * N_eff), 1, N) for each group, int64; N for a group of zeros, whose N_eff is N, at any beta.

    Raises:
        ValueError: beta is not a positive number.
    """
    check_beta(beta)
    counts = floor(beta * moments.number()).clamp(min=1.0)
    counts = torch.where(moments.total == 0, math.inf, counts)
    return counts.minimum(moments.size.double()).long()


def check_beta(beta: float) -> None:
    """Raise ValueError unless beta is a positive finite number."""
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be a number above 0 (1 is the method), got {beta:g}")


def floor(values: Tensor) -> Tensor:
    """Floor of float64 values, where a value within rounding error below an integer counts as that integer."""
    return torch.floor(values * (1 + RELATIVE_TOLERANCE))


def kept_mass(rows: Tensor, threshold: Threshold, moments: Moments) -> Tensor:
    """The share of each row's sum |s| that lies above its threshold, ties counted; float64, shape (rows,)."""
    cut = key_values(threshold.key, rows.dtype)
    (above,) = sum_rows(rows, lambda s: torch.where(s.abs() > cut, s.abs(), 0.0))
    mass = (above + threshold.ties[:, 0] * cut[:, 0]) / moments.mass
    return torch.where(moments.total == 0, 1.0, mass).clamp(max=1.0)


def _floating(scores: Tensor) -> Tensor:
    return scores if scores.is_floating_point() else scores.double()


def _group_dims(scores: Tensor, dim: Dim) -> int:
    return scores.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)


def _as_rows(scores: Tensor, dim: Dim) -> tuple[Tensor, list[int], list[int]]:
    """Groups as rows; the shape to reshape rows back to, and the permutation that then restores the order of dims."""
    if scores.numel() == 0:
        raise ValueError(f"scores are empty: shape {tuple(scores.shape)}")
    dims = range(scores.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    last = [d % max(scores.dim(), 1) for d in dims]
    forward = [d for d in range(scores.dim()) if d not in last] + sorted(last)
    moved = _floating(scores.detach()).permute(forward)
    size = math.prod(scores.shape[d] for d in last)
    inverse = [forward.index(d) for d in range(scores.dim())]
    return moved.reshape(-1, size), list(moved.shape), inverse
