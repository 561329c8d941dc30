"""Counts: how many weights stay in each group of a model's targets. They are known before any mask
is decided.

A group is a row, a matrix, or all targets. Where each group's own scores set its count, the counts
are a rule; else they are a table with one number for each group.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emp_llm.common.errors import UserError
from emp_llm.common.paths import REPORT_NAME
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import Effective, Magnitude, Match, Pattern, Recipe, Share
from emp_llm.pruning.masks import KeptCounts, Pruner
from emp_llm.pruning.outcome import Outcomes
from emp_llm.pruning.report import matrix_records, sizes_record, targets_record, warnings_of
from emp_llm.pruning.scores import Scores
from emp_llm.records.measure import CurvePoint, MeasureEntry
from emp_llm.records.run_report import RunReport, TargetsRecord, read_report
from emp_llm.selection.rule import (
    Group,
    GroupNumbers,
    KeepRule,
    beta_keeping,
    counts_at,
    floor_count,
    kept_at,
    spread_counts,
    uniform_counts,
)

logger = logging.getLogger(__name__)
Numbers = dict[float, list[GroupNumbers]]


def counts_of(
    scores: Scores, known: Numbers | None = None, group: Group | None = None
) -> KeptCounts:
    """How many weights of each group a recipe keeps.

    Weights are read, once, for a requested sparsity of an emp method and for counts by magnitudes.
    Other counts are known from the sizes, or are set by each group itself.

    Args:
        scores: of the targets, with the norms, unless magnitudes set the counts.
        known: order -> effective numbers of the magnitudes of the same targets and groups; those
            found now are added.
        group: None: that of the recipe.

    Raises:
        UserError: every group keeps at least one weight, so that so many cannot be removed; M of an
            N:M pattern does not divide a target's inputs; one group has targets of several dtypes;
            a target holds NaN or infinity; a file cannot be read.
    """
    recipe = scores.recipe
    targets = scores.targets
    group = group or recipe.group
    check_groups(recipe, targets, group)
    if recipe.rule is not None:
        return KeptCounts(group, recipe.rule)
    asked = recipe.counts
    if isinstance(asked, Effective):
        return _effective_counts(scores, asked, {} if known is None else known)
    if isinstance(asked, Share):
        if asked.shares is not None:
            return _spread(targets, group, _removed_of(targets, asked.shares.removed))
        sizes = {target.name: _group_sizes(target, group) for target in targets}
        if group == "all":
            sizes = {"": np.array([sum(target.matrix.numel for target in targets)])}
        return KeptCounts(
            group,
            None,
            {name: uniform_counts(size, asked.sparsity) for name, size in sizes.items()},
        )
    removed = asked.removed if isinstance(asked, Match) else None
    assert removed is not None
    if isinstance(removed, int):
        return _spread(targets, group, [(removed, sum(target.matrix.numel for target in targets))])
    return _spread(targets, group, _removed_of(targets, removed))


def _removed_of(
    targets: Sequence[Target], removed: Mapping[str, int] | None
) -> list[tuple[int, int]]:
    """(removed, total) of each target."""
    if removed is None:
        raise UserError("--shares cost measures held-out text; it is for the command prune.")
    missing = next((target.name for target in targets if target.name not in removed), None)
    if missing is not None:
        raise UserError(f"removed does not say how many weights {missing} loses.")
    return [(removed[target.name], target.matrix.numel) for target in targets]


def check_groups(recipe: Recipe, targets: Sequence[Target], group: Group | None = None) -> None:
    """Raise UserError if M of an N:M pattern does not divide a target's inputs, or one group has
    targets of several dtypes.

    Args:
        group: None: that of the recipe.
    """
    dtypes = {target.matrix.stored.dtype for target in targets}
    if (group or recipe.group) == "all" and len(dtypes) > 1:
        raise UserError(
            "--group all: the targets are stored in different dtypes; use --group row or matrix."
        )
    if not isinstance(recipe.counts, Pattern):
        return
    n = recipe.counts.n
    m = recipe.counts.m
    for target in targets:
        if target.matrix.columns % m:
            raise UserError(
                f"--pattern {n}:{m}: the {target.matrix.columns} inputs of {target.name} are not a "
                f"multiple of {m}. Leave the layer out with --ignore, or choose another pattern."
            )


def match(recipe: Recipe, targets: Sequence[Target], report: RunReport | None = None) -> Recipe:
    """The recipe with the number of weights to remove, unless it has it.

    Args:
        report: of the run that it matches; None: it is read from the folder of that run.

    Raises:
        UserError: there is no report, or it is of another model or of other targets.
    """
    counts = recipe.counts
    if not isinstance(counts, Match) or counts.removed is not None:
        return recipe
    run = counts.run
    report = report or read_report(Path(run))
    total = sum(target.matrix.numel for target in targets)
    if report.targets.weights is None or report.targets.kept is None:
        raise UserError(f"{run}: its {REPORT_NAME} does not say how many weights were kept.")
    if report.targets.weights != total:
        raise UserError(
            f"{run}: that run had {report.targets.weights} target weights, this one has {total}; "
            "match a run of the same model and the same --targets."
        )
    if counts.by != "matrix":
        total = report.targets.weights - report.targets.kept
        return recipe.but(counts=replace(counts, removed=total))
    removed = {}
    for target in targets:
        entry = report.matrices.get(target.name)
        size = target.matrix.numel
        if entry is None:
            raise UserError(
                f"{run}: its {REPORT_NAME} does not say how many weights of "
                f"{target.name} were kept."
            )
        if entry.rows * entry.columns != size:
            raise UserError(
                f"{run}: {target.name} had {entry.rows * entry.columns} weights in that run and "
                f"has {size} here; match a run of the same model."
            )
        removed[target.name] = size - entry.kept
    return recipe.but(counts=replace(counts, removed=removed))


# Effective numbers.


def _effective_counts(scores: Scores, asked: Effective, known: Numbers) -> KeptCounts:
    """The counts of an emp method without a rule: by a sparsity's beta, or by the numbers of the
    magnitudes.
    """
    recipe = scores.recipe
    if not recipe.counts_by_magnitude:
        beta = _beta_of(asked, effective_numbers(scores))
        return KeptCounts(recipe.group, KeepRule(beta=beta, order=asked.order))
    if asked.order not in known:
        known[asked.order] = effective_numbers(magnitudes_of(scores))
    numbers = known[asked.order]
    beta = _beta_of(asked, numbers)
    return counts_by_numbers(scores.targets, recipe.group, numbers, beta)


def magnitudes_of(scores: Scores) -> Scores:
    """The magnitudes of the same targets, in the same groups."""
    counts = Effective(order=_order_of(scores.recipe))
    recipe = Recipe(score=Magnitude(), counts=counts, group=scores.recipe.group)
    return Scores(scores.checkpoint, scores.targets, recipe)


def counts_by_numbers(
    targets: Sequence[Target], group: Group, groups: Sequence[GroupNumbers], beta: float
) -> KeptCounts:
    """The counts by given effective numbers, such as those of the magnitudes.

    Args:
        groups: as `effective_numbers` returns them.
    """
    names = [""] if group == "all" else [target.name for target in targets]
    kept = {
        name: counts_at(n_eff, total, beta, size).astype(np.int64)
        for name, (n_eff, total, size) in zip(names, groups, strict=True)
    }
    return KeptCounts(
        group,
        None,
        kept,
        {name: n_eff for name, (n_eff, _, _) in zip(names, groups, strict=True)},
        beta,
        groups,
    )


def _order_of(recipe: Recipe) -> float:
    return recipe.counts.order if isinstance(recipe.counts, Effective) else 2.0


def _beta_of(asked: Effective, groups: list[GroupNumbers]) -> float:
    """The beta that is asked for, or that removes the sparsity that is asked for."""
    if asked.sparsity is None or asked.in_force is not None:
        return asked.in_force or 1.0
    weights = sum(n_eff.size * size for n_eff, _, size in groups)
    kept = weights - floor_count(asked.sparsity * weights)
    least = kept_at(groups, math.ulp(0.0))
    if kept < least:
        raise UserError(
            f"--sparsity {asked.sparsity:g}: every group keeps at least one weight, and a group "
            f"of zeros all, so that at most {1 - least / weights:.4f} can be removed. Lower it."
        )
    beta = beta_keeping(kept, groups)
    logger.info("sparsity %g is that of beta %.6g.", asked.sparsity, beta)
    return beta


def effective_numbers(scores: Scores) -> list[GroupNumbers]:
    """(N_eff, sum |s|, size) of all groups: arrays for the rows of each target; one value for a
    matrix, or for all targets.

    The weights are read once.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the
            reading.
    """
    order = _order_of(scores.recipe)
    group = scores.recipe.group
    pruner = Pruner(scores, KeptCounts(group, KeepRule(beta=1.0, order=order)))
    groups = []
    with scores.reading("effective numbers") as (files, bar):
        if group == "row":  # the kernels compute N_eff
            for target in scores.targets:
                numbers = np.zeros((2, target.matrix.rows))
                for chunk in pruner.pruned(target, files):
                    rows = slice(chunk.first, chunk.first + len(chunk.figures.mass))
                    numbers[0, rows], numbers[1, rows] = chunk.figures.n_eff, chunk.figures.mass
                    bar.update(chunk.words.size)
                groups.append((numbers[0], numbers[1], target.matrix.columns))
        else:
            from emp_llm.selection.reference import PowerSumsOfGroup

            for members in (
                [scores.targets] if group == "all" else [[target] for target in scores.targets]
            ):
                of_group = PowerSumsOfGroup(order)
                for rows_scores in scores.of_chunks(members, files):
                    of_group.add(rows_scores)
                    bar.update(rows_scores.numel())
                moments = of_group.merged()
                groups.append((moments.number().numpy(), moments.mass.numpy(), moments.size))
    return groups


def count_at_betas(scores: Scores, betas: Sequence[float]) -> list[int]:
    """How many weights of all targets a prune with each beta keeps. The weights are read once.

    Args:
        scores: of a recipe with an effective number; its own beta does not matter.
        betas: positive finite numbers.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the
            reading.
    """
    counts = scores.recipe.counts
    if isinstance(counts, Effective) and counts.neff_dtype == "bfloat16":
        return _kept_in_bfloat16(scores, betas)
    groups = effective_numbers(
        magnitudes_of(scores) if scores.recipe.counts_by_magnitude else scores
    )
    return [kept_at(groups, beta) for beta in betas]


def measured(
    pruner: Pruner, outcomes: Outcomes, coverage: TargetsRecord, betas: Sequence[float]
) -> MeasureEntry:
    """What `measure` records of a criterion and an order.

    Args:
        outcomes: of the pruner, by rows.
        coverage: the share of the model that the targets cover.
        betas: of the curve. It follows the numbers that set the counts, or N_eff of every row.
    """
    recipe = pruner.scores.recipe
    checkpoint = pruner.checkpoint
    groups = pruner.counts.numbers or [
        (outcome.n_eff, outcome.mass, outcome.target.matrix.columns)
        for outcome in outcomes.of_targets
        if outcome.n_eff is not None
    ]
    kept = [kept_at(groups, beta) for beta in betas]
    weights = sum(target.matrix.numel for target in pruner.targets)
    matrices = matrix_records(outcomes, pruner)
    return MeasureEntry(
        criterion=recipe.name,
        order=_order_of(recipe),
        score="relative" if recipe.score.relative else None,
        count_by="magnitude" if recipe.counts_by_magnitude else None,
        targets=targets_record(outcomes, coverage, pruner),
        sizes=sizes_record(outcomes, checkpoint, updated=False),
        matrices=matrices,
        curve=curve_points(betas, kept, weights, checkpoint.parameters),
        warnings=warnings_of(matrices, pruner),
    )


def _kept_in_bfloat16(scores: Scores, betas: Sequence[float]) -> list[int]:
    """Each row is a group, in the paper's bfloat16."""
    from emp_llm.selection.reference import select_rows

    kept = [0] * len(betas)
    with scores.reading("effective numbers") as (files, bar):
        for rows_scores in scores.of_chunks(scores.targets, files):
            for place, beta in enumerate(betas):
                kept[place] += int(
                    select_rows(rows_scores, KeepRule(beta=beta, dtype="bfloat16")).kept.sum()
                )
            bar.update(rows_scores.numel())
    return kept


