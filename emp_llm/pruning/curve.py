"""Effective numbers of all groups by one pass over the weights: the sparsity at many betas, and the beta of a sparsity."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emp_llm.common.errors import UserError
from emp_llm.common.progress_bars import Bar, progress_bar
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.outlier_shares import outlier_parts
from emp_llm.pruning.pruner import Pruner
from emp_llm.records.measure import CurvePoint
from emp_llm.selection.arithmetic.number_counts import GroupNumbers, beta_keeping, counts_at
from emp_llm.selection.block_shares import OwlBudget
from emp_llm.selection.budgets import EffectiveBudget, RequestedBudget
from emp_llm.selection.given_counts import GivenCounts
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.file_pool import FilePool

logger = logging.getLogger(__name__)


def kept_at(pruner: Pruner, betas: Sequence[float]) -> list[int]:
    """How many weights of all targets a prune with each beta keeps. The weights are read once.

    Args:
        pruner: of a recipe with an effective number; its own beta does not matter.
        betas: positive finite numbers.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the reading.
    """
    budget = pruner.scheme.budget
    if isinstance(budget, EffectiveBudget) and budget.dtype != "float64":
        return _kept_in_bfloat16(pruner, budget, betas)
    groups = effective_numbers(pruner)
    return [sum(int(counts_at(n_eff, total, beta, size).sum()) for n_eff, total, size in groups) for beta in betas]


def settle_budget(pruner: Pruner, known: dict[float, list[GroupNumbers]] | None = None) -> None:
    """Settle what must be known before the first mask: the beta of a requested sparsity, and the counts, if magnitudes set
    them, by one pass over the weights; the shares of blocks by their outliers, by two. Any other pruner stays as it is.

    Args:
        pruner: with its norms, unless magnitudes set the counts.
        known: order -> effective numbers of the magnitudes of the same targets and groups; those found now are added.

    Raises:
        UserError: every group keeps at least one weight, so that so many cannot be removed; or as for `kept_at`.
    """
    scheme, known = pruner.scheme, {} if known is None else known
    if pruner.settled is not None:
        return
    if scheme.count_by == "magnitude":
        order = scheme.budget.order
        groups = known[order] if order in known else known.setdefault(order, effective_numbers(pruner))
        _settle_beta(pruner, groups)
        assert isinstance(pruner.scheme.budget, EffectiveBudget)
        pruner.settled = GivenCounts(groups, pruner.scheme.budget.beta, order)
    elif isinstance(scheme.budget, OwlBudget):
        pruner.settled = outlier_parts(pruner, scheme.budget)
    elif isinstance(scheme.budget, RequestedBudget):
        _settle_beta(pruner, effective_numbers(pruner))


def _settle_beta(pruner: Pruner, groups: list[GroupNumbers]) -> None:
    """Replace a requested sparsity by an effective number with the beta that removes as many weights."""
    budget = pruner.scheme.budget
    if not isinstance(budget, RequestedBudget):
        return
    weights = sum(n_eff.size * size for n_eff, _, size in groups)
    kept = budget.kept_of(weights)
    least = sum(int(counts_at(n_eff, total, math.ulp(0.0), size).sum()) for n_eff, total, size in groups)
    if kept < least:
        raise UserError(
            f"--sparsity {budget.sparsity:g}: every group keeps at least one weight, and a group of zeros all, so that at most "
            f"{1 - least / weights:.4f} can be removed. Lower it."
        )
    beta = beta_keeping(kept, groups)
    pruner.scheme = replace(pruner.scheme, budget=EffectiveBudget(beta, budget.order))
    logger.info("sparsity %g is that of beta %.6g.", budget.sparsity, beta)


def effective_numbers(pruner: Pruner) -> list[GroupNumbers]:
    """(N_eff, sum |s|, size) of all groups: arrays for the rows of each target; one value for a matrix, or for all targets.

    The scores s are those that set the counts. The weights are read once.

    Raises:
        UserError: as for `kept_at`.
    """
    if pruner.scheme.count_by == "magnitude":
        scheme = Scheme("magnitude", EffectiveBudget(1.0, pruner.scheme.budget.order), pruner.scheme.group)
        pruner = Pruner(pruner.checkpoint, pruner.targets, scheme, pruner.block_weights, rows=pruner.rows)
    total = sum(target.matrix.numel for target in pruner.targets)
    with pruner.checkpoint.open_files(again=True) as files, progress_bar(total, "effective numbers", "W") as bar:
        groups = _of_rows(pruner, files, bar) if pruner.scheme.group == "row" else _of_matrices(pruner, files, bar)
    pruner.checkpoint.check_unchanged()
    return groups


def kept_of_outcomes(pruner: Pruner, outcomes: list[Outcome], betas: Sequence[float]) -> list[int]:
    """As `kept_at`, from the settled counts or the N_eff of every row."""
    if isinstance(pruner.settled, GivenCounts):
        return [pruner.settled.kept_at(beta) for beta in betas]
    return [
        sum(
            int(counts_at(each.n_eff, each.mass, beta, each.target.matrix.columns).sum())
            for each in outcomes
            if each.n_eff is not None
        )
        for beta in betas
    ]


def curve_points(betas: Sequence[float], kept: Sequence[int], weights: int, parameters: int) -> list[CurvePoint]:
    """The curve of the sparsity.

    Args:
        betas, kept: of `kept_at`.
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


