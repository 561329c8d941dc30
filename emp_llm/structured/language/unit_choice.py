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
from emp_llm.selection.budgets import Budget, EffectiveBudget, RequestedBudget
from emp_llm.selection.effective import effective_mass, effective_mass_bound
from emp_llm.selection.reference import Moments, largest_mask
from emp_llm.selection.rule import beta_keeping
from emp_llm.structured.language.unit_scores import Scores
from emp_llm.structured.language.units import Indices, UnitKind, Units

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


@dataclass(frozen=True)
class Widths:
    """How removed units must leave the layers.

    Attributes:
        multiple: the number of neurons is rounded up to a multiple of this.
        by_layer: each layer has a width of its own.
    """

    multiple: int
    by_layer: bool = False


def choose_units(
    every: Sequence[Units], scores: Sequence[Scores], budgets: Budgets, together: bool, widths: Widths | None
) -> tuple[list[Choice], list[Budget]]:
    """Decide which units stay.

    Args:
        every, scores: the units and their scores.
        budgets: returns how many to keep of the units of a kind and a role (`Units.role`).
        together: all units of a role are one group; else those of each layer are.
        widths: None: any number of units may stay in each layer.

    Returns:
        The choices, in order; and the budgets, with the beta that a requested sparsity stands for.

    Raises:
        UserError: a requested sparsity would leave a layer without units.
    """
    choices: dict[int, Choice] = {}
    used: list[Budget] = []
    for (kind, role), members in _roles(every).items():
        budget = budgets(kind, role)
        rows = [torch.from_numpy(scores[number])[None] for number in members]
        groups = [torch.cat(rows, 1)] if together else rows
        moments = [Moments.of_rows(group, budget.order) for group in groups]
        settled = _settled(budget, moments)
        used.append(settled)
        masks = _exact(groups, moments, settled, together, [row.shape[1] for row in rows])
        counts = [int(mask.sum()) for mask in masks]
        all_n_eff = float(moments[0].number()[0]) if together else None
        if widths is not None:
            masks = _even([every[number] for number in members], rows, counts, widths)
        for number, row, mask, count in zip(members, rows, masks, counts, strict=True):
            choices[number] = _choice(every[number], row, mask, count, budget.order, all_n_eff)
    return [choices[number] for number in range(len(every))], used


def _roles(every: Sequence[Units]) -> dict[tuple[UnitKind, str], list[int]]:
    """The numbers of the units of each kind and role."""
    by_role: dict[tuple[UnitKind, str], list[int]] = {}
    for number, units in enumerate(every):
        by_role.setdefault((units.kind, units.role), []).append(number)
    return by_role


def _settled(budget: Budget, moments: list[Moments]) -> Budget:
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


def _exact(
    groups: list[torch.Tensor], moments: list[Moments], budget: Budget, together: bool, sizes: list[int]
) -> list[torch.Tensor]:
    """The mask of each layer: the k largest scores of each group."""
    masks, offset = [], 0
    for group, each in zip(groups, moments, strict=True):
        masks.append(largest_mask(group, budget.counts(each, offset))[0])
        offset += group.shape[1]
    return list(torch.split(masks[0], sizes)) if together else masks


def _even(every: list[Units], rows: list[torch.Tensor], counts: list[int], widths: Widths) -> list[torch.Tensor]:
    """The masks with one width for all layers, or with a width for each that is a multiple."""
    mean = -(-sum(counts) // len(counts))
    masks = []
    for units, row, count in zip(every, rows, counts, strict=True):
        places = len(np.unique(units.places))
        size = count if widths.by_layer else mean
        if units.kind == "neurons":
            size = min(len(units), _up(size, widths.multiple))
            masks.append(largest_mask(row, torch.tensor([size]))[0])
        else:
            masks.append(_within(units.places, row[0], min(len(units), _up(size, places)) // places))
    return masks


def _within(places: Indices, row: torch.Tensor, each: int) -> torch.Tensor:
    """The `each` best units of every place; of all units if there is one place."""
    mask = torch.zeros(len(row), dtype=torch.bool)
    for place in np.unique(places):
        members = torch.from_numpy(np.flatnonzero(places == place))
        mask[members] = largest_mask(row[None, members], torch.tensor([each]))[0]
    return mask


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _choice(units: Units, row: torch.Tensor, mask: torch.Tensor, count: int, order: float, together: float | None) -> Choice:
    n_eff = float(Moments.of_rows(row, order).number()[0])
    bound = float(effective_mass_bound(n_eff, row.shape[1])) if order == 2.0 else None
    mass = float(effective_mass(row, order=order)[0])
    return Choice(units, row[0].numpy(), count, np.flatnonzero(mask.numpy()), n_eff, mass, bound, together)
