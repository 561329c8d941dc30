"""The shares of blocks by the outliers among their scores (OWL): two passes over the weights, for means and outliers."""

import logging
from fractions import Fraction
from itertools import groupby

from emp_llm.common.progress_bars import Bar, progress_bar
from emp_llm.common.tables import percent_cell
from emp_llm.models.architecture import Target
from emp_llm.pruning.pruner import Pruner
from emp_llm.selection.block_shares import OwlBudget, block_parts, block_sparsities
from emp_llm.selection.budgets import PartsBudget
from emp_llm.storage.file_pool import FilePool

logger = logging.getLogger(__name__)
_Block = tuple[str, str, int | None]


def outlier_parts(pruner: Pruner, budget: OwlBudget) -> PartsBudget:
    """How many weights of each block are removed.

    Targets outside the blocks have the sparsity of the whole. Experts that are scored by magnitude do not count in the share of
    outliers of their block.

    Args:
        pruner: with the norms of its targets.
        budget: the rule.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the reading.
    """
    blocks: dict[_Block, list[Target]] = {}
    for target in pruner.targets:
        blocks.setdefault(_block_of(target), []).append(target)
    total = 2 * sum(target.matrix.numel for target in pruner.targets)
    with pruner.checkpoint.open_files(again=True) as files, progress_bar(total, "outliers", "W") as bar:
        outliers = [_outliers(pruner, budget, key, members, files, bar) for key, members in blocks.items()]
    pruner.checkpoint.check_unchanged()
    sizes = [sum(target.matrix.numel for target in members) for members in blocks.values()]
    of_block = dict(zip(blocks, block_sparsities(budget, outliers, sizes), strict=True))
    least, most = (percent_cell(find(of_block.values())) for find in (min, max))
    logger.info("blocks lose %s to %s %% of their weights, by their outliers.", least, most)
    parts = [(key, sum(target.matrix.numel for target in run)) for key, run in groupby(pruner.targets, _block_of)]
    return block_parts(budget, [of_block[key] for key, _ in parts], [size for _, size in parts])


def _block_of(target: Target) -> _Block:
    return target.layer.tower, target.layer.part, target.layer.block


def _outliers(
    pruner: Pruner, budget: OwlBudget, key: _Block, members: list[Target], files: FilePool, bar: Bar
) -> Fraction | None:
    """The share of a block's scores above a multiple of their mean; None outside the blocks."""
    import torch
    from torch import Tensor

    from emp_llm.selection.arithmetic.sums import sum_rows, sum_vector

    scored = [target for target in members if target.name not in pruner.scores.by_magnitude]
    if key[2] is None or not scored:
        return None
    size, total, above = sum(target.matrix.numel for target in scored), 0.0, 0
    rows: list[Tensor] = []

    def add(scores: Tensor) -> None:
        rows.append(sum_rows(scores, lambda s: s)[0].cpu())
        bar.update(scores.numel())

    def count(scores: Tensor) -> None:
        nonlocal above
        above += int((scores.double() > threshold).sum())
        bar.update(scores.numel())

    for target in scored:
        pruner.feed(add, [target], files)
        total += float(sum_vector(torch.cat(rows)))  # of sums of rows, so that it does not depend on the blocks of rows
        rows.clear()
    threshold = budget.outlier * total / size
    pruner.feed(count, scored, files)
    return Fraction(above, size)
