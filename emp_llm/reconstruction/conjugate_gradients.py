"""Conjugate gradients for many rows at once, each with its own mask, made of products with one shared matrix.

Row r solves A_SS x = b_S with A = G / scale + damping I, where S are its kept positions. A masked direction times A, masked
again, is a product with A_SS; so one matrix product serves all rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.reconstruction.preconditioner import Preconditioner

_WINDOW = 3  # steps; the decrease in the last of them, against that in those before, tells what further steps would gain
_SLOWEST, _FASTEST = 20.0, 0.5  # bounds on that gain, relative to the decrease in the last steps
_ROUNDING = 1e-7  # relative decrease of an objective that float32 no longer sees
_SAFETY = 0.15  # factor on the tolerance: decreases can pause and go on
_SHRINK = 0.9  # share of the rows below which those that have converged are taken out
_WITHOUT_ENERGY = 0.1  # factor on the tolerance when only the gain of a fit is known, and not the error that remains


class IndefiniteError(ArithmeticError):
    """A direction of negative or undefined curvature: the matrix is not positive definite to float32."""


@dataclass(frozen=True)
class System:
    """A = G / scale + damping I, of all rows.

    Attributes:
        gram: G, float32, shape (inputs, inputs), symmetric.
        scale: the mean of its diagonal.
        damping: lambda / scale.
    """

    gram: Tensor
    scale: float
    damping: float
    preconditioner: Preconditioner

    @classmethod
    def of(cls, gram: Tensor, scale: float, damping: float) -> "System":
        return cls(gram, scale, damping, Preconditioner.of(gram, scale, damping))

    def times(self, rows: Tensor, out: Tensor) -> Tensor:
        """Rows times A."""
        return torch.addmm(rows, rows, self.gram, beta=self.damping, alpha=1 / self.scale, out=out)


@dataclass(frozen=True)
class Solution:
    """What `solve` found.

    Attributes:
        change: x, float32, shape (rows, inputs), zero outside of the masks.
        iterations: of the row that took most.
        residual: an estimate of the largest share of a row's objective that further steps would remove. At most the
            tolerance, unless the iterations reached their limit.
        products: rows multiplied by A, in total; rows that had converged do not count.
    """

    change: Tensor
    iterations: int
    residual: float
    products: int


@dataclass
class _State:
    """The rows that have not converged. Blocks have the shape (rows, inputs)."""

    index: Tensor  # of the rows, in the block given to `solve`
    mask: Tensor
    cores: Tensor  # of the preconditioner; shape (rows, rank, rank)
    change: Tensor
    residual: Tensor
    direction: Tensor
    product: Tensor
    descent: Tensor  # residual . preconditioned residual; shape (rows,), as all that follow
    objective: Tensor  # what the change has left of it
    rounding: Tensor  # decrease that counts as none
    recent: Tensor  # (2 * _WINDOW, rows): the latest decreases, in turn

    def select(self, chosen: Tensor) -> None:
        """Keep the chosen rows only."""
        for name in ("index", "mask", "cores", "change", "residual", "direction", "descent", "objective", "rounding"):
            setattr(self, name, getattr(self, name)[chosen])
        self.recent = self.recent[:, chosen]
        self.product = torch.empty_like(self.residual)


def solve(system: System, mask: Tensor, right: Tensor, objective: Tensor | None, tolerance: float, limit: int) -> Solution:
    """Minimise x A x - 2 x b over the masked positions of each row, from x = 0.

    Args:
        mask: float32, 1 where a position may change, else 0; shape (rows, inputs).
        right: b, float32, zero outside of the mask.
        objective: the value at x = 0 with its constant, so that it is never negative, shape (rows,); None: unknown.
        tolerance: a row has converged when further steps would lower its objective by no more than this share of it. Where
            the objective is unknown, a tenth of this share of what the steps have gained.
        limit: the most iterations.

    Raises:
        IndefiniteError: the masked part of A is not positive definite to float32.
    """
    known = objective is not None
    state = _start(system, mask, right, objective)
    change = torch.zeros_like(right)
    iterations, residual, products, count = 0, 0.0, 0, len(state.index)
    while len(state.index) and iterations < limit:
        decrease, broken = _step(system, state)
        state.recent[iterations % len(state.recent)] = decrease
        state.objective -= decrease
        iterations += 1
        products += int(count)
        further = _further(state.recent, iterations)
        reference = state.objective if known else -_WITHOUT_ENERGY * state.objective
        left = further > torch.maximum(_SAFETY * tolerance * reference, state.rounding)
        any_broken, count = torch.stack((broken.any(), left.sum())).tolist()
        if any_broken:
            raise IndefiniteError
        if count <= _SHRINK * len(left) or iterations == limit:
            change[state.index] = state.change
            shares = torch.where(further <= state.rounding, 0, further / reference)
            residual = max(residual, float(shares[~left | (iterations == limit)].max()))
            state.select(left)
    return Solution(change, iterations, residual, products)


def _start(system: System, mask: Tensor, right: Tensor, objective: Tensor | None) -> _State:
    cores = system.preconditioner.cores(mask)
    direction = system.preconditioner.apply(right, mask, cores, torch.empty_like(right))
    descent = torch.linalg.vecdot(right, direction)
    nothing = torch.zeros_like(descent)
    state = _State(
        index=torch.arange(len(right), device=right.device),
        mask=mask,
        cores=cores,
        change=torch.zeros_like(right),
        residual=right,
        direction=direction,
        product=torch.empty_like(right),
        descent=descent,
        objective=nothing.clone() if objective is None else objective.clone(),
        rounding=nothing if objective is None else _ROUNDING * objective,
        recent=nothing.repeat(2 * _WINDOW, 1),
    )
    state.select(descent != 0)  # a copy of the blocks: `right` stays as it is
    return state


def _further(recent: Tensor, iterations: int) -> Tensor:
    """How far further steps would lower the objective of each row, if its decrease falls as steadily as in the latest steps."""
    order = [(iterations - 1 - age) % len(recent) for age in range(len(recent))]
    late, early = recent[order[:_WINDOW]].sum(0), recent[order[_WINDOW:]].sum(0)
    return late * torch.where(early > late, late / (early - late), _SLOWEST).clamp(_FASTEST, _SLOWEST)


def _step(system: System, state: _State) -> tuple[Tensor, Tensor]:
    """One step of all rows: how far it lowers the objective, and whether the curvature of a direction is no positive number."""
    product = system.times(state.direction, state.product).mul_(state.mask)
    curvature = torch.linalg.vecdot(state.direction, product)
    at_rest = state.descent == 0
    length = torch.where(at_rest, 0, state.descent / curvature)
    decrease = length * state.descent
    state.change.addcmul_(state.direction, length[:, None])
    state.residual.addcmul_(product, length[:, None], value=-1)
    preconditioned = system.preconditioner.apply(state.residual, state.mask, state.cores, product)
    descent = torch.linalg.vecdot(state.residual, preconditioned)
    ratio = torch.where(at_rest, 0, descent / state.descent)
    torch.addcmul(preconditioned, state.direction, ratio[:, None], out=state.direction)
    state.descent = descent
    return decrease, ~(at_rest | ((curvature > 0) & decrease.isfinite()))
