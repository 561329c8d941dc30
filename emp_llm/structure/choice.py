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
from emp_llm.structure.units import Indices, Scores, Units

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
    assert structure is not None
    counts = recipe.counts
    order = counts.order if isinstance(counts, Effective) else 2.0
    together = structure.structure_group == "all"
    choices: dict[int, Choice] = {}
    betas: set[float | None] = set()
    widths: dict[str, int] = {}
    by_role: dict[tuple[str, str], list[int]] = {}
    for number, units in enumerate(every):
        by_role.setdefault((units.kind, units.role), []).append(number)
    for (kind, role), members in sorted(
        by_role.items(), key=lambda item: every[item[1][0]].multiple_of != ""
    ):
        rows = [torch.from_numpy(scores[number])[None] for number in members]
        if together and not every[members[0]].comparable:
            rows = [row / row.sum() for row in rows]
        groups = [torch.cat(rows, 1)] if together else rows
        moments = [Moments.of_rows(group, order) for group in groups]
        sizes = np.array([group.shape[1] for group in groups])
        beta = _beta_of(counts, moments)
        betas.add(beta)
        if beta is not None:
            kept = [int(of_group.counts(beta)[0]) for of_group in moments]
        elif isinstance(counts, Share):
            kept = uniform_counts(sizes, counts.sparsity).tolist()
        elif matched is not None and (kind, role) in matched:
            kept = spread_counts(sizes, *matched[kind, role]).tolist()
        else:
            run = counts.run if isinstance(counts, Match) else ""
            raise UserError(f"--match {run}: that run has no {kind} of {role}.")
        best = [
            largest_mask(group, torch.tensor([count]))[0]
            for group, count in zip(groups, kept, strict=True)
        ]
        masks = torch.split(torch.cat(best), [row.shape[1] for row in rows])
        by_rule = [int(mask.sum()) for mask in masks]
        mean = -(-sum(by_rule) // len(by_rule))
        for number, row, mask, rule in zip(members, rows, masks, by_rule, strict=True):
            units = every[number]
            size = max(rule, units.fewest) if width_by_block else mean
            if not structure.keep_shapes:
                if size < units.required:
                    raise UserError(
                        f"{units.name}: {size} of {len(units)} {kind} would stay, and its router "
                        f"needs at least {units.required}. Raise --beta, or lower --sparsity."
                    )
                wanted = units.rounded(size, structure)
                if units.multiple_of:  # as many as that number allows
                    width = widths[units.multiple_of]
                    wanted = len(units) // width * width
                mask = _best(units, row, wanted)
            if units.required:
                mask = mask | _best(units, row, units.required)
            stays = np.flatnonzero(mask.numpy())
            widths[role] = len(stays)
            n_eff = float(Moments.of_rows(row, order).number()[0])
            record = UnitsRecord(
                kind=kind,
                role=role,
                block=units.block,
                units=len(units),
                kept=len(stays),
                rule=rule,
                n_eff=n_eff,
                s_eff=float(effective_mass(row, order=order)[0]),
            )
            if order == 2.0:
                record.s_eff_bound = float(effective_mass_bound(n_eff, row.shape[1]))
            if together:
                record.n_eff_together = float(moments[0].number()[0])
            if units.listed:
                record.scores = [float(f"{score:.6g}") for score in row[0].tolist()]
                record.kept_units = stays.tolist()
            choices[number] = Choice(units, row[0].numpy(), stays, record)
    in_force = betas.pop() if len(betas) == 1 else None
    return [choices[number] for number in range(len(every))], in_force


def removed_by_role(records: Iterable[UnitsRecord]) -> Removed:
    """How many units a run has removed, of how many."""
    removed: dict[tuple[str, str], tuple[int, int]] = {}
    for record in records:
        gone, total = removed.get((record.kind, record.role), (0, 0))
        removed[record.kind, record.role] = gone + record.units - record.kept, total + record.units
    return removed


def _beta_of(counts: Counts, moments: list[Moments]) -> float | None:
    """The beta of an emp method, or the one that removes as many units as its sparsity asks for;
    None for a fixed share.
    """
    if not isinstance(counts, Effective):
        return None
    if counts.beta is not None:
        return counts.beta
    assert counts.sparsity is not None
    total = sum(group.size for group in moments)
    kept = total - floor_count(counts.sparsity * total)
    if kept < len(moments):
        raise UserError(
            f"--sparsity {counts.sparsity:g}: every layer keeps at least one unit. Lower it."
        )
    return beta_keeping(
        kept, [(group.number().numpy(), group.total.numpy(), group.size) for group in moments]
    )


def _best(units: Units, row: torch.Tensor, number: int) -> torch.Tensor:
    """The mask of the best units, at least `number`, and as many in every place."""
    places = np.unique(units.places)
    count = -(-number // len(places))
    mask = torch.zeros(len(units), dtype=torch.bool)
    for place in places:
        members = torch.from_numpy(np.flatnonzero(units.places == place))
        mask[members] = largest_mask(row[:, members], torch.tensor([min(count, len(members))]))[0]
    return mask
