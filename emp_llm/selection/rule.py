"""The rule for the number of scores that a group keeps, shared by all implementations; it imports
neither torch nor numpy.

Algorithm 1 keeps clip(floor(beta * N_eff), 1, N) scores of a group of N. `counts_at` is this line,
for numpy and for torch; the compiled kernel has its own copy.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LANES = 64  # element i of a row is added to lane i mod 64 (`reference.sum_rows`)
# A number within this relative distance of an integer counts as that integer. The tolerance is far
# above the rounding error of a float64 sum of 10^9 terms and far below any meaningful difference.
# So uniform scores give exactly N, whatever their common value.
RELATIVE_TOLERANCE = 2.0**-44

Group = Literal["row", "matrix", "all"]
GroupNumbers: TypeAlias = "tuple[NDArray[Any], NDArray[Any], int]"


class NonFiniteError(ValueError):
    """Scores hold NaN or infinity, so they have no effective number."""


class KeepRule(NamedTuple):
    """How many scores of each group to keep. One of the first three is given.

    Attributes:
        beta: keep clip(floor(beta * N_eff), 1, N) of a group of N, by the effective number of its
            scores.
        counts: keep this many: one number for all groups, or one for each.
        pattern: (N, M): keep N of every M consecutive scores of a row; M divides the columns.
        order: Hill order of N_eff.
        dtype: "float64"; or "bfloat16", which rounds omega, its squares, their sum and N_eff to
            bfloat16, as in the published emp-magnitude results. This leaves only a handful of
            distinct counts. Rows only, order 2 only.
    """

    beta: float | None = None
    counts: "int | Sequence[int] | NDArray[np.int64] | None" = None
    pattern: tuple[int, int] | None = None
    order: float = 2.0
    dtype: str = "float64"


class RowFigures(NamedTuple):
    """Figures of pruned rows, as arrays or tensors.

    Attributes:
        kept, zeros: int64, shape (rows,): how many scores are kept, and how many weights are now
            zero.
        kept_mass, mass: float64, shape (rows,): sum |s| over the kept scores, and over all.
        n_eff, s_eff: float64, shape (rows,): effective number, and the share of sum |s| that the
            floor(N_eff) largest hold; None where a group is larger than a row.
    """

    kept: Any
    zeros: Any
    kept_mass: Any
    mass: Any
    n_eff: Any
    s_eff: Any


def check_order(order: float) -> None:
    """Raise ValueError unless `order` is a Hill order: a number >= 0, or infinity."""
    if math.isnan(order) or order < 0:
        raise ValueError(f"order must be a number >= 0 (the paper uses 2), got {order:g}")


def check_beta(beta: float) -> None:
    """Raise ValueError unless beta is a positive finite number."""
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be a number above 0 (the paper uses 1), got {beta:g}")


def floor_count(value: float) -> int:
    """Floor of a number. A number below an integer by no more than rounding error counts as that
    integer.
    """
    return math.floor(value * (1 + RELATIVE_TOLERANCE))


def counts_at(n_eff: Any, total: Any, beta: float, size: Any) -> Any:
    """clip(floor(beta * N_eff), 1, N) of each group, and N for a group of zeros: step 3 of
    Algorithm 1.

    Args:
        n_eff: of each group, float64, an array or a tensor.
        total: sum |s| of each group, or any multiple of it above 0; the shape of `n_eff`.
        beta: a positive finite number.
        size: N, a number or one for each group.

    Returns:
        float64 integers, the type and shape of `n_eff`.
    """
    counts = (beta * n_eff * (1 + RELATIVE_TOLERANCE)).clip(1.0, size) // 1.0
    return counts + (size - counts) * (total == 0)


def row_counts(
    total: "NDArray[Any]", power: "NDArray[Any]", columns: int, rule: KeepRule
) -> "tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]":
    """N_eff of rows in float64, floor(N_eff), and how many scores of each row a compiled rule
    keeps.

    Args:
        total, power: sum s and sum s^2 of each row, float64.
        columns: N.

    Raises:
        NonFiniteError: a total is not finite.
    """
    import numpy as np

    if not np.isfinite(total).all():
        raise NonFiniteError("scores hold NaN or infinity")
    with np.errstate(divide="ignore", invalid="ignore"):
        number = np.where(total == 0, float(columns), total * total / power)
    nearest = np.rint(number)
    number = np.where(np.abs(number - nearest) <= RELATIVE_TOLERANCE * nearest, nearest, number)
    n_eff = np.clip(number, 1.0, float(columns))
    if rule.beta is not None:
        kept = counts_at(n_eff, total, rule.beta, columns)
    else:
        kept = np.asarray(
            rule.counts if rule.pattern is None else columns // rule.pattern[1] * rule.pattern[0]
        )
    counts = np.broadcast_to(kept, total.shape).astype(np.int64)
    return n_eff, counts_at(n_eff, total, 1.0, columns).astype(np.int64), counts


def mass_share(mass: "NDArray[Any]", total: "NDArray[Any]") -> "NDArray[Any]":
    """`mass` relative to `total`, at most 1; 1 for a row of zeros."""
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(total == 0, 1.0, mass / total)
    return np.minimum(share, 1.0)


def uniform_counts(sizes: "NDArray[np.int64]", sparsity: float) -> "NDArray[np.int64]":
    """How many scores stay if floor(sparsity * N) of each group of N are removed, as in Wanda:
    int64, the shape of `sizes`.
    """
    import numpy as np

    removed = {int(size): floor_count(sparsity * int(size)) for size in np.unique(sizes)}
    return sizes - np.array([removed[int(size)] for size in sizes], dtype=np.int64)


def spread_counts(
    sizes: "NDArray[np.int64]", removed: int, total: int, before: int = 0
) -> "NDArray[np.int64]":
    """How many scores stay if `removed` of `total` scores are removed, spread evenly over
    consecutive groups.

    A group of the scores start to end - 1 loses floor(end * removed / total) - floor(start *
    removed / total) of them. This is its share, rounded down or up; the roundings cancel in the
    sum.

    Args:
        sizes: number of scores of each group.
        before: number of scores, of the total, before the first group.

    Returns:
        int64, the shape of `sizes`.

    Raises:
        ValueError: all scores would be removed.
    """
    import numpy as np

    if not 0 <= removed < total:
        raise ValueError(f"cannot remove {removed} of {total} weights")
    # Python's integers: the products may exceed 64 bits.
    ends = [before, *(before + int(end) for end in sizes.cumsum())]
    gone = np.array([end * removed // total for end in ends], dtype=np.int64)
    return sizes - (gone[1:] - gone[:-1])


def beta_keeping(kept: int, groups: Sequence[GroupNumbers]) -> float:
    """The smallest beta at which the groups keep at least as many scores in total as asked for.

    The total grows with beta in steps of one, except where groups of equal N_eff step together.
    Then the nearer of the totals on both sides is chosen, the larger one if they are equally near.

    Args:
        kept: the total, at least the number of groups.
        groups: (n_eff, total, size) as for `counts_at`, at least one with a score above zero.

    Returns:
        A positive finite number.
    """
    # kept_at(low) < kept <= kept_at(high)
    low = 0.0
    high = 1.0
    while kept_at(groups, high) < kept:
        low = high
        high = 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if kept_at(groups, middle) >= kept else (middle, high)
    if low > 0 and kept_at(groups, high) - kept > kept - kept_at(groups, low):
        return low
    return high


def kept_at(groups: Sequence[GroupNumbers], beta: float) -> int:
    """How many scores all groups together keep; `groups` are (n_eff, total, size) as for
    `counts_at`.
    """
    return sum(int(counts_at(n_eff, total, beta, size).sum()) for n_eff, total, size in groups)


def mass_bound(
    n_eff: "NDArray[Any] | float", size: "NDArray[Any] | float"
) -> "NDArray[np.float64]":
    """`effective.effective_mass_bound` of numpy arrays: float64, their broadcast shape."""
    import numpy as np

    nu = np.floor(np.asarray(n_eff, dtype=np.float64) * (1 + RELATIVE_TOLERANCE))
    n = np.asarray(size, dtype=np.float64)
    inner = np.maximum(n - nu - 1, 0) / ((nu + 1) * np.maximum(n - 1, 1))
    bound = nu / n + (n - nu) / n * np.sqrt(inner)
    bound = np.where(nu <= 1, 0.5, bound)
    return np.where(nu >= n, 1.0, bound)
