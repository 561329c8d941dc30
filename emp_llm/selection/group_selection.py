"""Selection from one group larger than a row: a matrix, or all targets together.

The scores of such a group may not fit in memory, so the caller feeds them block by block, in several rounds: one for the sums,
up to four for the cut, and one for the masks.
"""

from array import array
from dataclasses import replace

import torch
from torch import Tensor

from emp_llm.selection.arithmetic.counts import keep_counts
from emp_llm.selection.arithmetic.hill import CollectedMoments, Moments
from emp_llm.selection.arithmetic.masks import RadixSelect, Threshold, keep_mask, key_values, masked_scores, order_keys
from emp_llm.selection.arithmetic.sums import sum_rows, sum_vector
from emp_llm.selection.budgets import Budget
from emp_llm.selection.row_selection import Selection


class GroupSelector:
    """Selects from one group. The caller feeds the same blocks of scores in the same order in each round.

    for block in blocks: selector.add(block)
    while selector.searching():
        for block in blocks: selector.search(block)
    for block in blocks: selector.select(block).mask

    Args:
        budget: how many scores of the group to keep.
        offset: number of target weights before the group.
    """

    def __init__(self, budget: Budget, offset: int = 0) -> None:
        self._budget = budget
        self._offset = offset
        self._parts = CollectedMoments()
        self._moments: Moments | None = None
        self._selects: dict[int, RadixSelect] = {}
        self._fed = False
        self._key_bytes = 0
        self._above_nu = array("d")
        self._kept_ties = 0

    def add(self, scores: Tensor) -> None:
        """First round: the sums. `scores` as for `select_rows`."""
        self._key_bytes = scores.element_size()
        self._parts.add(Moments.of_rows(scores, self._budget.order))

    @property
    def moments(self) -> Moments:
        """The moments of the whole group, after the first round."""
        if self._moments is None:
            self._moments = self._parts.merged()
        return self._moments

    @property
    def count(self) -> int:
        """How many scores of the group are kept."""
        return int(self._budget.counts(self.moments, self._offset)[0])

    @property
    def nu(self) -> int:
        """floor(N_eff) of the group."""
        return int(keep_counts(self.moments)[0])

    def searching(self) -> bool:
        """End the current round of the search for the cut; returns whether another round is needed."""
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
        """Last round: the mask of a block. Of the scores at the cut, those with the lowest index in the group are kept."""
        keys = order_keys(scores)
        cut = self._cut(self.count, scores.device)
        ties_left = int(cut.ties) - self._kept_ties
        mask = keep_mask(keys.reshape(1, -1), replace(cut, ties=torch.full_like(cut.ties, ties_left))).reshape(keys.shape)
        self._kept_ties += int((mask & (keys == cut.key)).sum())
        above_nu = keys > self._cut(self.nu, scores.device).key
        parts = (masked_scores(keys, above_nu, scores.dtype), masked_scores(keys, mask, scores.dtype), scores)
        mass_above_nu, kept_mass, mass = (sum_rows(part, lambda s: s)[0] for part in parts)
        self._above_nu.extend(mass_above_nu.tolist())
        return Selection(mask, mask.sum(1), kept_mass, mass)

    def effective_mass(self, dtype: torch.dtype) -> float:
        """s_eff of the whole group, after the last round; `dtype` is that of the scores."""
        total = float(self.moments.mass)
        cut = self._cut(self.nu, torch.device("cpu"))
        at_nu = float(key_values(cut.key, dtype))
        above = float(sum_vector(torch.frombuffer(self._above_nu, dtype=torch.float64)))
        return min(1.0, (above + int(cut.ties) * at_nu) / total) if total else 1.0

    def _cut(self, count: int, device: torch.device) -> Threshold:
        cut = self._selects[count].threshold()
        return Threshold(cut.key.to(device), cut.ties.to(device))
