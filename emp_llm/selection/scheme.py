"""A scheme puts the parts together: a criterion scores, a budget counts, a mask keeps; for rows, and for larger groups.

Rows are decided block by block. A matrix, or all targets together, are one group too large to hold, so a `GroupSelector` is
fed the scores in rounds (sums first, then the bits of the cut) and then gives the masks.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from emp_llm.selection.budgets import Budget, PartsBudget, PatternBudget
from emp_llm.selection.criteria import CRITERIA, Criterion
from emp_llm.selection.effective import keep_counts
from emp_llm.selection.hill import Moments
from emp_llm.selection.kernels.rows import Pruned, apply, prune_rows
from emp_llm.selection.masks import RadixSelect, Threshold, keep_mask, key_values, order_keys
from emp_llm.selection.rows import Selection
from emp_llm.selection.sums import sum_rows, sum_vector

Group = Literal["row", "matrix", "all"]


@dataclass(frozen=True)
class Scheme:
    """What decides a mask: the name of a criterion, a budget, and what competes for places."""

    criterion_name: str
    budget: Budget
    group: Group = "row"

    def __post_init__(self) -> None:
        if isinstance(self.budget, PatternBudget) and self.group != "row":
            raise ValueError(f"pattern N:M is a budget within rows; it goes with group row, not {self.group}")
        if isinstance(self.budget, PartsBudget) and self.group == "all":
            raise ValueError("match-by matrix fixes what every matrix loses; it goes with group row or matrix, not all")
        if getattr(self.budget, "dtype", "float64") != "float64" and self.group != "row":
            raise ValueError(
                f"neff-dtype bfloat16 is the paper's arithmetic for rows; it goes with group row, not {self.group}"
            )

    @property
    def criterion(self) -> Criterion:
        return CRITERIA[self.criterion_name]

    def prune_rows(self, weight: Tensor, norms: Tensor | None, offset: int = 0) -> Pruned:
        """Prune a block of rows in place, each row a group of its own; as `kernels.rows.prune_rows`."""
        return prune_rows(weight, self.criterion_name, norms, self.budget, offset)


class GroupSelector:
    """One group larger than a block of rows; the caller feeds the same blocks of scores in the same order each time.

    for block in blocks: selector.add(block)
    while selector.searching():
        for block in blocks: selector.search(block)
    for block in blocks: selector.select(block).mask
    """

    def __init__(self, budget: Budget, offset: int = 0) -> None:
        self._budget = budget
        self._offset = offset
        self._parts: list[Moments] = []
        self._moments: Moments | None = None
        self._selects: dict[int, RadixSelect] = {}
        self._fed = False
        self._key_bytes = 0
        self._above_nu: list[Tensor] = []
        self._kept_ties = 0

    def add(self, scores: Tensor) -> None:
        """First round: the sums. `scores` as for `select_rows`."""
        self._key_bytes = scores.element_size()
        self._parts.append(Moments.of_rows(scores, self._budget.order))

    @property
    def moments(self) -> Moments:
        """The moments of the whole group, once all is added."""
        if self._moments is None:
            self._moments = Moments.merge(self._parts)
            self._parts.clear()
        return self._moments

    @property
    def count(self) -> int:
        """How many the group keeps."""
        return int(self._budget.counts(self.moments, self._offset)[0])

    @property
    def nu(self) -> int:
        """floor(N_eff) of the group."""
        return int(keep_counts(self.moments)[0])

    def searching(self) -> bool:
        """Whether another round of `search` is needed."""
        if not self._selects:
            self._selects = {k: RadixSelect(k, self._key_bytes) for k in {self.count, self.nu}}
        elif self._fed:
            for select in self._selects.values():
                select.end_round()
        self._fed = False
        return any(select.rounds_left for select in self._selects.values())

    def search(self, scores: Tensor) -> None:
        """One round of the search for the cut."""
        self._fed = True
        keys = order_keys(scores)
        for select in self._selects.values():
            select.feed(keys)

    def select(self, scores: Tensor) -> Selection:
        """Last round, in order: the masks. Ties are spent from the first index on."""
        keys = order_keys(scores)
        cut = self._cut(self.count, scores.device)
        left = int(cut.ties) - self._kept_ties
        mask = keep_mask(keys.reshape(1, -1), replace(cut, ties=torch.full_like(cut.ties, left))).reshape(keys.shape)
        self._kept_ties += int((mask & (keys == cut.key)).sum())
        at_nu = key_values(self._cut(self.nu, scores.device).key, scores.dtype)
        self._above_nu += sum_rows(scores, lambda s: torch.where(s > at_nu, s, 0.0))
        kept_mass, mass = sum_rows(torch.where(mask, scores, 0), lambda s: s) + sum_rows(scores, lambda s: s)
        return Selection(mask, mask.sum(1), kept_mass, mass)

    def prune(self, weight: Tensor, scores: Tensor) -> Pruned:
        """`select` the weights of these scores, and set the others to zero in place."""
        return apply(weight, self.select(scores))

    def effective_mass(self, dtype: torch.dtype) -> float:
        """s_eff of the whole group, once all is selected; `dtype`: that of the scores."""
        total = float(self.moments.mass)
        cut = self._cut(self.nu, torch.device("cpu"))
        at_nu = float(key_values(cut.key, dtype))
        above = float(sum_vector(torch.cat(self._above_nu)))
        return min(1.0, (above + int(cut.ties) * at_nu) / total) if total else 1.0

    def _cut(self, count: int, device: torch.device) -> Threshold:
        cut = self._selects[count].threshold()
        return Threshold(cut.key.to(device), cut.above.to(device), cut.ties.to(device))
