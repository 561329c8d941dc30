"""What a pruning run did, as plain data for `emp_report.json`: per matrix, per role and in all."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from emp_llm.models.bits import mask_bytes
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.outcomes import Outcome
from emp_llm.models.packed import packed_bytes, word_bytes, words_in
from emp_llm.models.pruning import Pruner
from emp_llm.models.targets import Coverage
from emp_llm.selection.effective import effective_mass_bound

KEEPS_LITTLE = 0.2


def summarise(outcomes: list[Outcome], coverage: Coverage, pruner: Pruner) -> dict[str, Any]:
    """The part of a report that tells what became of the weights.

    Args:
        outcomes: one for each target.
        coverage: how much of the model they are.
        pruner: how they were made. The lower bound on s_eff holds for the Hill order 2 only and is null for others.

    Returns:
        "targets": counts in all, and what was scored by magnitude for want of tokens; "sizes": of the weights in bytes, as they
        are and as `pack` makes them; "matrices": by layer name, quantities
        per row as min, quartiles and max, masses as shares of sum |s|; "warnings": sentences.
    """
    order, whole = pruner.scheme.budget.order, pruner.whole
    weights = sum(outcome.target.matrix.numel for outcome in outcomes)
    kept = sum(int(outcome.kept.sum()) for outcome in outcomes)
    zeros = sum(outcome.zeros for outcome in outcomes)
    targets: dict[str, Any] = {
        "matrices": coverage.targets,
        "matrices_in_blocks": coverage.matrices,
        "weights": weights,
        "kept": kept,
        "zeros": zeros,
        "sparsity_of_targets": 1 - kept / weights,
        "sparsity_of_all_parameters": (weights - kept) / coverage.parameters,
        "parameters": coverage.parameters,
        "share_of_all_parameters": weights / coverage.parameters,
        "unreachable": list(coverage.unreachable),
        "unreachable_share_of_all_parameters": coverage.unreachable_parameters / coverage.parameters,
        "unreachable_share_of_blocks": coverage.unreachable_share,
        "share_of_blocks": coverage.target_parameters / coverage.block_parameters if coverage.block_parameters else None,
        "scored_by_magnitude": pruner.fallback,
    }
    if whole is not None:
        targets["n_eff"], targets["s_eff"] = whole
        targets["s_eff_bound"] = float(effective_mass_bound(whole[0], weights)) if order == 2 else None
    matrices = {outcome.target.name: _matrix_entry(outcome, order) for outcome in outcomes}
    warnings = [
        f"{name}: keeps only {100 * entry['kept_fraction_mean']:.1f} % of its weights."
        for name, entry in matrices.items()
        if entry["kept_fraction_mean"] < KEEPS_LITTLE
    ]
    if pruner.fallback:
        names = [f"{name} ({tokens})" for name, tokens in pruner.fallback.items()]
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.insert(
            0,
            f"{len(names)} of {len(outcomes)} matrices are of experts that were shown fewer than {pruner.least_tokens} tokens "
            f"(--min-expert-tokens), and were scored by magnitude: {listed}. More --samples show them more.",
        )
    return {"targets": targets, "sizes": sizes(outcomes, pruner.checkpoint), "matrices": matrices, "warnings": warnings}


def sizes(outcomes: list[Outcome], checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of a pruned checkpoint's tensors: dense; packed (raw, the targets' zeros left out); as a mask of the targets."""
    zeros: Counter[str] = Counter()
    for outcome in outcomes:
        zeros[outcome.target.matrix.stored.name] += outcome.zeros
    found = {"dense": sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values()), "packed": 0, "mask": 0}
    found["packed"] = found["dense"]
    for name, removed in zeros.items():
        tensor = checkpoint.tensors[name]
        words = words_in(tensor)
        found["packed"] -= tensor.end - tensor.start - packed_bytes(words, word_bytes(tensor), removed)
        found["mask"] += mask_bytes(words)
    return found


def _matrix_entry(outcome: Outcome, order: float) -> dict[str, Any]:
    matrix = outcome.target.matrix
    total = float(outcome.mass.sum())
    entry: dict[str, Any] = {
        "tensor": matrix.stored.name,
        "role": outcome.target.layer.role,
        "block": outcome.target.layer.block,
        "rows": matrix.rows,
        "columns": matrix.columns,
        "kept": int(outcome.kept.sum()),
        "kept_fraction_mean": float(outcome.kept_fraction.mean()),
        "kept_fraction": quartiles(outcome.kept_fraction),
        "kept_mass": float(outcome.kept_mass.sum()) / total if total else 1.0,
        "n_eff": None,
        "s_eff": None,
        "s_eff_bound": None,
    }
    if outcome.n_eff is not None and outcome.s_eff is not None:
        size = matrix.columns if outcome.n_eff.numel() == matrix.rows else matrix.numel
        entry |= {
            "group_size": size,
            "n_eff": quartiles(outcome.n_eff),
            "n_eff_mean": float(outcome.n_eff.mean()),
            "s_eff": quartiles(outcome.s_eff),
            "s_eff_mean": float(outcome.s_eff.mean()),
        }
        if order == 2:
            bound = effective_mass_bound(outcome.n_eff, size)
            entry |= {"s_eff_bound": quartiles(bound), "s_eff_bound_mean": float(bound.mean())}
            entry["least_margin_over_bound"] = float((outcome.s_eff - bound).min())
    return entry


def quartiles(values: Tensor) -> dict[str, float]:
    """min, lower quartile, median, upper quartile and max."""
    at = torch.quantile(values.double(), torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64))
    return dict(zip(("min", "q1", "median", "q3", "max"), at.tolist(), strict=True))
