"""What several recipes would make of a model's targets, every matrix read once for all of them; nothing is written."""

from tqdm import tqdm

from emp_llm.models.files import OpenFiles
from emp_llm.models.outcomes import Outcome, Rows
from emp_llm.models.pruning import Pruner


def measure_targets(pruners: list[Pruner]) -> list[list[Outcome]]:
    """What became of each target, had it been pruned.

    Args:
        pruners: of the same targets of one checkpoint; each row is a group of its own.

    Returns:
        The outcomes of each, in the order of the targets, as `Pruner.write` has them.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes meanwhile.
    """
    outcomes: list[list[Outcome]] = [[] for _ in pruners]
    reader = pruners[0]
    total = sum(target.matrix.numel for target in reader.targets)
    with OpenFiles() as files, tqdm(total=total, desc="measure", unit="W", unit_scale=True, disable=None) as bar:
        for target in reader.targets:
            found = [Rows(target.matrix.rows) for _ in pruners]
            for first, block in reader.blocks(target, files):
                for rows, pruner in zip(found, pruners, strict=True):
                    rows.put(first, pruner.measured(target, first, block))
                bar.update(block.numel())
            for rows, own in zip(found, outcomes, strict=True):
                own.append(rows.outcome(target, rows.columns["n_eff"], rows.columns["s_eff"]))
    reader.checkpoint.check_unchanged()
    return outcomes
