"""The outcomes of several recipes on a model's targets. Every matrix is read once for all recipes; nothing is written."""

from emp_llm.common.progress_bars import progress_bar
from emp_llm.pruning.outcome import Outcome, RowStatistics
from emp_llm.pruning.pruner import Pruner
from emp_llm.storage.file_pool import FilePool


def measure_targets(pruners: list[Pruner]) -> list[list[Outcome]]:
    """The outcome of each target for each pruner.

    Args:
        pruners: of the same targets of one checkpoint; each row is one group.

    Returns:
        For each pruner, the outcomes in the order of the targets.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the reading.
    """
    outcomes: list[list[Outcome]] = [[] for _ in pruners]
    reader = pruners[0]
    total = sum(target.matrix.numel for target in reader.targets)
    with FilePool() as files, progress_bar(total, "measure", "W") as bar:
        for target in reader.targets:
            statistics = [RowStatistics(target.matrix.rows) for _ in pruners]
            for first, words in reader.blocks(target, files):
                for rows, pruner in zip(statistics, pruners, strict=True):
                    rows.put(first, pruner.measured(target, first, words))
                bar.update(words.size)
            for rows, pruner, own in zip(statistics, pruners, outcomes, strict=True):
                own.append(pruner.outcome(target, rows, None))
    reader.checkpoint.check_unchanged()
    return outcomes
