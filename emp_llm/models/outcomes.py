"""What became of the targets of a run: counts and sums of every row, filled in while blocks of rows are decided."""

from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.models.journal import STATISTICS
from emp_llm.models.targets import Target
from emp_llm.selection.kernels.rows import Pruned


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
