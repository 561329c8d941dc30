"""The plan of a run, and its need of memory and disk, for `--dry-run`."""

import logging
from dataclasses import dataclass, field

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.tables import percent_cell, table
from emp_llm.common.wording import count_of, format_bytes
from emp_llm.models.architecture import Coverage, Target
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.commands import CURVE_BETAS
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.pruner import Pruner
from emp_llm.records.measure import CurvePoint
from emp_llm.reporting.run_tables import curve_table, dense_lines

logger = logging.getLogger(__name__)


@dataclass
class PlannedLayers:
    """The targets of one role."""

    shape: tuple[int, int]
    count: int = 0
    weights: int = 0


@dataclass(frozen=True)
class DryRun:
    """The plan of a prune.

    Attributes:
        layers: the targets, by role.
        coverage: the share of the model that they cover.
        output, disk_bytes: path and size of the checkpoint.
        needs_overwrite: the output exists, and `overwrite` is not given.
        model_bytes: size of the weights that a calibration loads; None without a calibration.
        resume_bytes: size of the hidden states that a calibration by blocks keeps on disk for resuming; None if it keeps none.
        fit_bytes, fit_disk_bytes: memory of a refit, and size of its weights until the checkpoint is written; None without one.
        push_to_hub: repository to push to.
        recipe: the method, with its order and group.
        curve: what the method would remove at its beta and at others; empty if unknown, and for methods without a beta.
        no_curve: why the curve of a method with a beta is unknown, and how to see it.
        notes: further lines.
    """

    layers: dict[str, PlannedLayers]
    coverage: Coverage
    output: str
    disk_bytes: int
    needs_overwrite: bool = False
    model_bytes: int | None = None
    resume_bytes: int | None = None
    fit_bytes: int | None = None
    fit_disk_bytes: int | None = None
    push_to_hub: str | None = None
    recipe: str = ""
    curve: list[CurvePoint] = field(default_factory=list)
    no_curve: str = ""
    notes: list[str] = field(default_factory=list)
    dry_run: bool = field(default=True)


def planned_layers(targets: list[Target]) -> dict[str, PlannedLayers]:
    """The targets of a plan, by role."""
    layers: dict[str, PlannedLayers] = {}
    for target in targets:
        shape = (target.matrix.rows, target.matrix.columns)
        role = layers.setdefault(target.layer.role, PlannedLayers(shape))
        role.count += 1
        role.weights += target.matrix.numel
    return layers


def planned_curve(recipe: Recipe, pruner: Pruner, parameters: int) -> list[CurvePoint]:
    """What a recipe would remove at its beta and at others, by one pass over the weights; no model is run.

    Args:
        recipe: with an effective number.
        pruner: of the recipe, with its norms.
        parameters: number of parameters of the model.
    """
    from emp_llm.pruning.curve import curve_points, kept_at

    own = 1.0 if recipe.beta is None else float(recipe.beta)
    betas = sorted({own, *(float(beta) for beta in CURVE_BETAS.split(","))})
    weights = sum(target.matrix.numel for target in pruner.targets)
    size = sum(target.matrix.numel * target.matrix.itemsize for target in pruner.targets)
    logger.info("reading the targets (%s) for the sparsity at each beta; nothing is written.", format_bytes(size))
    return curve_points(betas, kept_at(pruner, betas), weights, parameters)


def why_no_curve(propagate: str) -> str:
    """Why the curve of a method that needs activations is unknown before they are collected, and how to see it."""
    if propagate == "pruned":
        return "known only at the end, because --propagate pruned collects the activations while it prunes"
    return "needs activations, and a dry run runs no model; add --activations FILE (emp-llm calibrate writes one)"


def resume_bytes(options: CalibrationOptions, checkpoint: Checkpoint, propagate: str) -> int | None:
    """Bytes of the hidden states that a calibration by blocks keeps on disk for resuming; None if it keeps none.

    With "auto", loading decides whether the model runs block by block; the estimate assumes that it does.
    """
    by_blocks = options.execution != "model" or propagate == "pruned"
    text = checkpoint.config.get("text_config") or checkpoint.config
    width = next((text[key] for key in ("hidden_size", "n_embd", "d_model") if isinstance(text.get(key), int)), None)
    if not options.resumable_calibration or not by_blocks or width is None:
        return None
    from emp_llm.calibration.text_mix import calibration_corpora
    from emp_llm.models.placement import max_context

    corpora = calibration_corpora(options, max_context(checkpoint.config))
    size = {"float32": 4, "float64": 8}.get(str(text.get("dtype") or text.get("torch_dtype")), 2)
    if any(corpus.image is not None for corpus in corpora):
        return None
    tokens = sum((corpus.samples or 0) * (corpus.seqlen or 0) for corpus in corpora)
    return tokens * int(width) * size


def dry_run_table(plan: DryRun) -> str:
    """The layers to prune, their share of the model, and the memory and disk needed."""
    rows = [["layers", "shape", "weights"]]
    for role, entry in plan.layers.items():
        shape = " x ".join(str(length) for length in entry.shape)
        rows.append([f"{role} x {entry.count}", shape, f"{entry.weights:,}"])
    coverage, memory = plan.coverage, "1 GB"
    if plan.model_bytes is not None:
        memory += f", and {format_bytes(plan.model_bytes)} to calibrate (less with --device-map disk)"
    inside = coverage.targets - coverage.targets_outside
    outside = f" and {coverage.targets_outside} outside" if coverage.targets_outside else ""
    lines = [
        table(rows),
        f"targets: {inside} of {count_of(coverage.matrices, 'matrix', 'matrices')} in blocks{outside}, "
        f"{percent_cell(coverage.share_of_blocks)} % of the weights there, "
        f"{coverage.target_parameters:,} of {coverage.parameters:,} parameters "
        f"({percent_cell(coverage.target_parameters / (coverage.parameters or 1))} %)",
        *dense_lines(coverage.dense_shares),
        f"disk: {format_bytes(plan.disk_bytes)} at {plan.output}"
        + (" (it exists: name another --output, or add --overwrite)" if plan.needs_overwrite else ""),
        f"memory: {memory}",
    ]
    if plan.resume_bytes is not None:
        lines.append(
            f"disk while calibrating block by block: {format_bytes(2 * plan.resume_bytes)} of hidden states beside the output, "
            "for resuming an interrupted run (none with --no-resumable-calibration)"
        )
    if plan.fit_bytes is not None and plan.fit_disk_bytes is not None:
        lines.append(
            f"refit: up to {format_bytes(plan.fit_bytes)} more memory, beside two sets of hidden states and a block's inputs; "
            f"{format_bytes(plan.fit_disk_bytes)} of disk beside the output until it is written"
        )
    if plan.push_to_hub is not None:
        lines.append(f"push: {format_bytes(plan.disk_bytes)} to {plan.push_to_hub}")
    lines += plan.notes
    if plan.curve:
        lines.append(curve_table(plan.recipe, plan.curve))
    if plan.no_curve:
        lines.append(f"sparsity against beta: {plan.no_curve}")
    return "\n".join(lines)
