"""The new weights of one target, from its second moments: the refit of a given mask, or a method that chooses its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from emp_llm.checkpoint.matrix import torch_dtype
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.reconstruction.admm import admm
from emp_llm.reconstruction.least_squares import damping_for, output_error, refit_rows
from emp_llm.reconstruction.sparsegpt import sparsegpt
from emp_llm.refit.level_moments import LayerMoments

Mask = Callable[[Target], Tensor]


@dataclass
class Fitted:
    """The outcome for one target.

    Attributes:
        weight: in the dtype in which it is stored, shape (outputs, inputs), on the CPU; None: the kept weights stay.
        tokens: number of tokens of the fit.
        kept_mass: share of sum |W| in the kept weights.
        damping: pull towards the dense weights, as a share of the mean second moment.
        before, after: relative output error sum w ||What xhat - y||^2 / sum w ||y||^2 on the calibration tokens, of the
            masked and of the fitted weights; None without tokens.
        held_out_before, held_out_after: the same on the sequences held out; None without them.
    """

    weight: Tensor | None
    tokens: int
    kept_mass: float = 1.0
    damping: float | None = None
    before: float | None = None
    after: float | None = None
    held_out_before: float | None = None
    held_out_after: float | None = None


class Fitter(Protocol):
    """Computes a target's weights."""

    @property
    def mask(self) -> Mask:
        """Returns the mask of a target that is not fitted, bool, shape (outputs, inputs)."""

    @property
    def chooses(self) -> bool:
        """Whether the fit chooses the mask."""

    def fit(self, target: Target, weight: Tensor, moments: LayerMoments | None, mask: Tensor | None) -> tuple[Fitted, Tensor]:
        """Fit a target.

        Args:
            target: the matrix.
            weight: dense, float32, shape (outputs, inputs).
            moments: of its inputs; None if it saw no token.
            mask: of the target, bool, shape (outputs, inputs); None if the fit chooses it.

        Returns:
            The outcome, and the mask, bool, shape (outputs, inputs).
        """


@dataclass(frozen=True)
class MaskedFitter:
    """The least-squares refit of given masks.

    Attributes:
        mask: returns the mask of a target, bool, shape (outputs, inputs).
        damping: as for `refit_rows`; None: `damping_for` the tokens of each target.
        least_tokens: experts that saw fewer tokens keep their weights.
    """

    mask: Mask
    damping: float | None
    least_tokens: int = 0

    @property
    def chooses(self) -> bool:
        return False

    def fit(self, target: Target, weight: Tensor, moments: LayerMoments | None, mask: Tensor | None) -> tuple[Fitted, Tensor]:
        mask = (self.mask(target) if mask is None else mask).to(weight.device)
        if moments is None or (target.layer.routed and moments.tokens < self.least_tokens):
            return Fitted(None, 0 if moments is None else moments.tokens), mask
        return refit_with(target, weight, mask, moments, self.damping), mask


class Chosen(NamedTuple):
    """A mask, bool, the weights that go with it, float32, both of shape (outputs, inputs), and the damping used."""

    mask: Tensor
    weight: Tensor
    damping: float


@dataclass(frozen=True)
class SparseGptChoice:
    """The choice of SparseGPT.

    Attributes:
        removed: returns how many weights of a target are removed.
        pattern: (N, M) for N:M; else None.
    """

    removed: Callable[[Target], int]
    pattern: tuple[int, int] | None

    def __call__(self, target: Target, weight: Tensor, moments: LayerMoments) -> Chosen:
        if self.pattern is not None:
            result = sparsegpt(weight, moments.gram, pattern=self.pattern)
        else:
            # The next number, so that the product with the size is not rounded below `removed`.
            result = sparsegpt(weight, moments.gram, sparsity=math.nextafter(self.removed(target) / weight.numel(), 1.0))
        return Chosen(result.mask, result.weight, result.damping)


