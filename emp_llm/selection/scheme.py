"""Schemes: a criterion, a budget and a kind of group together define a mask."""

from dataclasses import dataclass
from typing import Literal

from emp_llm.selection.block_shares import OwlBudget
from emp_llm.selection.budgets import Budget, EffectiveBudget, PartsBudget, PatternBudget, RequestedBudget
from emp_llm.selection.criteria import CRITERIA, Criterion

Group = Literal["row", "matrix", "all"]
ScoreMap = Literal["abs", "shift", "exp"]
CountBy = Literal["own", "magnitude"]


@dataclass(frozen=True)
class Scheme:
    """The definition of a mask.

    Attributes:
        criterion_name: a key of CRITERIA; it scores the weights.
        budget: how many scores of each group to keep.
        group: the weights that compete with each other: a row, a matrix, or all targets.
        score_map: how signed scores of the user's own become non-negative; None: they must not be negative.
        relative: the criterion is given the norms relative to the layer's outputs.
        count_by: the scores whose effective number sets the counts: the criterion's own, or the magnitudes of the weights.

    Raises:
        ValueError: the budget does not support groups of this kind.
    """

    criterion_name: str
    budget: Budget
    group: Group = "row"
    score_map: ScoreMap | None = None
    relative: bool = False
    count_by: CountBy = "own"

    def __post_init__(self) -> None:
        if isinstance(self.budget, PatternBudget) and self.group != "row":
            raise ValueError(f"pattern N:M is a budget within rows: it needs group row, not {self.group}")
        if isinstance(self.budget, PartsBudget) and self.group == "all":
            raise ValueError("match-by matrix fixes the sparsity of every matrix: it needs group row or matrix, not all")
        if getattr(self.budget, "dtype", "float64") != "float64" and self.group != "row":
            raise ValueError(f"neff-dtype bfloat16 is the paper's arithmetic for rows: it needs group row, not {self.group}")
        if isinstance(self.budget, OwlBudget) and self.group == "all":
            raise ValueError("shares owl fixes the sparsity of every block: it needs group row or matrix, not all")
        if self.count_by == "magnitude":
            if not isinstance(self.budget, EffectiveBudget | RequestedBudget):
                raise ValueError("count-by magnitude is for counts by an effective number")
            if getattr(self.budget, "dtype", "float64") != "float64":
                raise ValueError("neff-dtype bfloat16 is the paper's arithmetic for the scores: it needs count-by own")

    @property
    def criterion(self) -> Criterion:
        return CRITERIA[self.criterion_name]
