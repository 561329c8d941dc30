"""Budgets: how many scores of each group are kept. A new budget is one class here.

A group is a row, a matrix, or all targets. A budget receives the moments of groups and, if a group is a row, its scores. It
also receives the number of target weights before the first group, so that it can spread a total evenly over all targets.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from emp_llm.selection.arithmetic.definitions import check_beta, check_order, floor_count
from emp_llm.selection.kernels.interface import KeepRule

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.selection.arithmetic.hill import Moments


class Budget(Protocol):
    """How many scores of each group are kept."""

    @property
    def order(self) -> float:
        """The Hill order of the moments that it needs."""

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> list[int] | None:
        """How many scores of each group are kept, if this does not depend on the scores; else None.

        Args:
            sizes: number of scores in each group.
            offset: number of target weights before the first group.

        Raises:
            ValueError: an N:M pattern whose M does not divide a size.
        """

    def counts(self, moments: "Moments", offset: int = 0, rows: "Tensor | None" = None) -> "Tensor":
        """How many scores of each group are kept: int64, shape (groups,).

        Args:
            moments: of the groups, at the budget's order.
            offset: number of target weights before the first group.
            rows: the scores, shape (groups, size), if a group is a row; None if it is larger.

        Raises:
            ValueError: as for `fixed_counts`; or bfloat16 arithmetic for groups larger than a row.
        """

    @property
    def has_kernel(self) -> bool:
        """Whether the compiled kernels implement the budget. They compute order 2 in float64."""

    def keep_rule(self, shape: Sequence[int], offset: int = 0) -> KeepRule:
        """The budget as a rule for the kernels, for rows that are a group each.

        Args:
            shape: (rows, columns) of the weights.
            offset: number of target weights before the first row.

        Raises:
            ValueError: an N:M pattern whose M does not divide the columns.
        """


class SizeBudget(ABC):
    """A budget that depends on the sizes and positions of the groups, and not on their scores."""

    order: float = 2.0

    @abstractmethod
    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> list[int]:
        """As `Budget.fixed_counts`; never None."""

    def counts(self, moments: "Moments", offset: int = 0, rows: "Tensor | None" = None) -> "Tensor":
        return moments.size.new_tensor(self.fixed_counts(moments.size.tolist(), offset))

    @property
    def has_kernel(self) -> bool:
        return self.order == 2.0

    def keep_rule(self, shape: Sequence[int], offset: int = 0) -> KeepRule:
        rows, columns = shape
        return KeepRule(counts=self.fixed_counts([columns] * rows, offset))


@dataclass(frozen=True)
class EffectiveBudget:
    """clip(floor(beta * N_eff), 1, N): the count of the paper's Algorithm 1.

    Attributes:
        beta: a finite number > 0.
        order: Hill order of N_eff, >= 0.
        dtype: "float64"; or "bfloat16", which rounds omega, its squares, their sum and N_eff to bfloat16, as in the published
            emp-magnitude results. This leaves only a handful of distinct counts.

    Raises:
        ValueError: a value is out of range, or bfloat16 is combined with an order other than 2.
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
            raise ValueError(f"neff-dtype bfloat16 is the paper's arithmetic for order 2: it needs order 2, not {self.order:g}")

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> None:
        return None

    def counts(self, moments: "Moments", offset: int = 0, rows: "Tensor | None" = None) -> "Tensor":
        from emp_llm.selection.arithmetic.counts import keep_counts

        if self.dtype == "float64":
            return keep_counts(moments, self.beta)
        if rows is None:
            raise ValueError("neff-dtype bfloat16 is the paper's arithmetic for rows: it needs group row")
        return _bfloat16_counts(rows, moments, self.beta)

    @property
    def has_kernel(self) -> bool:
        return self.order == 2.0 and self.dtype == "float64"

    def keep_rule(self, shape: Sequence[int], offset: int = 0) -> KeepRule:
        return KeepRule(beta=self.beta)


class UnsettledBudget:
    """A budget that needs the scores of all targets: another one takes its place before the first mask is decided."""

    order: float

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> None:
        return None

    def counts(self, moments: "Moments", offset: int = 0, rows: "Tensor | None" = None) -> "Tensor":
        raise ValueError("the budget is not settled yet")

    @property
    def has_kernel(self) -> bool:
        return self.order == 2.0

    def keep_rule(self, shape: Sequence[int], offset: int = 0) -> KeepRule:
        raise ValueError("the budget is not settled yet")


