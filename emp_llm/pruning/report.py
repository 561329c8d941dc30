"""The report of a run, made of the outcomes of its targets."""

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import mask_bytes, packed_bytes, word_bytes, words_in
from emp_llm.common.errors import shorten_list
from emp_llm.common.machine import command_line, versions
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.options.recipe import Effective, Recipe
from emp_llm.pruning.masks import Outcome, Outcomes, Pruner
from emp_llm.pruning.scores import as_recorded
from emp_llm.records.base import CalibrationRecord, ModelSource
from emp_llm.records.run_report import (
    MatrixRecord,
    Quartiles,
    RunReport,
    SizesRecord,
    TargetsRecord,
)
from emp_llm.selection.rule import mass_bound
from emp_llm.walk.checks import update_warnings

if TYPE_CHECKING:
    from emp_llm.walk.updated import UpdatedWeights

logger = logging.getLogger(__name__)
_LOGGED = 6  # warnings; the report has all
KEEPS_LITTLE = 0.2


def report_of(
    source: ModelSource,
    pruner: Pruner,
    outcomes: Outcomes,
    coverage: TargetsRecord,
    updated: "UpdatedWeights | None" = None,
    calibration: CalibrationRecord | None = None,
) -> RunReport:
    """The report of a run, without stages and evaluation, which are added later.

    Args:
        source: the dense model.
        pruner, outcomes: of the finished pruning. The beta of a requested sparsity is filled in.
        coverage: the share of the model that the targets cover.
        updated: what the recipe's update made of the kept weights; None without one.
        calibration: origin of the norms; None if none were needed.
    """
    recipe = pruner.scores.recipe
    matrices = matrix_records(outcomes, pruner)
    fits = {} if updated is None else updated.records()
    warnings = warnings_of(matrices, pruner)
    if recipe.update is not None:
        warnings = [*update_warnings(fits, pruner.targets, recipe.update), *warnings]
    return RunReport(
        source=source,
        command=command_line(),
        recipe=recipe_in_force(pruner),
        calibration=calibration,
        versions=versions(),
        stages={},
        targets=targets_record(outcomes, coverage, pruner),
        sizes=sizes_record(outcomes, pruner.checkpoint, recipe.moves),
        matrices=matrices,
        warnings=warnings,
        fits=fits,
    )


def pruned_before(name: str, recipe: Recipe) -> str:
    """The warning for a model that has zeros already."""
    place = (
        "and those that are kept may get new values" if recipe.moves else "with the lowest scores"
    )
    return f"warning: {name} is already pruned. Its zeros count as weights of the rows, {place}."


def log_warnings(warnings: list[str]) -> None:
    """Log the first few warnings of a report, on the first rank. A large model may have one for
    every matrix.
    """
    if not ranks().main:
        return
    for sentence in warnings[:_LOGGED]:
        logger.warning("warning: %s", sentence)
    if len(warnings) > _LOGGED:
        logger.warning(
            "warning: %s more like these are in %s.", len(warnings) - _LOGGED, REPORT_NAME
        )


def recipe_in_force(pruner: Pruner) -> Recipe:
    """The recipe as records hold it, with the beta of a requested sparsity."""
    rule = pruner.counts.rule
    beta = pruner.counts.beta if rule is None else rule.beta
    return as_recorded(pruner.scores.recipe).with_found(beta)


def targets_record(outcomes: Outcomes, coverage: TargetsRecord, pruner: Pruner) -> TargetsRecord:
    """Counts over all targets, and the share of the model that they cover."""
    weights = sum(outcome.target.matrix.numel for outcome in outcomes.of_targets)
    kept = sum(int(outcome.kept.sum()) for outcome in outcomes.of_targets)
    record = msgspec.structs.replace(
        coverage,
        kept=kept,
        zeros=sum(outcome.zeros for outcome in outcomes.of_targets),
        sparsity_of_targets=1 - kept / weights,
        sparsity_of_all_parameters=(weights - kept) / (coverage.parameters or 1),
        scored_by_magnitude=dict(pruner.scores.by_magnitude),
    )
    if outcomes.whole is not None:
        record.n_eff, record.s_eff = outcomes.whole
        record.s_eff_bound = float(mass_bound(record.n_eff, weights)) if _bounded(pruner) else None
    return record


