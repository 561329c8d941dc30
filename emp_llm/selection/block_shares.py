"""Layerwise shares by outliers (OWL): blocks with more outliers among their scores lose fewer weights.

Yin et al., "Outlier Weighed Layerwise Sparsity (OWL): A Missing Secret Sauce for Pruning LLMs to High Sparsity", 2024.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from emp_llm.selection.arithmetic.definitions import floor_count
from emp_llm.selection.budgets import PartsBudget, UnsettledBudget


@dataclass(frozen=True)
class OwlBudget(UnsettledBudget):
    """A fixed sparsity of all targets, and of each block one that depends on its outliers.

    The share of outliers D of a block is that of its scores above `outlier` times their mean. The sparsities of the blocks are
    S - spread * (D - mean D) / max |D - mean D|, so that their mean, weighted by size, is S. It is settled before the first
    mask is decided, when the scores of all blocks are known; then `block_parts` gives the budget.

    Attributes:
        sparsity: S, at least 0 and below 1.
        spread: the largest distance of a block's sparsity from S (lambda of the paper).
        outlier: multiple of the mean score above which a score is an outlier (M of the paper).

    Raises:
        ValueError: a value is out of range.
    """

    sparsity: float
    spread: float = 0.08
    outlier: float = 5.0
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, got {self.sparsity:g}")
        if not 0 <= self.spread <= self.sparsity or self.sparsity + self.spread >= 1:
            raise ValueError(
                f"owl-lambda must leave every block a sparsity between 0 and 1: {self.sparsity:g} - {self.spread:g} and "
                f"{self.sparsity:g} + {self.spread:g} do not"
            )
        if not 0 < self.outlier < math.inf:
            raise ValueError(f"owl-m must be a number above 0 (the paper uses 5), got {self.outlier:g}")


def block_sparsities(budget: OwlBudget, outliers: Sequence[Fraction | None], sizes: Sequence[int]) -> list[float]:
    """The sparsity of each block.

    Args:
        budget: the rule.
        outliers: the share of outliers of each block, exact, so that equal shares differ by no rounding; None if it has no
            scores of the criterion, for the mean sparsity.
        sizes: number of target weights of each block.
    """
    known = [(share, size) for share, size in zip(outliers, sizes, strict=True) if share is not None]
    mean = sum((share * size for share, size in known), Fraction()) / (sum(size for _, size in known) or 1)
    farthest = max((abs(share - mean) for share, _ in known), default=Fraction())
    steps = [0.0 if share is None or not farthest else float((share - mean) / farthest) for share in outliers]
    return [budget.sparsity - budget.spread * step for step in steps]


def block_parts(budget: OwlBudget, sparsities: Sequence[float], sizes: Sequence[int]) -> PartsBudget:
    """The budget that removes floor(S * total) weights, and of each part its sparsity, rounded down or up.

    Args:
        budget: the rule.
        sparsities: of consecutive parts of all target weights; their mean, weighted by size, is S.
        sizes: number of weights of each part.
    """
    wanted = [sparsity * size for sparsity, size in zip(sparsities, sizes, strict=True)]
    ends = [floor_count(math.fsum(wanted[: number + 1])) for number in range(len(wanted) - 1)]
    ends.append(floor_count(budget.sparsity * sum(sizes)))
    removed = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return PartsBudget(tuple(removed), tuple(sizes))
