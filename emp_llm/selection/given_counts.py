"""Counts of kept scores that are settled before the masks, from effective numbers of other scores than those that decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emp_llm.selection.arithmetic.number_counts import GroupNumbers, counts_at
from emp_llm.selection.budgets import SizeBudget


@dataclass(frozen=True, eq=False)
class GivenCounts(SizeBudget):
    """clip(floor(beta * N_eff), 1, N) for each group, with the effective numbers of other scores, such as the magnitudes.

    Attributes:
        groups: (N_eff, sum |s|, size) as for `counts_at`, for consecutive groups of all target weights.
        beta: a positive finite number.
        order: Hill order of the effective numbers.
    """

    groups: Sequence[GroupNumbers]
    beta: float = 1.0
    order: float = 2.0

    def kept_at(self, beta: float) -> int:
        """How many scores of all groups are kept at another beta."""
        return sum(int(counts_at(n_eff, total, beta, size).sum()) for n_eff, total, size in self.groups)

    def numbers(self, groups: int, offset: int = 0) -> NDArray[np.float64]:
        """N_eff of consecutive groups, float64, shape (groups,); `offset` is the number of target weights before the first."""
        first = self._first(offset)
        return self._numbers[first : first + groups]

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> list[int]:
        first = self._first(offset)
        kept: list[int] = self._kept[first : first + len(sizes)].tolist()
        return kept

    def _first(self, offset: int) -> int:
        """The group that begins after so many target weights."""
        return int(np.searchsorted(self._starts, offset))

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        sizes: NDArray[np.int64] = np.concatenate([np.full(n_eff.size, size, np.int64) for n_eff, _, size in self.groups])
        ends: NDArray[np.int64] = sizes.cumsum()
        return ends - sizes

    @cached_property
    def _numbers(self) -> NDArray[np.float64]:
        return np.concatenate([n_eff for n_eff, _, _ in self.groups])

    @cached_property
    def _kept(self) -> NDArray[np.int64]:
        return np.concatenate([counts_at(n_eff, total, self.beta, size) for n_eff, total, size in self.groups])
