"""The outcome of a run for its targets: counts and sums of every row, collected chunk by chunk."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emp_llm.models.architecture import Target
from emp_llm.options.recipe import Recipe
from emp_llm.selection.rule import RowFigures

ALL_KEPT = "all kept"


@dataclass(frozen=True)
class Outcome:
    """The outcome for one target.

    Attributes:
        target: the matrix.
        kept: numbers of kept weights, int64, shape (rows,).
        kept_mass, mass: float64, shape (rows,): sums of the kept scores and of all scores.
        n_eff, s_eff: float64, shape (rows,), or (1,) for a matrix as one group; None if the group
            is larger.
        zeros: number of weights that are zero after pruning.
    """

    target: Target
    kept: NDArray[Any]
    kept_mass: NDArray[Any]
    mass: NDArray[Any]
    n_eff: NDArray[Any] | None
    s_eff: NDArray[Any] | None
    zeros: int


class Outcomes(NamedTuple):
    """The outcomes for all targets, in their order; `whole`: N_eff and s_eff of all targets, if
    they are one group.
    """

    of_targets: list[Outcome]
    whole: tuple[float, float] | None


def no_figures(rows: int) -> RowFigures:
    """The figures of one target's rows, to be filled in chunk by chunk: float64, zeros so far."""
    # Allocated at once: small arrays allocated between large chunks would keep the heap from
    # shrinking.
    return RowFigures(*np.zeros((len(RowFigures._fields), rows)))


def put_figures(rows: RowFigures, first: int, chunk: RowFigures) -> None:
    """Store the figures of a chunk of rows, `first` being its first row; figures that are None
    stay zero.
    """
    for figures, values in zip(rows, chunk, strict=True):
        if values is not None:
            figures[first : first + len(values)] = values


def masks_digest(outcomes: Outcomes, recipe: Recipe, fallback: Mapping[str, int]) -> str:
    """A hash of the pruned values of some targets; for the same weights, norms and text, equal
    values have equal hashes.

    It covers the ranking of the scores and the number of kept weights in every row, which determine
    the masks; and the update of the weights that stay. ALL_KEPT if no weight is removed or moved.
    """
    if recipe.update is None and all(
        bool((outcome.kept == outcome.target.matrix.columns).all())
        for outcome in outcomes.of_targets
    ):
        return ALL_KEPT
    score = f"{recipe.score.criterion.name}{' relative' if recipe.score.relative else ''}"
    digest = hashlib.sha256(f"{score} {recipe.group} {recipe.n_of_m} {sorted(fallback)}\n".encode())
    if recipe.update is not None:
        digest.update(f"{recipe.update}\n".encode())
    for outcome in outcomes.of_targets:
        digest.update(f"{outcome.target.name}\n".encode() + outcome.kept.tobytes())
    return digest.hexdigest()
