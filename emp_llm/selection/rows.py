"""Rows, each a group of its own: the reference, in plain torch, that every kernel has to match bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.selection.budgets import Budget, PatternBudget
from emp_llm.selection.effective import keep_counts, kept_mass
from emp_llm.selection.hill import Moments
from emp_llm.selection.masks import keep_mask, order_keys, row_thresholds
from emp_llm.selection.sums import sum_rows


@dataclass(frozen=True)
class Selection:
    """The decision on a block of rows.

    Attributes:
        mask: bool, shape (rows, columns), true where kept.
        kept: int64, shape (rows,).
        kept_mass: float64, shape (rows,), sum |s| over the kept.
        mass: float64, shape (rows,), sum |s| over all.
        n_eff: float64, shape (rows,), each row's effective number; None where a group is larger than a row.
        s_eff: float64, shape (rows,), the share of the floor(N_eff) largest; None likewise.
    """

    mask: Tensor
    kept: Tensor
    kept_mass: Tensor
    mass: Tensor
    n_eff: Tensor | None = None
    s_eff: Tensor | None = None


def select_rows(scores: Tensor, budget: Budget, offset: int = 0) -> Selection:
    """Decide a block of rows, each a group of its own.

    Args:
        scores: shape (rows, columns), floating, non-negative.
        budget: how many to keep of each row (of every M columns, for an N:M pattern).
        offset: how many target weights come before this block.

    Raises:
        NonFiniteError: scores hold NaN or infinity.
        ValueError: an N:M pattern whose M does not divide the columns.
    """
    moments = Moments.of_rows(scores, budget.order)
    keys = order_keys(scores)
    nu = keep_counts(moments)
    at_nu = row_thresholds(keys, nu)
    if isinstance(budget, PatternBudget):
        mask = _pattern_mask(keys, budget)
    else:
        counts = budget.counts(moments, offset, scores)
        threshold = at_nu if torch.equal(counts, nu) else row_thresholds(keys, counts)
        mask = keep_mask(keys, threshold)
    (kept_scores,) = sum_rows(torch.where(mask, scores, 0), lambda s: s)
    s_eff = kept_mass(scores, at_nu, moments)
    return Selection(mask, mask.sum(1), kept_scores, moments.mass, moments.number(), s_eff)


def _pattern_mask(keys: Tensor, budget: PatternBudget) -> Tensor:
    budget.kept_of(keys.shape[1])  # raises where M does not divide the columns
    groups = keys.reshape(-1, budget.m)
    counts = torch.full((groups.shape[0],), budget.n, device=keys.device)
    return keep_mask(groups, row_thresholds(groups, counts)).reshape(keys.shape)
