"""What became of the targets of a run: counts and sums of every row, filled in while blocks of rows are decided."""

import hashlib
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from emp_llm.models.journal import STATISTICS
from emp_llm.models.targets import Target
from emp_llm.selection.budgets import PatternBudget
from emp_llm.selection.kernels.rows import Pruned
from emp_llm.selection.scheme import Scheme

ALL_KEPT = "all kept"


@dataclass(frozen=True)
class Outcome:
    """What became of one target.

    Attributes:
        target: the matrix.
        kept: int64, shape (rows,).
        kept_mass, mass: float64, shape (rows,): sums of scores, of the kept and of all.
        n_eff, s_eff: float64, shape (rows,), or (1,) for the matrix as one group; None where the group is larger.
        zeros: how many of its weights are zero now.
    """

    target: Target
    kept: Tensor
    kept_mass: Tensor
    mass: Tensor
    n_eff: Tensor | None
    s_eff: Tensor | None
    zeros: int

    @property
    def kept_fraction(self) -> Tensor:
        """float64, shape (rows,)."""
        return self.kept.double() / self.target.matrix.columns


class Rows:
    """What became of the rows of one target, filled in block by block.

    Args:
        rows: how many there are.
        done: of the first of them, as they were noted.

    Attributes:
        columns: float64, shape (rows,), by the names of STATISTICS.
    """

    def __init__(self, rows: int, done: dict[str, Tensor] | None = None) -> None:
        # Filled in place: small tensors that outlive a block, made between its large ones, would keep the heap from shrinking.
        self.columns = {name: torch.zeros(rows, dtype=torch.float64) for name in STATISTICS}
        for name, values in (done or {}).items():
            self.columns[name][: len(values)] = values

    def put(self, first: int, part: Pruned) -> None:
        """Note what became of a block of rows; what it does not tell stays zero."""
        for name, values in self.columns.items():
            found = getattr(part, name)
            if found is not None:
                values[first : first + len(found)] = found

    def outcome(self, target: Target, n_eff: Tensor | None, s_eff: Tensor | None) -> Outcome:
        """All of it, once all is put."""
        columns = self.columns
        zeros = int(columns["zeros"].sum())
        return Outcome(target, columns["kept"].long(), columns["kept_mass"], columns["mass"], n_eff, s_eff, zeros)


def masks_digest(outcomes: list[Outcome], scheme: Scheme, fallback: dict[str, int]) -> str:
    """A hash of the masks of some targets: equal ones are of equal masks, for the same weights and norms.

    It is of what the masks follow from, the ranking of the scores and how many stay of every row. ALL_KEPT: nothing is removed.
    """
    if all(bool((outcome.kept == outcome.target.matrix.columns).all()) for outcome in outcomes):
        return ALL_KEPT
    pattern = asdict(scheme.budget) if isinstance(scheme.budget, PatternBudget) else None
    digest = hashlib.sha256(f"{scheme.criterion_name} {scheme.group} {pattern} {sorted(fallback)}\n".encode())
    for outcome in outcomes:
        digest.update(f"{outcome.target.name}\n".encode() + outcome.kept.contiguous().numpy().tobytes())
    return digest.hexdigest()