@dataclass(frozen=True)
class AdmmChoice:
    """The choice of ADMM.

    Attributes:
        counts: returns how many weights of a target are kept: int64, of each row or, shape (1,), of the matrix.
        pattern: (N, M) for N:M, in place of the counts; else None.
        damping: as for `MaskedFitter`.
    """

    counts: Callable[[Target], Tensor]
    pattern: tuple[int, int] | None
    damping: float | None

    def __call__(self, target: Target, weight: Tensor, moments: LayerMoments) -> Chosen:
        damping = _damping(self.damping, weight, moments)
        counts = None if self.pattern is not None else self.counts(target).to(weight.device)
        aims = {"cross": moments.cross, "wanted": moments.wanted}
        result = admm(weight, moments.gram, counts=counts, pattern=self.pattern, damping=damping, **aims)
        return Chosen(result.mask, result.weight, damping)


@dataclass(frozen=True)
class ChoosingFitter:
    """A method that chooses the masks with the weights, and on request the refit of its masks.

    Attributes:
        choose: the method.
        refit: the kept weights are fitted again.
        damping: of the refit, as for `MaskedFitter`.
        mask: returns the mask of an expert that saw fewer than `least_tokens` tokens.
    """

    choose: Callable[[Target, Tensor, LayerMoments], Chosen]
    refit: bool
    damping: float | None
    mask: Mask
    least_tokens: int = 0

    @property
    def chooses(self) -> bool:
        return True

    def fit(self, target: Target, weight: Tensor, moments: LayerMoments | None, mask: Tensor | None) -> tuple[Fitted, Tensor]:
        if moments is None or moments.tokens < (self.least_tokens if target.layer.routed else 1):
            return Fitted(None, 0 if moments is None else moments.tokens), self.mask(target).to(weight.device)
        if not bool(weight.isfinite().all()):
            raise UserError(f"{target.matrix.stored.name} holds NaN or infinity. The checkpoint is damaged; download it again.")
        result = self.choose(target, weight, moments)
        if self.refit:
            return refit_with(target, weight, result.mask, moments, self.damping), result.mask
        stored = _as_stored(target, result.weight, result.mask)
        before, after = _errors(weight, result.mask, stored, moments, target)
        mass = _kept_mass(weight, result.mask)
        return Fitted(stored.cpu(), moments.tokens, mass, result.damping, before, after), result.mask


def refit_with(target: Target, weight: Tensor, mask: Tensor, moments: LayerMoments, damping: float | None) -> Fitted:
    """The refit of a target's kept weights; `damping` as for `MaskedFitter`."""
    damping = _damping(damping, weight, moments)
    energy = moments.energy[target.name]
    gram, cross, wanted = moments.gram, moments.cross, moments.wanted
    result = refit_rows(weight, mask, gram, cross, damping=damping, energy=energy, wanted=wanted)
    stored = _as_stored(target, result.weight, mask)
    before, after = _errors(weight, mask, stored, moments, target)
    return Fitted(stored.cpu(), moments.tokens, _kept_mass(weight, mask), result.damping, before, after)


def _damping(asked: float | None, weight: Tensor, moments: LayerMoments) -> float:
    return damping_for(weight.shape[1], moments.tokens) if asked is None else asked


def _kept_mass(weight: Tensor, mask: Tensor) -> float:
    """The share of sum |W| in the kept weights; 1 for a matrix of zeros."""
    total = float(weight.abs().sum(dtype=torch.float64))
    return float((weight.abs() * mask).sum(dtype=torch.float64)) / total if total else 1.0


def _as_stored(target: Target, weight: Tensor, mask: Tensor) -> Tensor:
    """A fitted weight in the dtype of the checkpoint. Values beyond its range become its largest."""
    dtype = torch_dtype(target.matrix.stored.dtype)
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return weight.clamp(-most, most).to(dtype).masked_fill_(~mask, 0)  # not -0.0


def _errors(weight: Tensor, mask: Tensor, stored: Tensor, moments: LayerMoments, target: Target) -> tuple[float, float]:
    """The relative output errors of the masked and of the fitted weights, on the calibration tokens."""
    energy = moments.energy[target.name]
    total = float(energy.sum())
    if total <= 0:
        return 0.0, 0.0
    values = (weight * mask, stored.float())
    how = (weight, moments.gram, moments.cross, energy, moments.wanted)
    one, other = (float(output_error(each, *how).sum()) / total for each in values)
    return max(0.0, one), max(0.0, other)
