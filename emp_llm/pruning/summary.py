"""The summary of a pruning run for its report: per matrix, and in total."""

from collections import Counter

import numpy as np

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.words import mask_bytes, packed_bytes, word_bytes, words_in
from emp_llm.common.wording import shortened_list
from emp_llm.models.architecture import Coverage
from emp_llm.pruning.outcome import Outcome
from emp_llm.pruning.pruner import Pruner
from emp_llm.records.run_report import MatrixRecord, Quartiles, SizesRecord, TargetsRecord
from emp_llm.selection.bounds import mass_bound
from emp_llm.storage.buffers import Block

KEEPS_LITTLE = 0.2


def targets_record(outcomes: list[Outcome], coverage: Coverage, pruner: Pruner) -> TargetsRecord:
    """Counts over all targets.

    Args:
        outcomes: one for each target.
        coverage: the share of the model that the targets cover.
        pruner: of the run. The lower bound on s_eff holds for Hill order 2 only.
    """
    weights = sum(outcome.target.matrix.numel for outcome in outcomes)
    kept = sum(int(outcome.kept.sum()) for outcome in outcomes)
    record = TargetsRecord(
        matrices=coverage.targets,
        matrices_outside=coverage.targets_outside,
        matrices_in_blocks=coverage.matrices,
        weights=weights,
        kept=kept,
        zeros=sum(outcome.zeros for outcome in outcomes),
        sparsity_of_targets=1 - kept / weights,
        sparsity_of_all_parameters=(weights - kept) / coverage.parameters,
        parameters=coverage.parameters,
        share_of_all_parameters=weights / coverage.parameters,
        share_of_blocks=coverage.share_of_blocks,
        unreachable=list(coverage.unreachable),
        unreachable_share_of_all_parameters=coverage.unreachable_parameters / coverage.parameters,
        unreachable_share_of_blocks=coverage.unreachable_share,
        dense_towers=coverage.dense_shares,
        scored_by_magnitude=dict(pruner.scores.by_magnitude),
    )
    if pruner.whole is not None:
        record.n_eff, record.s_eff = pruner.whole
        record.s_eff_bound = float(mass_bound(record.n_eff, weights)) if _bounded(pruner) else None
    return record


def matrix_records(outcomes: list[Outcome], pruner: Pruner) -> dict[str, MatrixRecord]:
    """The record of each target, by layer name."""
    return {outcome.target.name: _matrix_record(outcome, _bounded(pruner)) for outcome in outcomes}


def warnings_of(matrices: dict[str, MatrixRecord], pruner: Pruner) -> list[str]:
    """Warnings: matrices that keep little, and experts scored by magnitude."""
    warnings = [
        f"{name}: keeps only {100 * entry.kept_fraction_mean:.1f} % of its weights."
        for name, entry in matrices.items()
        if entry.kept_fraction_mean < KEEPS_LITTLE
    ]
    if pruner.scores.by_magnitude:
        names = [f"{name} ({tokens})" for name, tokens in pruner.scores.by_magnitude.items()]
        warnings.insert(
            0,
            f"{len(names)} of {len(matrices)} matrices belong to experts that saw fewer than {pruner.scores.least_tokens} "
            f"tokens (--min-expert-tokens). They were scored by magnitude: {shortened_list(names)}. Give more --samples.",
        )
    return warnings


def sizes_record(outcomes: list[Outcome], checkpoint: Checkpoint, fitted: bool) -> SizesRecord:
    """Bytes of a pruned checkpoint's tensors: dense; packed raw without the targets' zeros; as a mask of the targets.

    Args:
        fitted: kept weights were changed, so that a mask alone does not restore the checkpoint; its size is 0.
    """
    zeros: Counter[str] = Counter()
    for outcome in outcomes:
        zeros[outcome.target.matrix.stored.name] += outcome.zeros
    dense = sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
    sizes = SizesRecord(dense=dense, packed=dense, mask=0)
    for name, removed in zeros.items():
        tensor = checkpoint.tensors[name]
        words = words_in(tensor)
        sizes.packed -= tensor.end - tensor.start - packed_bytes(words, word_bytes(tensor), removed)
        sizes.mask += 0 if fitted else mask_bytes(words)
    return sizes


def _bounded(pruner: Pruner) -> bool:
    """Whether the lower bound on s_eff holds: N_eff is of order 2, and that of the scores."""
    return pruner.scheme.budget.order == 2 and pruner.scheme.count_by == "own"


def _matrix_record(outcome: Outcome, bounded: bool) -> MatrixRecord:
    matrix, layer = outcome.target.matrix, outcome.target.layer
    total = float(outcome.mass.sum())
    record = MatrixRecord(
        tensor=matrix.stored.name,
        role=layer.role,
        block=layer.block,
        rows=matrix.rows,
        columns=matrix.columns,
        kept=int(outcome.kept.sum()),
        kept_fraction_mean=float(outcome.kept_fraction.mean()),
        kept_fraction=quartiles(outcome.kept_fraction),
        kept_mass=float(outcome.kept_mass.sum()) / total if total else 1.0,
    )
    if outcome.n_eff is not None and outcome.s_eff is not None:
        size = matrix.columns if outcome.n_eff.size == matrix.rows else matrix.numel
        record.group_size = size
        record.n_eff, record.n_eff_mean = quartiles(outcome.n_eff), float(outcome.n_eff.mean())
        record.s_eff, record.s_eff_mean = quartiles(outcome.s_eff), float(outcome.s_eff.mean())
        if bounded:
            bound = mass_bound(outcome.n_eff, size)
            record.s_eff_bound, record.s_eff_bound_mean = quartiles(bound), float(bound.mean())
            record.least_margin_over_bound = float((outcome.s_eff - bound).min())
    return record


def quartiles(values: Block) -> Quartiles:
    """Minimum, lower quartile, median, upper quartile and maximum."""
    least, q1, median, q3, most = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return Quartiles(min=least, q1=q1, median=median, q3=q3, max=most)
