"""The choice of heads and neurons: Algorithm 1, or a fixed share, with the budgets of the weights.

The rule decides how many units stay. Where they are set to zero, this is exact. Where they are removed, all layers get one
width, because config.json has one number for all: the mean of the rule's counts, rounded up to a multiple; each layer keeps its
best.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from emp_llm.common.errors import UserError
from emp_llm.selection.arithmetic.hill import Moments
from emp_llm.selection.arithmetic.masks import largest_mask
from emp_llm.selection.arithmetic.number_counts import beta_keeping
from emp_llm.selection.budgets import Budget, EffectiveBudget, RequestedBudget
from emp_llm.selection.effective import effective_mass, effective_mass_bound
from emp_llm.structure.scores import Scores
from emp_llm.structure.units import Indices, UnitKind, Units

logger = logging.getLogger(__name__)
Budgets = Callable[[UnitKind, str], Budget]


@dataclass(frozen=True, eq=False)
class Choice:
    """The kept units of one attention, MLP or expert.

    Attributes:
        units, scores: of the dense model.
        count: the rule's; `kept` may be more where all layers get one width.
        kept: numbers of the kept units, ascending.
        n_eff, s_eff, bound: effective number, effective mass and its lower bound (order 2 only) of the scores.
        n_eff_together: effective number of the scores of all layers, if they are one group; else None.
    """

    units: Units
    scores: Scores
    count: int
    kept: Indices
    n_eff: float
    s_eff: float
    bound: float | None
    n_eff_together: float | None

    @property
    def removes(self) -> bool:
        return len(self.kept) < len(self.units)

    @property
    def columns(self) -> torch.Tensor:
        """Whether each input of the output layer stays: bool, shape (inputs,)."""
        stays = torch.ones(self.units.columns.max() + 1, dtype=torch.bool)
        stays[torch.from_numpy(np.delete(self.units.columns, self.kept, 0).ravel())] = False
        return stays


def choose_units(
    every: Sequence[Units],
    scores: Sequence[Scores],
    budgets: Budgets,
    together: bool,
    multiple: int | None,
    width_by_block: bool = False,
) -> tuple[list[Choice], list[Budget]]:
    """Decide which units stay.

    Args:
        every, scores: the units and their scores.
        budgets: returns how many to keep of the units of a kind and a role (`Units.role`).
        together: all units of a role are one group; else those of each layer are.
        multiple: removed units leave one width, and the number of neurons is rounded up to a multiple of this. None: any number
            of units may stay in each layer.
        width_by_block: each layer has a width of its own.

    Returns:
        The choices, in order; and the budgets, with the beta that a requested sparsity stands for.

    Raises:
        UserError: a requested sparsity would leave a layer without units.
    """
    choices: dict[int, Choice] = {}
    used: list[Budget] = []
    by_role: dict[tuple[UnitKind, str], list[int]] = {}
    for number, units in enumerate(every):
        by_role.setdefault((units.kind, units.role), []).append(number)
    for (kind, role), members in by_role.items():
        rows = [torch.from_numpy(scores[number])[None] for number in members]
        groups = [torch.cat(rows, 1)] if together else rows
        budget = budgets(kind, role)
        moments = [Moments.of_rows(group, budget.order) for group in groups]
        budget = _with_beta(budget, moments)
        used.append(budget)
        masks, offset = [], 0
        for group, each in zip(groups, moments, strict=True):
            masks.append(largest_mask(group, budget.counts(each, offset))[0])
            offset += group.shape[1]
        if together:
            masks = list(torch.split(masks[0], [row.shape[1] for row in rows]))
        counts = [int(mask.sum()) for mask in masks]
        mean = -(-sum(counts) // len(counts))
        for number, row, mask, count in zip(members, rows, masks, counts, strict=True):
            if multiple is not None:
                mask = _widened(every[number], row, count if width_by_block else mean, multiple)
            n_eff = float(Moments.of_rows(row, budget.order).number()[0])
            choices[number] = Choice(
                units=every[number],
                scores=row[0].numpy(),
                count=count,
                kept=np.flatnonzero(mask.numpy()),
                n_eff=n_eff,
                s_eff=float(effective_mass(row, order=budget.order)[0]),
                bound=float(effective_mass_bound(n_eff, row.shape[1])) if budget.order == 2.0 else None,
                n_eff_together=float(moments[0].number()[0]) if together else None,
            )
    return [choices[number] for number in range(len(every))], used


def _with_beta(budget: Budget, moments: list[Moments]) -> Budget:
    """The budget, with a requested sparsity replaced by the beta that removes as many units."""
    if not isinstance(budget, RequestedBudget):
        return budget
    total = sum(int(each.size.sum()) for each in moments)
    kept = budget.kept_of(total)
    if kept < len(moments):
        raise UserError(f"--sparsity {budget.sparsity:g}: every layer keeps at least one unit. Lower it.")
    numbers = [(each.number().numpy(), each.total.numpy(), int(each.size[0])) for each in moments]
    beta = beta_keeping(kept, numbers)
    logger.info("sparsity %g is that of beta %.6g.", budget.sparsity, beta)
    return EffectiveBudget(beta, budget.order)


def _widened(units: Units, row: torch.Tensor, size: int, multiple: int) -> torch.Tensor:
    """The mask of the best units: a multiple of them, and of heads as many in every place."""
    places = np.unique(units.places)
    each = min(len(units), -(-size // multiple) * multiple) if units.kind == "neurons" else -(-size // len(places))
    mask = torch.zeros(len(units), dtype=torch.bool)
    for place in places:
        members = torch.from_numpy(np.flatnonzero(units.places == place))
        mask[members] = largest_mask(row[:, members], torch.tensor([min(each, len(members))]))[0]
    return mask
