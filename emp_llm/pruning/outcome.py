"""The outcome of a run for its targets: counts and sums of every row, collected block by block."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from emp_llm.models.architecture import Target
from emp_llm.selection.budgets import PatternBudget
from emp_llm.selection.kernels.interface import RowFigures
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.buffers import Block
from emp_llm.storage.output.journal import STATISTICS

ALL_KEPT = "all kept"


@dataclass(frozen=True)
class Outcome:
    """The outcome for one target.

    Attributes:
        target: the matrix.
        kept: numbers of kept weights, int64, shape (rows,).
        kept_mass, mass: float64, shape (rows,): sums of the kept scores and of all scores.
        n_eff, s_eff: float64, shape (rows,), or (1,) for a matrix as one group; None if the group is larger.
        zeros: number of weights that are zero after pruning.
    """

    target: Target
    kept: Block
    kept_mass: Block
    mass: Block
    n_eff: Block | None
    s_eff: Block | None
    zeros: int

    @property
    def kept_fraction(self) -> Block:
        """Share of kept weights, float64, shape (rows,)."""
        return self.kept / np.float64(self.target.matrix.columns)


class RowStatistics:
    """The statistics of one target's rows, filled in block by block.

    Args:
        rows: their number.
        done: the statistics of the first rows, saved by an earlier run.

    Attributes:
        columns: float64, shape (rows,), by the names of STATISTICS.
    """

    def __init__(self, rows: int, done: Mapping[str, Block] | None = None) -> None:
        # Allocated at once: small arrays allocated between large blocks would keep the heap from shrinking.
        self.columns = {name: np.zeros(rows) for name in STATISTICS}
        for name, values in (done or {}).items():
            self.columns[name][: len(values)] = values

    def put(self, first: int, figures: RowFigures) -> None:
        """Store the figures of a block of rows; figures that are None stay zero."""
        for name, values in self.columns.items():
            figure = getattr(figures, name)
            if figure is not None:
                values[first : first + len(figure)] = figure

    def outcome(self, target: Target, n_eff: Block | None, s_eff: Block | None) -> Outcome:
        """The target's outcome, when all blocks are stored."""
        columns = self.columns
        zeros = int(columns["zeros"].sum())
        kept = columns["kept"].astype(np.int64)
        return Outcome(target, kept, columns["kept_mass"], columns["mass"], n_eff, s_eff, zeros)


def masks_digest(outcomes: list[Outcome], scheme: Scheme, fallback: Mapping[str, int]) -> str:
    """A hash of the masks of some targets; for the same weights and norms, equal masks have equal hashes.

    It covers the ranking of the scores and the number of kept weights in every row, which determine the masks. ALL_KEPT if
    no weight is removed.
    """
    if all(bool((outcome.kept == outcome.target.matrix.columns).all()) for outcome in outcomes):
        return ALL_KEPT
    pattern = asdict(scheme.budget) if isinstance(scheme.budget, PatternBudget) else None
    score = "wanda" if scheme.criterion.relative else scheme.criterion_name  # two names of one score
    score += " relative" if scheme.relative else ""
    digest = hashlib.sha256(f"{score} {scheme.group} {pattern} {sorted(fallback)}\n".encode())
    for outcome in outcomes:
        digest.update(f"{outcome.target.name}\n".encode() + outcome.kept.tobytes())
    return digest.hexdigest()
