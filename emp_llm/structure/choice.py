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
from emp_llm.options.recipe import Counts, Effective, Match, Recipe, Share, Structure
from emp_llm.records.run_report import UnitsRecord
from emp_llm.selection.effective import effective_mass, effective_mass_bound
from emp_llm.selection.reference import PowerSums, largest_mask
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
    together = structure.group == "all"
    choices: dict[int, Choice] = {}
    betas: set[float | None] = set()
    widths: dict[str, int] = {}
    by_role: dict[tuple[str, str], list[int]] = {}
    for number, units in enumerate(every):
        by_role.setdefault((units.kind, units.role), []).append(number)
    # Those whose number is a multiple of another role's come last.
    for role, members in sorted(
        by_role.items(), key=lambda item: every[item[1][0]].multiple_of != ""
    ):
        rows = [torch.from_numpy(scores[number])[None] for number in members]
        if together and not every[members[0]].comparable:
            rows = [row / row.sum() for row in rows]
        groups = [torch.cat(rows, 1)] if together else rows
        sums = [PowerSums.of_rows(group, order) for group in groups]
        beta = _beta_of_units(counts, sums)
        betas.add(beta)
        kept = _kept_by_rule(counts, beta, sums, role, matched)
        best = [
            largest_mask(group, torch.tensor([count]))[0]
            for group, count in zip(groups, kept, strict=True)
        ]
        masks = torch.split(torch.cat(best), [row.shape[1] for row in rows])
        mean = -(-sum(kept) // len(rows))
        for number, row, mask in zip(members, rows, masks, strict=True):
            units = every[number]
            rule = int(mask.sum())
            if not structure.keep_shapes:
                size = max(rule, units.fewest) if width_by_block else mean
                mask = _best(units, row, _width_of(units, size, structure, widths))
            if units.required:
                mask = mask | _best(units, row, units.required)
            stays = np.flatnonzero(mask.numpy())
            widths[units.role] = len(stays)
            record = _record_of(units, row, order, rule, stays)
            if together:
                record.n_eff_together = float(sums[0].number()[0])
            choices[number] = Choice(units, row[0].numpy(), stays, record)
    in_force = betas.pop() if len(betas) == 1 else None
    return [choices[number] for number in range(len(every))], in_force


def _kept_by_rule(
    counts: Counts,
    beta: float | None,
    sums: Sequence[PowerSums],
    role: tuple[str, str],
    matched: Removed | None,
) -> list[int]:
    """How many units of each group the rule keeps."""
    if beta is not None:
        return [int(group.counts(beta)[0]) for group in sums]
    sizes = np.array([group.size for group in sums])
    if isinstance(counts, Share):
        return uniform_counts(sizes, counts.sparsity).tolist()  # type: ignore[no-any-return]
    if matched is not None and role in matched:
        return spread_counts(sizes, *matched[role]).tolist()  # type: ignore[no-any-return]
    run = counts.run if isinstance(counts, Match) else ""
    raise UserError(f"--match {run}: that run has no {role[0]} of {role[1]}.")


def _width_of(units: Units, size: int, structure: Structure, widths: Mapping[str, int]) -> int:
    """How many units stay where shapes change, for `size` by the rule.

    Args:
        widths: role -> the number that stays, of the roles before.
    """
    if size < units.required:
        raise UserError(
            f"{units.name}: {size} of {len(units)} {units.kind} would stay, and its router "
            f"needs at least {units.required}. Raise --beta, or lower --sparsity."
        )
    if units.multiple_of:  # as many as that number allows
        width = widths[units.multiple_of]
        return len(units) // width * width
    multiple = structure.width_multiple if units.rounded else None
    return -(-size // (multiple or 1)) * (multiple or 1)


def _record_of(
    units: Units, row: torch.Tensor, order: float, rule: int, stays: Indices
) -> UnitsRecord:
    """The choice in numbers. `row` are the scores, shape (1, units)."""
    n_eff = float(PowerSums.of_rows(row, order).number()[0])
    record = UnitsRecord(
        kind=units.kind,
        role=units.role,
        block=units.block,
        units=len(units),
        kept=len(stays),
        rule=rule,
        n_eff=n_eff,
        s_eff=float(effective_mass(row, order=order)[0]),
    )
    if order == 2.0:
        record.s_eff_bound = float(effective_mass_bound(n_eff, row.shape[1]))
    if units.listed:
        record.scores = [float(f"{score:.6g}") for score in row[0].tolist()]
        record.kept_units = stays.tolist()
    return record


def count_removed(records: Iterable[UnitsRecord]) -> Removed:
    """How many units a run has removed, of how many."""
    removed: dict[tuple[str, str], tuple[int, int]] = {}
    for record in records:
        gone, total = removed.get((record.kind, record.role), (0, 0))
        removed[record.kind, record.role] = gone + record.units - record.kept, total + record.units
    return removed


def _beta_of_units(counts: Counts, sums: Sequence[PowerSums]) -> float | None:
    """The beta of an emp method, or the one that removes as many units as its sparsity asks for;
    None for a fixed share.
    """
    if not isinstance(counts, Effective):
        return None
    if counts.in_force is not None:
        return counts.in_force
    assert counts.sparsity is not None
    total = sum(group.size for group in sums)
    kept = total - floor_count(counts.sparsity * total)
    if kept < len(sums):
        raise UserError(
            f"--sparsity {counts.sparsity:g}: every layer keeps at least one unit. Lower it."
        )
    return beta_keeping(
        kept, [(group.number().numpy(), group.total.numpy(), group.size) for group in sums]
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
