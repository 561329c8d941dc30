"""Selection of rows, each a group of its own: the reference in plain torch that every kernel matches bit for bit."""

from dataclasses import dataclass

from torch import Tensor

from emp_llm.selection.arithmetic.counts import keep_counts, kept_share
from emp_llm.selection.arithmetic.hill import Moments
from emp_llm.selection.arithmetic.masks import keep_mask, masked_scores, order_keys, pattern_mask, row_thresholds
from emp_llm.selection.arithmetic.sums import sum_rows
from emp_llm.selection.budgets import Budget, PatternBudget


@dataclass(frozen=True)
class Selection:
    """The weights of a block of rows that are kept.

    Attributes:
        mask: bool, shape (rows, columns), true where kept.
        kept: int64, shape (rows,), how many are kept.
        kept_mass: float64, shape (rows,), sum |s| over the kept scores.
        mass: float64, shape (rows,), sum |s| over all scores.
        n_eff: float64, shape (rows,), the effective number of each row.
        s_eff: float64, shape (rows,), the share of sum |s| that the floor(N_eff) largest scores hold.

    n_eff and s_eff are None where a group is larger than a row.
    """

    mask: Tensor
    kept: Tensor
    kept_mass: Tensor
    mass: Tensor
    n_eff: Tensor | None = None
    s_eff: Tensor | None = None


def select_rows(scores: Tensor, budget: Budget, offset: int = 0) -> Selection:
    """Select from a block of rows, each a group of its own.

    Args:
        scores: shape (rows, columns), floating, non-negative.
        budget: how many scores of each row to keep (of every M columns, for an N:M pattern).
        offset: number of target weights before this block.

    Raises:
        NonFiniteError: scores hold NaN or infinity.
        ValueError: an N:M pattern whose M does not divide the columns.
    """
    moments = Moments.of_rows(scores, budget.order)
    counts, nu = budget.counts(moments, offset, scores), keep_counts(moments)
    keys = order_keys(scores)
    at_counts, at_nu = row_thresholds(keys, counts, nu)
    if isinstance(budget, PatternBudget):
        mask = pattern_mask(keys, budget.n, budget.m)
    else:
        mask = keep_mask(keys, at_counts)
    (mass_kept,) = sum_rows(masked_scores(keys, mask, scores.dtype), lambda s: s)
    s_eff = kept_share(keys, scores.dtype, at_nu, moments)
    return Selection(mask, counts, mass_kept, moments.mass, moments.number(), s_eff)
