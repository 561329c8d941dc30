"""The plan of a prune, and its need of memory and disk, for `--dry-run`."""

import logging
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import count_of, format_bytes
from emp_llm.common.machine import has_bfloat16
from emp_llm.common.ranks import ranks
from emp_llm.healing.planning import (
    HealingPlan,
    Sizes,
    devices_of,
    free_on,
    healing_bytes,
    keeps_elsewhere,
)
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import Effective, Heal
from emp_llm.options.shared import CalibrationOptions, Place
from emp_llm.pruning.counts import count_at_betas, curve_points, stored_bytes
from emp_llm.pruning.scores import Scores
from emp_llm.records.base import Corpus, samples_of
from emp_llm.records.run_report import CurvePoint, TargetsRecord
from emp_llm.update.update import Update
from emp_llm.walk.checks import update_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
CURVE_BETAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)


@dataclass
class PlannedLayers:
    """The targets of one role."""

    shape: tuple[int, int]
    count: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Needs:
    """The memory of passes over a text, and of an update.

    Attributes:
        device: that computes.
        parts: bytes on it, by what takes them; free: how many are free there.
        hidden: bytes of the hidden states between blocks that are kept elsewhere; place: where.
        by_blocks: the device holds one block at a time.
        seconds: of the passes and the update.
    """

    device: str
    parts: dict[str, int]
    free: int
    hidden: int
    place: Place
    by_blocks: bool
    seconds: float


