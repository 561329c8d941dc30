"""The plan of a prune, and its need of memory and disk, for `--dry-run`."""

import logging
import os
import timeit
from dataclasses import dataclass, field
from pathlib import Path

from emp_llm.calibration.texts import self_notes
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import count_of, format_bytes
from emp_llm.common.machine import has_bfloat16
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.options.prune import PruneOptions
from emp_llm.options.recipe import Effective, Recipe
from emp_llm.pruning.chosen import Chosen
from emp_llm.pruning.counts import curve_points, kept_at_betas
from emp_llm.pruning.scores import Scores
from emp_llm.records.measure import CurvePoint
from emp_llm.records.run_report import TargetsRecord
from emp_llm.walk.checks import healing_bytes, healing_memory, update_bytes

logger = logging.getLogger(__name__)
CURVE_BETAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)


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
        resume_bytes: size of the hidden states that a calibration by blocks keeps on disk for
            resuming; None if it keeps none.
        fit_bytes, fit_disk_bytes: memory of a refit, and size of its weights until the checkpoint
            is written; None without one.
        push_to_hub: repository to push to.
        recipe: the method, with its order and group.
        curve: what the method would remove at its beta and at others; empty if unknown, and for
            methods without a beta.
        no_curve: why the curve of a method with a beta is unknown, and how to see it.
        notes: further lines.
    """

    layers: dict[str, PlannedLayers]
    coverage: TargetsRecord
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


def dry_run(
    chosen: Chosen, scores: Scores, options: PruneOptions, path: Path, hollow: bool
) -> DryRun:
    """The plan of a prune. Of an emp method whose counts need no calibration, the targets are read
    for the curve.

    Args:
        scores: of the targets, with norms from a file if the user gave one.
        options: of the run.
        path: of the output.
        hollow: the weights are not here.
    """
    recipe = scores.recipe
    checkpoint = chosen.checkpoint
    update = recipe.update
    calibrates = recipe.needs_activations and not scores.inputs
    unknown = calibrates and not recipe.counts_by_magnitude
    name = recipe.method
    curve = []
    effective = recipe.counts if isinstance(recipe.counts, Effective) else None
    if effective is not None:
        name = f"{name}, order {effective.order:g}, group {recipe.group}"
        name += ", counts by |W|" if recipe.counts_by_magnitude else ""
    if effective is not None and not unknown and not hollow and ranks().main:
        betas = sorted({*CURVE_BETAS, effective.beta or 1.0})
        weights = sum(target.matrix.numel for target in chosen.targets)
        logger.info(
            "reading the targets (%s) for the sparsity at each beta; nothing is written.",
            format_bytes(chosen.bytes),
        )
        curve = curve_points(betas, kept_at_betas(scores, betas), weights, checkpoint.parameters)
    return DryRun(
        layers=planned_layers(chosen.targets),
        coverage=chosen.coverage,
        output=str(path),
        disk_bytes=checkpoint.output_bytes,
        needs_overwrite=os.path.lexists(path) and not options.overwrite,
        model_bytes=sum(size for size, _ in checkpoint.states.values())
        if calibrates or update is not None
        else None,
        resume_bytes=resume_bytes(options, checkpoint) if calibrates else None,
        fit_bytes=None if update is None else update_bytes(chosen.targets, update),
        fit_disk_bytes=None if update is None else chosen.bytes,
        push_to_hub=options.push_to_hub,
        recipe=name,
        curve=curve,
        notes=(self_notes(options.text_name) if calibrates or recipe.moves else [])
        + healing_notes(checkpoint, chosen.targets, recipe, options),
        no_curve=_why_no_curve(options.propagate, unknown)
        if effective is not None and (unknown or hollow)
        else "",
    )


def healing_notes(
    checkpoint: Checkpoint, targets: list[Target], recipe: Recipe, options: PruneOptions
) -> list[str]:
    """Tokens, memory, disk and time of healing, if the recipe heals. A product of matrices tells
    the speed of this machine.
    """
    if recipe.heal is None:
        return []
    import torch

    from emp_llm.calibration.texts import calibration_corpora
    from emp_llm.models.placement import max_context

    seqlen = max(
        corpus.seqlen or 0
        for corpus in calibration_corpora(
            options.text_name, max_context(checkpoint.config), options.samples, options.seqlen
        )
    )
    steps = recipe.heal.steps
    at_a_time = min(options.batch_size, 4) if torch.cuda.is_available() else 1
    heal = recipe.heal
    disk = healing_bytes(checkpoint, targets, heal, by_blocks=options.device_map == "disk")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A training in bfloat16 reaches about half of the speed of its products.
    coarse = has_bfloat16(device)
    memory = healing_memory(checkpoint, targets, heal, at_a_time * seqlen, coarse)
    dtype = torch.bfloat16 if coarse else torch.float32
    matrix = torch.ones(1024, 1024, device=device, dtype=dtype)
    seconds = min(timeit.repeat(lambda: float((matrix @ matrix)[0, 0]), number=1, repeat=3))
    if coarse:
        seconds *= 2
    operations = 8 * checkpoint.parameters * steps * 4 * seqlen
    minutes = max(1, round(operations / (2 * 1024**3 / seconds) / 60))
    return [
        f"heal: {count_of(steps, 'step')} of 4 x {seqlen} tokens, about {minutes} min on this "
        f"machine; {format_bytes(memory)} of memory (with less, block by block); "
        f"until it ends, {format_bytes(disk)} of disk beside the output"
    ]


def _why_no_curve(propagate: str, needs_activations: bool) -> str:
    """Why the curve is unknown, and how to see it."""
    if not needs_activations:
        return (
            "needs the weights, and a dry run downloads none; download the model first (hf "
            "download)"
        )
    if propagate == "pruned":
        return (
            "known only at the end, because --propagate pruned collects the activations while "
            "it prunes"
        )
    return (
        "needs activations, and a dry run runs no model; add --activations FILE (emp-llm "
        "calibrate writes one)"
    )


def resume_bytes(options: PruneOptions, checkpoint: Checkpoint) -> int | None:
    """Bytes of the hidden states that a calibration by blocks keeps on disk for resuming; None if
    it keeps none.

    With "auto", loading decides whether the model runs block by block; the estimate assumes that it
    does.
    """
    by_blocks = options.execution != "model" or options.propagate == "pruned"
    text = checkpoint.config.get("text_config") or checkpoint.config
    width = next(
        (
            text[key]
            for key in ("hidden_size", "n_embd", "d_model")
            if isinstance(text.get(key), int)
        ),
        None,
    )
    if not options.resumable_calibration or not by_blocks or width is None:
        return None
    from emp_llm.calibration.texts import calibration_corpora
    from emp_llm.models.placement import max_context

    corpora = calibration_corpora(
        options.text_name, max_context(checkpoint.config), options.samples, options.seqlen
    )
    size = {"float32": 4, "float64": 8}.get(str(text.get("dtype") or text.get("torch_dtype")), 2)
    tokens = sum((corpus.samples or 0) * (corpus.seqlen or 0) for corpus in corpora)
    return tokens * int(width) * size
