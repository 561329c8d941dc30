"""The rule that a kernel takes, and the figures that it returns, for a block of rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class KeepRule(NamedTuple):
    """How many weights of each row to keep. Exactly one of the three is given.

    Attributes:
        beta: keep floor(beta * N_eff) of a row, with N_eff of order 2.
        counts: keep this many, one number for all rows or one for each.
        pattern: (N, M): keep N of every M consecutive weights; M divides the columns.
    """

    beta: float | None = None
    counts: int | Sequence[int] | None = None
    pattern: tuple[int, int] | None = None


class RowFigures(NamedTuple):
    """Figures of the rows of a pruned block, as arrays (from `cpu`) or tensors (from `cuda`).

    Attributes:
        kept, zeros: int64, shape (rows,): how many scores are kept, and how many weights are now zero.
        kept_mass, mass: float64, shape (rows,): sum |s| over the kept scores, and over all.
        n_eff, s_eff: float64, shape (rows,): effective number, and the share of sum |s| that the floor(N_eff) largest
            hold; None where a group is larger than a row.
    """

    kept: Any
    zeros: Any
    kept_mass: Any
    mass: Any
    n_eff: Any
    s_eff: Any