def _of_rows(pruner: Pruner, files: FilePool, bar: Bar) -> list[GroupNumbers]:
    """Each row is a group: the kernels compute N_eff."""
    scheme, groups = pruner.scheme, []
    pruner.scheme = replace(scheme, budget=EffectiveBudget(1.0, scheme.budget.order))
    try:
        for target in pruner.targets:
            numbers = np.zeros((2, target.matrix.rows))
            for block in pruner.pruned(target, files, None, back=False):
                rows = slice(block.first, block.first + len(block.figures.mass))
                numbers[0, rows], numbers[1, rows] = block.figures.n_eff, block.figures.mass
                bar.update(block.words.size)
                pruner.buffers.give(block.words)
            groups.append((numbers[0], numbers[1], target.matrix.columns))
    finally:
        pruner.scheme = scheme
    return groups


def _of_matrices(pruner: Pruner, files: FilePool, bar: Bar) -> list[GroupNumbers]:
    """Each matrix is a group, or all targets are."""
    from torch import Tensor

    from emp_llm.selection.arithmetic.hill import CollectedMoments, Moments

    parts = CollectedMoments()

    def take(scores: Tensor) -> None:
        parts.add(Moments.of_rows(scores, pruner.scheme.budget.order))
        bar.update(scores.numel())

    def merged() -> GroupNumbers:
        moments = parts.merged()
        return moments.number().numpy(force=True), moments.mass.numpy(force=True), int(moments.size[0])

    groups = []
    for target in pruner.targets:
        pruner.feed(take, [target], files)
        if pruner.scheme.group == "matrix":
            groups.append(merged())
    return groups or [merged()]


def _kept_in_bfloat16(pruner: Pruner, budget: EffectiveBudget, betas: Sequence[float]) -> list[int]:
    """Each row is a group, in the paper's bfloat16."""
    from torch import Tensor

    from emp_llm.selection.arithmetic.hill import Moments

    budgets = [replace(budget, beta=beta) for beta in betas]
    kept = [0] * len(betas)
    total = sum(target.matrix.numel for target in pruner.targets)
    with pruner.checkpoint.open_files() as files, progress_bar(total, "effective numbers", "W") as bar:

        def take(scores: Tensor) -> None:
            moments = Moments.of_rows(scores, budget.order)
            for place, each in enumerate(budgets):
                kept[place] += int(each.counts(moments, rows=scores).sum())
            bar.update(scores.numel())

        pruner.feed(take, pruner.targets, files)
    pruner.checkpoint.check_unchanged()
    return kept