@dataclass(frozen=True)
class DryRun:
    """The plan of a prune.

    Attributes:
        layers: the targets, by role.
        coverage: the share of the model that they cover.
        output, disk_bytes: path and size of the checkpoint.
        needs_overwrite: the output exists, and `overwrite` is not given.
        needs: what the passes over a text take; None without a text.
        minutes: to read the model, for these passes and an update, and to write the checkpoint;
            None: unknown.
        resume_bytes: size of the hidden states that a calibration by blocks keeps on disk for
            resuming; None if it keeps none.
        fit_disk_bytes: size of the weights that an update moves, until the checkpoint is written;
            None without one.
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
    needs: Needs | None = None
    minutes: float | None = None
    resume_bytes: int | None = None
    fit_disk_bytes: int | None = None
    push_to_hub: str | None = None
    recipe: str = ""
    curve: list[CurvePoint] = field(default_factory=list)
    no_curve: str = ""
    notes: list[str] = field(default_factory=list)
    dry_run: bool = field(default=True)


def planned_layers(targets: Sequence[Target]) -> dict[str, PlannedLayers]:
    """The targets of a plan, by role."""
    layers: dict[str, PlannedLayers] = {}
    for target in targets:
        shape = (target.matrix.rows, target.matrix.columns)
        role = layers.setdefault(target.layer.role, PlannedLayers(shape))
        role.count += 1
        role.weights += target.matrix.numel
    return layers


def with_curve(plan: DryRun, scores: Scores, propagate: str, headers_only: bool) -> DryRun:
    """The plan with what a method would remove at its beta and at others. Of an emp method without
    a sparsity whose counts need no calibration, the targets are read.

    Args:
        scores: of the targets, with norms from a file if the user gave one.
        propagate: the inputs of each block.
        headers_only: the weights are not here.
    """
    recipe = scores.recipe
    counts = recipe.counts
    if not isinstance(counts, Effective) or counts.sparsity is not None:
        return plan
    name = f"{recipe.method}, order {counts.order:g}, group {recipe.group}"
    name += ", counts by |W|" if recipe.counts_by_magnitude else ""
    unscored = recipe.needs_activations and not scores.inputs and not recipe.counts_by_magnitude
    if unscored or headers_only:
        return replace(plan, recipe=name, no_curve=_why_no_curve(propagate, unscored))
    curve = []
    if ranks().main:
        betas = sorted({*CURVE_BETAS, counts.beta or 1.0})
        logger.info(
            "reading the targets (%s) for the sparsity at each beta; nothing is written.",
            format_bytes(stored_bytes(scores.targets)),
        )
        weights = sum(target.matrix.numel for target in scores.targets)
        kept = count_at_betas(scores, betas)
        curve = curve_points(betas, kept, weights, plan.coverage.parameters or 1)
    return replace(plan, recipe=name, curve=curve)


def healing_notes(
    checkpoint: Checkpoint, targets: Sequence[Target], heal: Heal, length: int, plan: HealingPlan
) -> list[str]:
    """Tokens, memory, disk and time of healing. A product of matrices tells the speed of the
    device.

    Args:
        length: tokens per sequence.
        plan: whole or by blocks, and where.
    """
    import torch

    disk = healing_bytes(checkpoint, targets, heal, plan.by == "blocks")
    after = f"{plan.words()}; until it ends, up to {format_bytes(disk)} of disk beside the output"
    if heal.minutes is not None:
        return [f"heal: {heal.minutes:g} min of steps of 4 x {length} tokens; {after}"]
    steps = heal.steps
    device = torch.device(plan.device)
    operations = (10 if plan.checkpointing else 8) * checkpoint.elements * steps * 4 * length
    minutes = max(1, round(operations / operations_a_second(device) / 60))
    return [
        f"heal: {count_of(steps, 'step')} of 4 x {length} tokens, about {minutes} min on "
        f"{plan.device}; {after}"
    ]


def operations_a_second(device: "torch.device") -> float:
    """The speed that a run reaches: that of a product of matrices; half of it in bfloat16, where
    the device has instructions for it.
    """
    import torch

    coarse = has_bfloat16(device)
    dtype = torch.bfloat16 if coarse else torch.float32
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = min(timeit.repeat(lambda: float((matrix @ matrix)[0, 0]), number=1, repeat=10))
    return (1 if coarse else 2) * size**3 / seconds


def needs_of(
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    update: Update | None,
    options: CalibrationOptions,
    device_map: str,
    corpora: Sequence[Corpus],
    passes: float,
    by_blocks: bool,
) -> Needs:
    """What passes over a text take, by arithmetic on the headers and config.json (docs/gpu.md).

    Args:
        update: None: none that is known.
        corpora: the text.
        passes: over it, beside those of the update.
        by_blocks: the run goes block by block on any device.
    """
    from emp_llm.models.blockwise import choose_place

    devices = devices_of(device_map)
    device = devices[0]
    free = sum(map(free_on, devices))
    weights = sum(checkpoint.sizes.values())
    samples = samples_of(corpora)
    length = corpora[0].seqlen or 0
    coarse = has_bfloat16(device)
    sizes = Sizes.of(checkpoint, targets, Heal(), length, samples, coarse)
    # What does not fit on GPUs stays in main memory.
    offloads = keeps_elsewhere(device_map) or (device.type != "cpu" and weights > free)
    parts = {"weights": sizes.block if offloads else weights}
    stream = resume_bytes(checkpoint.config, corpora) or 0
    hidden = stream if offloads or by_blocks else 0
    operations = 2.0 * passes * sizes.reached * samples * length
    if update is not None:
        streams = 1
        inputs = 0
        if update.restores_dense:  # and the inputs of one level, or of several of a block
            attention = any(target.layer.purpose == "attention" for target in targets)
            widest = max(target.matrix.columns for target in targets if not target.layer.routed)
            streams = 2
            inputs = max(widest, 3 * sizes.width if attention else 0)
        hidden = streams * stream + inputs * stream // max(1, sizes.width)
        parts["update, at most"] = update_bytes(targets, update)
        operations += update_operations(targets, update, sizes, coarse)
    else:
        parts["a batch"] = options.batch_size * length * sizes.token
    place = choose_place(options.hidden_states, hidden, device)
    if hidden and (place == "device" or str(device) == place):
        parts["hidden states"], hidden = hidden, 0
    seconds = operations / operations_a_second(device)
    return Needs(str(device), parts, free, hidden, place, offloads or by_blocks, seconds)


def update_operations(
    targets: Sequence[Target], update: Update, sizes: Sizes, coarse: bool
) -> float:
    """Multiplications and additions of an update: three passes, the second moments of each input,
    and the solvers.

    Args:
        coarse: products of float32 are three of bfloat16.
    """
    tokens = sizes.samples * sizes.length
    columns: dict[tuple[int | None, str, int], int] = {}  # layers of a block that share an input
    for target in targets:
        key = target.layer.block, target.layer.purpose, target.matrix.columns
        columns[key] = target.matrix.columns
    moments = (4 if update.restores_dense else 2) * tokens * sum(n * n for n in columns.values())
    solvers = sum(
        update.operations(target.matrix.rows, target.matrix.columns) for target in targets
    )
    passes = 3 * 2.0 * sizes.reached * tokens
    return passes + (3 if coarse else 1) * (moments + solvers)


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


def resume_bytes(config: Mapping[str, Any], corpora: Sequence[Corpus]) -> int | None:
    """Bytes of the hidden states that a calibration by blocks keeps on disk for resuming; None if
    the config does not say.

    Args:
        config: of the model.
        corpora: the text.
    """
    tokens = sum((corpus.samples or 0) * (corpus.seqlen or 0) for corpus in corpora)
    text = config.get("text_config") or config
    names = ("hidden_size", "n_embd", "d_model")
    width = next((text[name] for name in names if isinstance(text.get(name), int)), None)
    size = {"float32": 4, "float64": 8}.get(str(text.get("dtype") or text.get("torch_dtype")), 2)
    return None if width is None else tokens * int(width) * size