def matrix_records(outcomes: Outcomes, pruner: Pruner) -> dict[str, MatrixRecord]:
    """The record of each target, by layer name."""
    return {
        outcome.target.name: _matrix_record(outcome, _bounded(pruner))
        for outcome in outcomes.of_targets
    }


def warnings_of(matrices: dict[str, MatrixRecord], pruner: Pruner) -> list[str]:
    """Warnings: matrices that keep little, a sparsity of 0, and experts scored by magnitude."""
    warnings = [
        f"{name}: keeps only {100 * entry.kept_fraction_mean:.1f} % of its weights."
        for name, entry in matrices.items()
        if entry.kept_fraction_mean < KEEPS_LITTLE
    ]
    if pruner.scores.recipe.counts.sparsity == 0:
        warnings.append("--sparsity 0: nothing is removed.")
    if pruner.scores.by_magnitude:
        least = pruner.scores.recipe.targets.min_expert_tokens
        names = [f"{name} ({tokens})" for name, tokens in pruner.scores.by_magnitude.items()]
        warnings.insert(
            0,
            f"{len(names)} of {len(matrices)} matrices belong to experts that saw fewer than "
            f"{least} tokens (--min-expert-tokens). They were scored by magnitude: "
            f"{shorten_list(names)}. Give more --samples.",
        )
    return warnings


def sizes_record(outcomes: Outcomes, checkpoint: Checkpoint, updated: bool) -> SizesRecord:
    """Bytes of a pruned checkpoint's tensors: dense; packed raw without the targets' zeros; as a
    mask of the targets.

    Args:
        updated: kept weights moved, so that a mask alone does not restore the checkpoint; its size
            is 0.
    """
    zeros: Counter[str] = Counter()
    for outcome in outcomes.of_targets:
        zeros[outcome.target.matrix.stored.name] += outcome.zeros
    dense = sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
    sizes = SizesRecord(dense=dense, packed=dense, mask=0)
    for name, removed in zeros.items():
        tensor = checkpoint.tensors[name]
        words = words_in(tensor)
        sizes.packed -= tensor.end - tensor.start - packed_bytes(words, word_bytes(tensor), removed)
        sizes.mask += 0 if updated else mask_bytes(words)
    return sizes


def _bounded(pruner: Pruner) -> bool:
    """Whether the lower bound on s_eff holds: N_eff is of order 2, and that of the scores."""
    counts = pruner.scores.recipe.counts
    order = counts.order if isinstance(counts, Effective) else 2.0
    return order == 2.0 and not pruner.counts.n_eff


def _matrix_record(outcome: Outcome, bounded: bool) -> MatrixRecord:
    matrix = outcome.target.matrix
    layer = outcome.target.layer
    fraction = outcome.kept / np.float64(matrix.columns)
    total = float(outcome.mass.sum())
    record = MatrixRecord(
        tensor=matrix.stored.name,
        role=layer.role,
        block=layer.block,
        rows=matrix.rows,
        columns=matrix.columns,
        kept=int(outcome.kept.sum()),
        kept_fraction_mean=float(fraction.mean()),
        kept_fraction=quartiles(fraction),
        kept_mass=float(outcome.kept_mass.sum()) / total if total else 1.0,
    )
    if outcome.n_eff is not None and outcome.s_eff is not None:
        size = matrix.columns if outcome.n_eff.size == matrix.rows else matrix.numel
        record.group_size = size
        record.n_eff = quartiles(outcome.n_eff)
        record.n_eff_mean = float(outcome.n_eff.mean())
        record.s_eff = quartiles(outcome.s_eff)
        record.s_eff_mean = float(outcome.s_eff.mean())
        if bounded:
            bound = mass_bound(outcome.n_eff, size)
            record.s_eff_bound = quartiles(bound)
            record.s_eff_bound_mean = float(bound.mean())
            record.least_margin_over_bound = float((outcome.s_eff - bound).min())
    return record


def quartiles(values: NDArray[Any]) -> Quartiles:
    """Minimum, lower quartile, median, upper quartile and maximum."""
    least, q1, median, q3, most = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return Quartiles(min=least, q1=q1, median=median, q3=q3, max=most)
