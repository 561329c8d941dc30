"""The masks of a pruner's targets one by one, as its run applies them; and what a budget that ignores scores removes."""

from typing import TYPE_CHECKING

from emp_llm.models.architecture import Target
from emp_llm.pruning.pruner import Pruner
from emp_llm.selection.budgets import PatternBudget

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.selection.group_selection import GroupSelector


class KeptMasks:
    """The masks of a pruner's targets, by the norms in use.

    Args:
        pruner: with its norms and a settled budget.
    """

    def __init__(self, pruner: Pruner) -> None:
        self._pruner = pruner
        self._selector: GroupSelector | None = None  # of a group of all targets

    def of(self, target: Target) -> "Tensor":
        """The mask of a target. A weight whose bits are zero counts as removed.

        Returns:
            bool, shape (rows, columns), one output per row; true for kept weights.

        Raises:
            UserError: the target holds NaN or infinity; a file cannot be read.
        """
        import torch

        pruner, group = self._pruner, self._pruner.scheme.group
        mask = torch.empty((target.matrix.rows, target.matrix.columns), dtype=torch.bool)
        with pruner.checkpoint.open_files(again=True) as files:
            if group == "all" and self._selector is None:
                self._selector = pruner.search(pruner.targets, files)
            selector = pruner.search([target], files) if group == "matrix" else self._selector
            for block in pruner.pruned(target, files, selector):
                mask[block.first : block.first + block.words.shape[0]] = torch.from_numpy(block.words != 0)
                pruner.buffers.give(block.words)
        return mask

    def counts_of(self, target: Target) -> "Tensor":
        """How many weights of a target are kept: int64, of each row; of the whole matrix, shape (1,), if that is the group."""
        counts = self.of(target).sum(1)
        return counts.sum(0, keepdim=True) if self._pruner.scheme.group == "matrix" else counts


def removed_of(pruner: Pruner, target: Target) -> int:
    """The number of weights of a target that a fixed budget removes, the matrix being one group.

    Raises:
        ValueError: the budget depends on the scores.
    """
    size, budget = target.matrix.numel, pruner.budget
    if isinstance(budget, PatternBudget):
        return size - target.matrix.rows * budget.kept_of(target.matrix.columns)
    counts = budget.fixed_counts([size], pruner.offsets[target.name])
    if counts is None:
        raise ValueError("the budget depends on the scores")
    return size - counts[0]