def curve_points(
    betas: Sequence[float], kept: Sequence[int], weights: int, parameters: int
) -> list[CurvePoint]:
    """The curve of the sparsity.

    Args:
        betas, kept: of `count_at_betas`.
        weights: number of weights of all targets.
        parameters: number of parameters of the model.
    """
    return [
        CurvePoint(
            beta=beta,
            kept=count,
            sparsity_of_targets=1 - count / weights,
            sparsity_of_all_parameters=(weights - count) / parameters,
        )
        for beta, count in zip(betas, kept, strict=True)
    ]


# Counts from sizes.


def _group_sizes(target: Target, group: Group) -> NDArray[np.int64]:
    """The number of weights in each group of a target."""
    matrix = target.matrix
    return (
        np.full(matrix.rows, matrix.columns, np.int64)
        if group == "row"
        else np.array([matrix.numel])
    )


def _spread(
    targets: Sequence[Target], group: Group, spans: Sequence[tuple[int, int]]
) -> KeptCounts:
    """Removed weights spread evenly over the groups of consecutive spans of all target weights.

    Args:
        spans: (removed, total) of each span; a span consists of whole targets.
    """
    kept: dict[str, NDArray[np.int64]] = {}
    rest = iter(spans)
    before = 0
    removed = 0
    total = 0
    try:
        if group == "all":
            ((removed, total),) = spans
            return KeptCounts(group, None, {"": spread_counts(np.array([total]), removed, total)})
        for target in targets:
            if before == total:
                removed, total = next(rest)
                before = 0
            kept[target.name] = spread_counts(_group_sizes(target, group), removed, total, before)
            before += target.matrix.numel
    except ValueError as error:
        raise UserError(f"--match: {error}.") from error
    return KeptCounts(group, None, kept)
