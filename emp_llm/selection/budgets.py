"""Budgets: how many of each group to keep. A new one is one class here.

A budget sees the moments of the groups (one row, one matrix or all targets each), never the weights, and where its first
weight stands among all targets, so that a total can be spread evenly.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from emp_llm.selection.effective import check_beta, floor, keep_counts
from emp_llm.selection.hill import Moments, check_order
from emp_llm.selection.sums import sum_rows


class Budget(Protocol):
    """How many scores of each group stay."""

    @property
    def order(self) -> float:
        """The Hill order whose moments it wants."""

    def counts(self, moments: Moments, offset: int = 0, rows: Tensor | None = None) -> Tensor:
        """How many scores to keep of each group.

        Args:
            moments: of the groups, at the budget's order.
            offset: how many target weights come before the first group.
            rows: the scores themselves, shape (groups, size), where a group is a row; None where it is larger.

        Returns:
            int64, shape (groups,).
        """


@dataclass(frozen=True)
class EffectiveBudget:
    """floor(beta * N_eff): the paper's Algorithm 1.

    Attributes:
        beta: > 0; order: Hill order >= 0.
        dtype: "float64", or "bfloat16": omega, its squares and their sum rounded to bfloat16, as the published
            emp-magnitude numbers were made. It leaves only a handful of distinct counts.
    """

    beta: float = 1.0
    order: float = 2.0
    dtype: str = "float64"

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_order(self.order)
        if self.dtype not in ("float64", "bfloat16"):
            raise ValueError(f"neff-dtype must be float64 or bfloat16, got {self.dtype}")
        if self.dtype == "bfloat16" and self.order != 2.0:
            raise ValueError(f"neff-dtype bfloat16 is the paper's arithmetic for order 2; it has no order {self.order:g}")

    def counts(self, moments: Moments, offset: int = 0, rows: Tensor | None = None) -> Tensor:
        if self.dtype == "float64":
            return keep_counts(moments, self.beta)
        if rows is None:
            raise ValueError("neff-dtype bfloat16 is the paper's arithmetic for rows; it goes with group row")
        return _bfloat16_counts(rows, moments, self.beta)


@dataclass(frozen=True)
class RatioBudget:
    """The same share of every group: floor(sparsity * N) are removed, as Wanda does."""

    sparsity: float
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, got {self.sparsity:g}")

    def counts(self, moments: Moments, offset: int = 0, rows: Tensor | None = None) -> Tensor:
        return moments.size - floor(self.sparsity * moments.size.double()).long()


@dataclass(frozen=True)
class PatternBudget:
    """N:M: the N largest of every M consecutive inputs stay (2:4, 4:8, any 1 <= N < M)."""

    n: int
    m: int
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m:
            raise ValueError(f"pattern N:M keeps N of every M weights, 1 <= N < M, got {self.n}:{self.m}")

    def counts(self, moments: Moments, offset: int = 0, rows: Tensor | None = None) -> Tensor:
        return torch.full_like(moments.size, self.n)

    def kept_of(self, columns: int) -> int:
        """How many of a row stay; raises ValueError where M does not divide it."""
        if columns % self.m:
            raise ValueError(f"{columns} inputs are not a multiple of {self.m} (pattern {self.n}:{self.m})")
        return columns // self.m * self.n


@dataclass(frozen=True)
class TotalBudget:
    """The same share of every group, and exactly `removed` of `total` weights in all.

    A group that holds the target weights a to b loses floor(b * removed / total) - floor(a * removed / total) of them: the
    share rounded down or up, so that the roundings add up to nothing.
    """

    removed: int
    total: int
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.removed < self.total:
            raise ValueError(f"cannot remove {self.removed} of {self.total} weights")

    def counts(self, moments: Moments, offset: int = 0, rows: Tensor | None = None) -> Tensor:
        sizes: list[int] = moments.size.tolist()
        counts, before = [], offset * self.removed // self.total
        for size in sizes:
            offset += size
            after = offset * self.removed // self.total
            counts.append(size - (after - before))
            before = after
        return torch.tensor(counts, dtype=torch.int64, device=moments.size.device)


@dataclass(frozen=True)
class PartsBudget:
    """A `TotalBudget` for each of several parts, one behind the other: `removed[i]` of the `sizes[i]` weights of part i.

    The parts are the matrices of a run, so that each loses what another run took from it, and only its rows are made equal.
    No group lies in two parts.
    """

    removed: tuple[int, ...]
    sizes: tuple[int, ...]
    order: float = 2.0

    def __post_init__(self) -> None:
        for name in ("removed", "sizes"):  # lists, where they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for removed, size in zip(self.removed, self.sizes, strict=True):
            TotalBudget(removed, size)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    def counts(self, moments: Moments, offset: int = 0, rows: Tensor | None = None) -> Tensor:
        part = bisect_right(self._starts, offset) - 1
        return TotalBudget(self.removed[part], self.sizes[part]).counts(moments, offset - self._starts[part])


def _bfloat16_counts(rows: Tensor, moments: Moments, beta: float) -> Tensor:
    """floor(beta / sum omega^2) with omega, omega^2, the sums and the quotient each rounded to bfloat16."""
    scores = rows.abs().bfloat16()
    total = sum_rows(scores, lambda s: s)[0].bfloat16()
    squares = (scores / total[:, None]).square()
    n_eff = sum_rows(squares, lambda s: s)[0].bfloat16().reciprocal().double()
    counts = torch.where(moments.total == 0, math.inf, torch.floor(beta * n_eff).clamp(min=1.0))
    return counts.minimum(moments.size.double()).long()