@dataclass(frozen=True)
class RequestedBudget(UnsettledBudget):
    """An `EffectiveBudget` whose beta is chosen so that a given share of all target weights is removed.

    It is settled before the first mask is decided, when the effective numbers of all groups are known.

    Attributes:
        sparsity: of all targets, at least 0 and below 1.
        order: Hill order of N_eff, >= 0.

    Raises:
        ValueError: a value is out of range.
    """

    sparsity: float
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, got {self.sparsity:g}")
        check_order(self.order)

    def kept_of(self, weights: int) -> int:
        """How many of all target weights are kept: all but floor(sparsity * weights)."""
        return weights - floor_count(self.sparsity * weights)


@dataclass(frozen=True)
class RatioBudget(SizeBudget):
    """The same sparsity in every group: floor(sparsity * N) scores are removed, as in Wanda.

    Attributes:
        sparsity: at least 0 and below 1.
    """

    sparsity: float
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, got {self.sparsity:g}")

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> list[int]:
        return [size - floor_count(self.sparsity * size) for size in sizes]

    def keep_rule(self, shape: Sequence[int], offset: int = 0) -> KeepRule:
        return KeepRule(counts=self.fixed_counts([shape[1]])[0])


@dataclass(frozen=True)
class PatternBudget(SizeBudget):
    """N:M: the N largest of every M consecutive inputs are kept (2:4, 4:8, any 1 <= N < M)."""

    n: int
    m: int
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m:
            raise ValueError(f"pattern N:M keeps N of every M weights, 1 <= N < M, got {self.n}:{self.m}")

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> list[int]:
        return [self.kept_of(size) for size in sizes]

    def kept_of(self, columns: int) -> int:
        """How many weights of a row are kept; raises ValueError if M does not divide the columns."""
        if columns % self.m:
            raise ValueError(f"{columns} inputs are not a multiple of {self.m} (pattern {self.n}:{self.m})")
        return columns // self.m * self.n

    def keep_rule(self, shape: Sequence[int], offset: int = 0) -> KeepRule:
        self.kept_of(shape[1])
        return KeepRule(pattern=(self.n, self.m))


@dataclass(frozen=True)
class TotalBudget(SizeBudget):
    """The same sparsity in every group, rounded so that exactly `removed` of `total` weights are removed.

    A group of the weights start to end - 1, counted over all targets, loses floor(end * removed / total) -
    floor(start * removed / total) of them. This is its share, rounded down or up; the roundings cancel in the sum.
    """

    removed: int
    total: int
    order: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.removed < self.total:
            raise ValueError(f"cannot remove {self.removed} of {self.total} weights")

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> list[int]:
        counts, before = [], offset * self.removed // self.total
        for size in sizes:
            offset += size
            after = offset * self.removed // self.total
            counts.append(size - (after - before))
            before = after
        return counts


@dataclass(frozen=True)
class PartsBudget(SizeBudget):
    """A `TotalBudget` for each of several consecutive parts: `removed[i]` of the `sizes[i]` weights of part i.

    The parts are the matrices of a run. Each loses as many weights as in an earlier run, spread evenly over its groups. No
    group spans two parts.
    """

    removed: tuple[int, ...]
    sizes: tuple[int, ...]
    order: float = 2.0

    def __post_init__(self) -> None:
        for name in ("removed", "sizes"):  # JSON gives lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for removed, size in zip(self.removed, self.sizes, strict=True):
            TotalBudget(removed, size)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    def fixed_counts(self, sizes: Sequence[int], offset: int = 0) -> list[int]:
        part = bisect_right(self._starts, offset) - 1
        return TotalBudget(self.removed[part], self.sizes[part]).fixed_counts(sizes, offset - self._starts[part])


def _bfloat16_counts(rows: "Tensor", moments: "Moments", beta: float) -> "Tensor":
    """clip(floor(beta * N_eff), 1, N) with omega, omega^2, their sum and N_eff rounded to bfloat16; N for a row of zeros."""
    import torch

    from emp_llm.selection.arithmetic.sums import sum_rows

    scores = rows.abs().bfloat16()
    total = sum_rows(scores, lambda s: s)[0].bfloat16()
    squares = (scores / total[:, None]).square()
    n_eff = sum_rows(squares, lambda s: s)[0].bfloat16().reciprocal().double()
    counts = torch.where(moments.total == 0, math.inf, torch.floor(beta * n_eff).clamp(min=1.0))
    return counts.minimum(moments.size.double()).long()
