"""The number of weights that an effective number keeps at many betas: one pass over the weights, and nothing is written."""

from collections.abc import Sequence
from dataclasses import replace

from emp_llm.common.progress_bars import Bar, progress_bar
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.pruner import Pruner
from emp_llm.records.measure import CurvePoint
from emp_llm.selection.arithmetic.number_counts import counts_at
from emp_llm.selection.budgets import EffectiveBudget
from emp_llm.storage.file_pool import FilePool


def kept_at(pruner: Pruner, betas: Sequence[float]) -> list[int]:
    """How many weights of all targets a prune with each beta keeps. The weights are read once.

    Args:
        pruner: of a recipe with an effective number; its own beta does not matter.
        betas: positive finite numbers.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the reading.
    """
    budget = pruner.scheme.budget
    assert isinstance(budget, EffectiveBudget)
    total = sum(target.matrix.numel for target in pruner.targets)
    with pruner.checkpoint.open_files() as files, progress_bar(total, "sparsity against beta", "W") as bar:
        if pruner.scheme.group == "row" and budget.dtype == "float64":
            kept = _kept_in_rows(pruner, betas, files, bar)
        else:
            kept = _kept_in_groups(pruner, budget, betas, files, bar)
    pruner.checkpoint.check_unchanged()
    return kept


def kept_of_outcomes(outcomes: list[Outcome], betas: Sequence[float]) -> list[int]:
    """As `kept_at`, from the N_eff of every row."""
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


def _kept_in_rows(pruner: Pruner, betas: Sequence[float], files: FilePool, bar: Bar) -> list[int]:
    """Each row is a group: the kernels compute N_eff."""
    kept = [0] * len(betas)
    for target in pruner.targets:
        for block in pruner.pruned(target, files, None, back=False):
            for place, beta in enumerate(betas):
                kept[place] += int(counts_at(block.figures.n_eff, block.figures.mass, beta, target.matrix.columns).sum())
            bar.update(block.words.size)
            pruner.buffers.give(block.words)
    return kept


def _kept_in_groups(pruner: Pruner, budget: EffectiveBudget, betas: Sequence[float], files: FilePool, bar: Bar) -> list[int]:
    """Each matrix is a group, or all targets are; or each row, in the paper's bfloat16."""
    from torch import Tensor

    from emp_llm.selection.arithmetic.hill import Moments

    budgets = [replace(budget, beta=beta) for beta in betas]
    kept = [0] * len(betas)
    parts: list[Moments] = []

    def count(moments: Moments, rows: Tensor | None = None) -> None:
        for place, each in enumerate(budgets):
            kept[place] += int(each.counts(moments, rows=rows).sum())

    def take(scores: Tensor) -> None:
        moments = Moments.of_rows(scores, budget.order)
        if pruner.scheme.group == "row":
            count(moments, scores)
        else:
            parts.append(moments)
        bar.update(scores.numel())

    for target in pruner.targets:
        pruner.feed(take, [target], files)
        if pruner.scheme.group == "matrix":
            count(Moments.merge(parts))
            parts.clear()
    if pruner.scheme.group == "all":
        count(Moments.merge(parts))
    return kept
