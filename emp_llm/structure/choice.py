"""The choice of units: Algorithm 1, or a fixed share, with the counts of the weights.

The rule decides how many units stay. Where they are set to zero, this is exact. Where they are
removed, all layers get one width, because config.json has one number for all: the mean of the
rule's counts, rounded up to a multiple; each layer keeps its best.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from emp_llm.common.errors import UserError
from emp_llm.options.recipe import Counts, Effective, Match, Recipe, Share
from emp_llm.records.run_report import UnitsRecord
from emp_llm.selection.effective import effective_mass, effective_mass_bound
from emp_llm.selection.reference import Moments, largest_mask
from emp_llm.selection.rule import beta_keeping, floor_count, spread_counts, uniform_counts
from emp_llm.structure.scores import Scores
from emp_llm.structure.units import Indices, Units

# Kind and role of units -> (removed, total) in all blocks.
Removed = Mapping[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Choice:
    """The kept units of one attention, MLP, expert or mixture, or the kept layers.

    Attributes:
        units, scores: of the dense model.
        kept: numbers of the kept units, ascending.
        record: the same in numbers.
    """

    units: Units
    scores: Scores
    kept: Indices
    record: UnitsRecord

    @property
    def gone(self) -> Indices:
        """Numbers of the removed units."""
        return np.setdiff1d(np.arange(len(self.units)), self.kept)

    def removed(self, table: Indices) -> torch.Tensor:
        """The inputs or outputs of removed units, int64; `table` holds those of each unit."""
        return torch.from_numpy(np.delete(table, self.kept, 0).ravel())


def choose_units(
    every: Sequence[Units],
    scores: Sequence[Scores],
    recipe: Recipe,
    width_by_block: bool = False,
    matched: Removed | None = None,
) -> tuple[list[Choice], float | None]:
    """Decide which units stay.

    Args:
        every, scores: the units and their scores.
        recipe: beta, or sparsity; whether the units of a layer, or those of a role (`Units.role`)
            in all layers, compete; and whether they are removed, so that layers need one width.
        width_by_block: each layer has a width of its own.
        matched: of the run that `recipe.counts` names.

    Returns:
        The choices, in order; and the beta in force: None for a fixed share, or if a requested
        sparsity has several.

    Raises:
        UserError: a requested sparsity would leave a layer without units.
    """
    structure = recipe.structure
    asked = recipe.counts
    order = asked.order if isinstance(asked, Effective) else 2.0
    assert structure is not None
    choices: dict[int, Choice] = {}
    betas: set[float | None] = set()
    by_role: dict[tuple[str, str], list[int]] = {}
    for number, units in enumerate(every):
        by_role.setdefault((units.kind, units.role), []).append(number)
    for (kind, role), members in sorted(
        by_role.items(), key=lambda item: every[item[1][0]].multiple_of != ""
    ):
        rows = [torch.from_numpy(scores[number])[None] for number in members]
        # Layers differ in the size of their outputs.
        if kind == "experts" and structure.structure_group == "all":
            rows = [row / row.sum() for row in rows]
        groups = [torch.cat(rows, 1)] if structure.structure_group == "all" else rows
        moments = [Moments.of_rows(group, order) for group in groups]
        sizes = np.array([group.shape[1] for group in groups])
        beta = _beta_of(asked, moments)
        betas.add(beta)
        if beta is not None:
            kept = [int(each.counts(beta)[0]) for each in moments]
        elif isinstance(asked, Share):
            kept = uniform_counts(sizes, asked.sparsity).tolist()
        elif matched is not None and (kind, role) in matched:
            kept = spread_counts(sizes, *matched[kind, role]).tolist()
        else:
            run = asked.run if isinstance(asked, Match) else ""
            raise UserError(f"--match {run}: that run has no {kind} of {role}.")
        best = [
            largest_mask(group, torch.tensor([count]))[0]
            for group, count in zip(groups, kept, strict=True)
        ]
        masks = torch.split(torch.cat(best), [row.shape[1] for row in rows])
        counts = [int(mask.sum()) for mask in masks]
        mean = -(-sum(counts) // len(counts))
        for number, row, mask, count in zip(members, rows, masks, counts, strict=True):
            units = every[number]
            size = mean
            if width_by_block:
                size = max(count, units.least * len(np.unique(units.places)))
            if units.multiple_of and not structure.keep_shapes:  # as many as that number allows
                (width,) = {
                    len(each.kept)
                    for each in choices.values()
                    if each.units.role == units.multiple_of
                }
                mask = _widened(units, row, len(units) // width * width, 1)
            elif not structure.keep_shapes and kind != "layers":
                mask = _widened(units, row, size, structure.width_multiple or 1)
            if kind == "experts":
                needed = units.least * len(np.unique(units.places))
                if size < needed and not structure.keep_shapes:
                    raise UserError(
                        f"{units.name}: {size} of {len(units)} experts would stay, and its router "
                        f"needs at least {needed}. Raise --beta, or lower --sparsity."
                    )
                mask |= _widened(units, row, needed, 1)
            n_eff = float(Moments.of_rows(row, order).number()[0])
            stays = np.flatnonzero(mask.numpy())
            record = UnitsRecord(
                kind=kind,
                role=role,
                block=units.block,
                units=len(units),
                kept=int(mask.sum()),
                rule=count,
                n_eff=n_eff,
                s_eff=float(effective_mass(row, order=order)[0]),
                s_eff_bound=float(effective_mass_bound(n_eff, row.shape[1]))
                if order == 2.0
                else None,
                n_eff_together=float(moments[0].number()[0])
                if structure.structure_group == "all"
                else None,
                scores=[float(f"{score:.6g}") for score in row[0].tolist()]
                if kind == "experts"
                else None,
                kept_units=stays.tolist() if kind == "experts" else None,
            )
            choices[number] = Choice(units, row[0].numpy(), stays, record)
    return [choices[number] for number in range(len(every))], betas.pop() if len(
        betas
    ) == 1 else None


def removed_by_role(records: Iterable[UnitsRecord]) -> Removed:
    """How many units a run has removed, of how many."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for each in records:
        gone, total = found.get((each.kind, each.role), (0, 0))
        found[each.kind, each.role] = gone + each.units - each.kept, total + each.units
    return found


def _beta_of(asked: Counts, moments: list[Moments]) -> float | None:
    """The beta of an emp method, or the one that removes as many units as its sparsity asks for;
    None for a fixed share.
    """
    if not isinstance(asked, Effective):
        return None
    if asked.beta is not None:
        return asked.beta
    assert asked.sparsity is not None
    total = sum(each.size for each in moments)
    kept = total - floor_count(asked.sparsity * total)
    if kept < len(moments):
        raise UserError(
            f"--sparsity {asked.sparsity:g}: every layer keeps at least one unit. Lower it."
        )
    return beta_keeping(
        kept, [(each.number().numpy(), each.total.numpy(), each.size) for each in moments]
    )


def _widened(units: Units, row: torch.Tensor, size: int, multiple: int) -> torch.Tensor:
    """The mask of the best units: a multiple of them, and of heads as many in every place."""
    places = np.unique(units.places)
    each = (
        min(len(units), -(-size // multiple) * multiple)
        if units.kind == "neurons"
        else -(-size // len(places))
    )
    mask = torch.zeros(len(units), dtype=torch.bool)
    for place in places:
        members = torch.from_numpy(np.flatnonzero(units.places == place))
        mask[members] = largest_mask(row[:, members], torch.tensor([min(each, len(members))]))[0]
    return mask
