"""The rule on the units of a model: Algorithm 1 or a fixed share, within each group of units or among all of them."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from emp_llm.common.errors import UserError
from emp_llm.selection.rule import NonFiniteError
from emp_llm.selection.rule import mass_bound
from emp_llm.selection.budgets import Budget, EffectiveBudget, RatioBudget
from emp_llm.selection.reference import Selection, select_rows

UnitScope = Literal["layer", "all"]


@dataclass(frozen=True)
class UnitNumbers:
    """The numbers of the units that compete with each other.

    Attributes:
        size: number of units.
        n_eff: their effective number, not floored.
        s_eff: the share of the scores that the floor(n_eff) largest hold.
        s_eff_bound: the least share that theorem 4.2 allows; None for other orders than 2.
    """

    size: int
    n_eff: float
    s_eff: float
    s_eff_bound: float | None


def unit_budget(beta: float | None, order: float | None, sparsity: float | None) -> Budget:
    """The budget of the options: clip(floor(beta * N_eff), 1, N) units, or a fixed share of them.

    Raises:
        UserError: a value is out of range, or `sparsity` is given with `beta` or `order`.
    """
    if sparsity is not None and (beta is not None or order is not None):
        raise UserError("sparsity fixes the share to remove, beta and order scale the effective number; give only one kind.")
    try:
        if sparsity is not None:
            return RatioBudget(sparsity)
        return EffectiveBudget(1.0 if beta is None else beta, 2.0 if order is None else order)
    except ValueError as error:
        raise UserError(f"{error}.") from error


def select_units(
    scores: dict[str, Tensor], budget: Budget, scope: UnitScope = "layer"
) -> tuple[dict[str, Tensor], dict[str, UnitNumbers], list[str]]:
    """Select units.

    Args:
        scores: name -> scores of the units of a group, float64, shape (units,), non-negative.
        budget: how many units to keep, of each group or of all.
        scope: which units compete with each other: those of a group ("layer"), or those of all groups.

    Returns:
        Name -> mask, bool, shape (units,), true where kept; name -> numbers of the competing units, with the name "" if all
        compete; and the groups of which all would lose nothing but one unit: the largest, which is kept in addition.

    Raises:
        UserError: the scope is unknown, or scores hold NaN or infinity.
    """
    if scope not in get_args(UnitScope):
        raise UserError(f"group {scope!r} is not one of {', '.join(get_args(UnitScope))}.")
    parts = {"": torch.cat(list(scores.values()))} if scope == "all" else scores
    selections = {name: _select(name, part, budget) for name, part in parts.items()}
    numbers = {name: _numbers(selection, budget) for name, selection in selections.items()}
    if scope == "layer":
        return {name: selection.mask[0] for name, selection in selections.items()}, numbers, []
    pieces = torch.split(selections[""].mask[0], [len(part) for part in scores.values()])
    masks = {name: piece.clone() for name, piece in zip(scores, pieces, strict=True)}
    empty = [name for name, mask in masks.items() if not bool(mask.any())]
    for name in empty:
        masks[name][int(scores[name].argmax())] = True
    return masks, numbers, empty


def _select(name: str, scores: Tensor, budget: Budget) -> Selection:
    try:
        return select_rows(scores.reshape(1, -1), budget)
    except NonFiniteError as error:
        raise UserError(
            f"{name or 'the model'}: {error}. Its weights, or the gradients of the loss, are not finite."
        ) from error


def _numbers(selection: Selection, budget: Budget) -> UnitNumbers:
    assert selection.n_eff is not None
    assert selection.s_eff is not None
    size, n_eff = selection.mask.shape[1], float(selection.n_eff[0])
    bound = float(mass_bound(n_eff, size)) if budget.order == 2.0 else None
    return UnitNumbers(size, n_eff, float(selection.s_eff[0]), bound)
