"""Healing: the kept weights of a pruned model learn the dense model's next-token probabilities.
Zeros stay zero.

    min over the kept weights of mean_t KL(q_t || p_pruned(. | x_<=t)),
    q_t = (1 - labels) p_dense(. | x_<=t) + labels [. = x_(t+1)],   labels = 0 by default

on the calibration text, without further data: Adam on float32 weights, products in
bfloat16 where the processor has instructions for them. A step is four sequences, on any number of
devices and ranks. Each weight moves as soon as its gradient is known, within the backward pass.

The dense model runs first: its last hidden states are kept, and its blocks are not in memory while
the pruned model trains.
"""

import copy
import logging
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as gradient_checkpoint
from transformers import PreTrainedModel

from emp_llm.calibration.data import CalibrationText, data_in_memory
from emp_llm.calibration.passes import fit_origin, in_evaluation_mode
from emp_llm.checkpoint.checkpoint import Checkpoint, check_agreement
from emp_llm.checkpoint.matrices import Matrix, torch_dtype
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.declared import options_of
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.machine import (
    default_modes,
    enough_memory,
    has_bfloat16,
    trim_heap,
)
from emp_llm.common.progress import progress_bar, stage
from emp_llm.common.ranks import ranks
from emp_llm.healing.adam import Adam, Measure, Progress, UnfitError, rate_of, share_of_rate
from emp_llm.healing.blocks import heal_blocks
from emp_llm.healing.planning import (
    POSITIONS,
    SEQUENCES,
    SET_ASIDE,
    HealingPlan,
    Log,
    Sizes,
    check_healable,
    check_tracker,
    check_trains,
    down_from,
    free_on,
    healing_bytes,
    hidden_width,
    passes_of,
    ranks_here,
    sequences_for,
    set_aside,
    tracking,
    ways,
)
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.attention import fast_attention
from emp_llm.models.blockwise import BlockwiseModel, Walk
from emp_llm.models.loading import is_offloaded, load_model
from emp_llm.models.masks import Masks, check_not_sharded, find_masks, read_masks
from emp_llm.models.model_weights import ModelWeights, architecture_of
from emp_llm.models.modules import as_created, find_blocks, mean_losses, weight_of
from emp_llm.options.prune import PruneOptions
from emp_llm.options.recipe import MOST_STEPS, Heal, Recipe
from emp_llm.options.shared import CalibrationOptions, Place
from emp_llm.records.base import CalibrationRecord
from emp_llm.records.run_report import HealingRecord
from emp_llm.selection.rows import words_of
from emp_llm.walk.checks import updatable
from emp_llm.walk.updated import UpdatedWeights, in_dtype

logger = logging.getLogger(__name__)
_TRIM = 2  # passes between two trims of the heap: with one at each, 0.1 GB less and a tenth longer
_MEASURES = 5  # of the held-out loss, each with a checkpoint
_PIECE = 16 << 30  # bytes of the dense model's hidden states that are kept at a time


@default_modes()
def heal_model(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    data: Any,
    tokenizer: Any = None,
    *,
    masks: Masks | Path | str | Mapping[str, Tensor],
    weights: Literal["targets", "all"] = "targets",
    steps: int = 300,
    labels: float = 0.0,
    samples: int | None = None,
    seqlen: int | None = None,
    batch_size: int = SEQUENCES,
    seed: int = 0,
    report_to: Literal["none", "trackio", "tensorboard", "wandb"] = "none",
) -> HealingRecord:
    """Train the kept weights of a pruned model in memory, in place, on the dense model's next-token
    probabilities. In a script of several processes, all must call it: each runs its share of every
    step.

    Args:
        model: pruned; of transformers, whole in memory, of any floating-point dtype. A copy of it
            in float32 is trained.
        dense: the model that was pruned, unchanged.
        data, tokenizer, samples, seqlen, seed: the text, as for `prune_model`, but no batches.
        masks: what stays zero: of `prune_model` (`report.masks`), `masks_of`, or a pruned
            checkpoint.
        weights: what moves: the parameters of the masks, or all linear layers and norms in blocks.
        steps: of four sequences. The last tenth of them hardly changes anything.
        labels: share of the text's own next tokens in what the model learns, 0 to 1.
        batch_size: sequences per forward pass, at most; on a CPU it is one.
        report_to: the tracker that gets the numbers of the training while it runs.

    Returns:
        The divergence on held-out sequences during the training, which chose the weights.

    Raises:
        UserError: a model is not whole in memory, the masks are of another model, or the text is
            missing or too short.
    """
    if weights not in ("targets", "all"):
        raise UserError(f"weights must be 'targets' or 'all', got {weights!r}.")
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        raise UserError(f"steps must be a whole number from 1 to {MOST_STEPS:,}, got {steps!r}.")
    options_of(PruneOptions)["report_to"].checked(report_to)
    options_of(Heal)["heal_labels"].checked(labels)
    check_tracker(report_to)
    for name, given in {"model": model, "dense": dense}.items():
        if not isinstance(given, PreTrainedModel):
            raise UserError(
                f"{name} is of type {type(given).__name__}; heal_model takes models of "
                f"transformers. Of a wrapped model, give what is inside ({name}.module)."
            )
        check_not_sharded(given)
    dense_tokens = dense.config.get_text_config().vocab_size
    pruned_tokens = model.config.get_text_config().vocab_size
    if dense_tokens != pruned_tokens:
        raise UserError(
            f"the dense model predicts {dense_tokens:,} tokens and the pruned one "
            f"{pruned_tokens:,}. Give "
            "the model that was pruned; resize_token_embeddings makes a padded vocabulary as long "
            "as the other."
        )
    options = CalibrationOptions(samples=samples, seqlen=seqlen, batch_size=batch_size, seed=seed)
    text = text_to_heal(data, tokenizer, options, model, dense, steps=steps).for_training
    tokens = text.in_turns
    logger.info("healing %s.", how_often(len(tokens), steps))
    check_agreement({"ids": text.signature, "steps": steps, "seed": seed, "labels": labels})
    zeros = find_masks(masks, model)
    moving = list(zeros)
    if weights == "all":
        architecture = architecture_of(model, ModelWeights(model))
        layers = (target.layer.parameter for target in updatable(architecture.select("all-linear")))
        moving = [*dict.fromkeys([*zeros, *layers]), *_norm_parameters(model, architecture)]
    if not moving:
        raise UserError("masks names no weights, so none would move. Give weights='all'.")
    at_once, checkpointing = _way_in_memory(model, moving, tokens, batch_size)
    with (
        tempfile.TemporaryDirectory(prefix="emp-llm-heal-") as folder,
        stage("heal"),
        in_evaluation_mode(dense),
        enough_memory(lambda: ("heal_model", model.device), tokens[:at_once]),
        _DenseLogits(dense, tokens) as dense_logits,
        tracking(report_to, "heal", {"steps": steps, "seed": seed}) as log,
    ):
        progress = Progress(Path(folder), steps)
        dense_logits.prepare(tokens, steps, seed, progress)
        healed = copy.deepcopy(model).float()
        record = train(
            healed,
            dense_logits,
            tokens,
            zeros,
            moving,
            progress,
            steps,
            labels=labels,
            at_once=at_once,
            checkpointing=checkpointing,
            seed=seed,
            log=log,
        )
    if record.best:
        for name in moving:
            values = model.get_parameter(name).data
            with as_created(values):
                values.copy_(in_dtype(healed.get_parameter(name).data, values.dtype))
    zeros.apply(model)
    return record


def text_to_heal(
    data: Any,
    tokenizer: Any,
    options: CalibrationOptions,
    *models: PreTrainedModel,
    steps: int,
) -> CalibrationText:
    """The text for models in memory; UserError if one of them cannot be healed by it."""
    training = sequences_for(steps)
    text = data_in_memory(data, tokenizer, options, models[0].config, training)
    if text is None:
        given = "" if data is None or data == [] else ", not batches"
        raise UserError(f"data: healing trains on text alone; give texts or token ids{given}.")
    check_healable(models[0].config.to_dict())
    check_trains(*text.tokens.shape)
    if any(is_offloaded(model) for model in models):
        raise UserError(
            "healing needs both models whole in memory, and a part of one is offloaded."
        )
    return text


def _way_in_memory(
    model: PreTrainedModel, moving: Sequence[str], tokens: Tensor, batch_size: int
) -> tuple[int, bool]:
    """Sequences at a time for a model in memory, and whether to checkpoint gradients: the fastest
    way that fits beside what its devices hold, else the smallest.
    """
    numels = [model.get_parameter(name).numel() for name in moving]
    devices = {parameter.device for parameter in model.parameters()}
    sizes = Sizes(
        model.config.to_dict(),
        model.config.get_text_config().num_hidden_layers,
        sum(numels),
        model.num_parameters() - sum(numels),
        max(numels),
        0,
        0,
        tokens.shape[1],
        len(tokens),
        has_bfloat16(model.device),
        model.dtype == torch.bfloat16,
    )
    room = len(devices) * min(free_on(device) for device in devices)
    most = 1 if model.device.type == "cpu" else min(batch_size, SEQUENCES)
    fastest_first = ways(sizes, down_from(most))
    fits = (way for way in fastest_first if sum(way[2].values()) <= room)
    at_once, checkpointing, _ = next(fits, fastest_first[-1])
    return at_once, checkpointing


def heal_folder(
    out: OutputFolder,
    dense: Path,
    recipe: Recipe,
    heal: Heal,
    data: CalibrationText,
    about: CalibrationRecord,
    plan: HealingPlan,
    *,
    dtype: str,
    trust_remote_code: bool = False,
    batch_size: int = SEQUENCES,
    seed: int = 0,
    report_to: str = "none",
) -> HealingRecord:
    """Train the weights of a pruned checkpoint in a work folder, and write them in place. A
    collective call.

    A call that was interrupted resumes from its last checkpoint, and writes the same bytes.

    Args:
        out: of the run, with the pruned checkpoint in `out.files`.
        dense: folder of the dense model.
        recipe: which layers were pruned.
        heal: which layers heal, and for how many steps.
        data: the text. Block by block, the calibration's part of it trains, of which all hidden
            states are kept; the whole model trains on all of it.
        about: the dense model, from `model_origin`.
        plan: whole or by blocks, and where; from `plan_healing`.
        dtype, trust_remote_code: of `load_model`.
        batch_size: as the record of its text names it.
        seed: of the order of the sequences.
        report_to: the tracker that gets the numbers of the training.

    Raises:
        UserError: memory runs out, the tracker does not start, or the checkpoints of the training
            do not fit on the disk.
    """
    checkpoint = Checkpoint(out.files)
    trust = trust_remote_code
    architecture = Architecture.of_checkpoint(checkpoint, recipe.targets.blocks, trust)
    targets = updatable(_choose(architecture, recipe, heal))
    by_blocks = plan.by == "blocks"
    if not by_blocks:
        data = data.for_training
    tokens = data.in_turns
    out.check_space(checkpoint.output_bytes + healing_bytes(checkpoint, targets, heal, by_blocks))
    out.note(healing_plan=asdict(plan))
    logger.info("healing %s.", plan.words())
    if not by_blocks:
        logger.info("healing %s.", how_often(len(tokens), heal.steps))
    dtype = _dtype_on(plan.device, dtype)
    settings = {"steps": heal.steps, "seed": seed, "by": plan.by}
    tracked = partial(tracking, report_to, out.path.name, settings)
    where = "healing", torch.device(plan.device)
    or_else = "" if by_blocks else ", or give --device-map disk"
    in_memory = partial(enough_memory, lambda: where, tokens[: plan.at_once], or_else)
    if by_blocks:
        updated = UpdatedWeights(out.work / "healing")
        with stage("heal"), in_memory(), tracked() as log:
            record = heal_blocks(
                load_model(dense, plan.device_map, dtype, trust, device=torch.device(plan.device)),
                targets,
                checkpoint,
                tokens,
                updated,
                heal.steps,
                at_once=plan.at_once,
                name_of_blocks=recipe.targets.blocks,
                hidden_states=plan.hidden_states,
                seed=seed,
                log=log,
            )
        _to_be_written_again(out)
        for target in targets if ranks().main else ():
            weight = updated.rows(target, 0, target.matrix.rows)
            if weight is not None:
                _overwrite(target.matrix, weight)
    else:
        while True:
            progress = Progress(out.work / "healing", heal.steps)
            try:
                with (
                    stage("heal"),
                    in_memory(),
                    _DenseLogits(
                        _teacher(dense, architecture, plan, dtype, trust),
                        tokens,
                        plan.hidden_states,
                        expendable=True,
                    ) as logits,
                    tracked() as log,
                ):
                    logits.prepare(tokens, heal.steps, seed, progress)
                    model, masks, moving, norms = _to_train(architecture, recipe, heal, plan, trust)
                    record = train(
                        model,
                        logits,
                        tokens,
                        masks,
                        moving,
                        progress,
                        heal.steps,
                        labels=heal.labels,
                        at_once=plan.at_once,
                        checkpointing=plan.checkpointing,
                        seed=seed,
                        log=log,
                    )
                break
            except UnfitError:  # its checkpoints are deleted
                logger.info("healing begins again.")
        if ranks().main and record.best:
            _to_be_written_again(out)
            _write_weights(checkpoint, architecture, model, targets, norms)
    record.origin = fit_origin(data, batch_size, about, record.by)
    record.origin.seed = seed  # of the order of the sequences
    return record


def _to_be_written_again(out: OutputFolder) -> None:
    """Note that an interrupted run writes the pruned shards again: from here on, they hold other
    weights than those that the training began with.
    """
    out.note(shards={})


def steps_of_minutes(
    minutes: float,
    pruned: Checkpoint,
    dense: Path,
    recipe: Recipe,
    heal: Heal,
    plan: HealingPlan,
    length: int,
    *,
    dtype: str,
    trust_remote_code: bool = False,
) -> int:
    """How many steps of the whole model take so long, by the second of two steps on random tokens.
    A collective call.

    Args:
        minutes: of the training, with its passes of the dense model and of held-out sequences.
        pruned, dense, recipe, heal, plan, dtype, trust_remote_code: as for `heal_folder`.
        length: tokens per sequence.

    Raises:
        UserError: they do not suffice for one step, or memory runs out.
    """
    trust = trust_remote_code
    architecture = Architecture.of_checkpoint(pruned, recipe.targets.blocks, trust)
    config = pruned.config.get("text_config") or pruned.config
    tokens = ranks().broadcast(torch.randint(config["vocab_size"], (SEQUENCES, length)))
    teacher = _teacher(dense, architecture, plan, _dtype_on(plan.device, dtype), trust)
    device = torch.device(plan.device)
    numbers = range(SEQUENCES)
    with (
        stage("time two steps"),
        _DenseLogits(teacher, tokens, plan.hidden_states, expendable=True) as logits,
        enough_memory(lambda: ("--heal-minutes", device), tokens[: plan.at_once]),
    ):
        logits.look_ahead(numbers, 0)
        model, masks, moving, _ = _to_train(architecture, recipe, heal, plan, trust)
        healer, adam = _healer(
            model, logits, tokens, masks, moving, plan.at_once, plan.checkpointing, heal.labels
        )
        for _ in range(2):
            began = time.perf_counter()
            float(healer.step(numbers))
            step = time.perf_counter() - began
        adam.finish()
    step = ranks().broadcast(step)
    # A forward pass is a third of a step. The dense model takes one for each step.
    measures = (_MEASURES + 1) * SET_ASIDE / SEQUENCES * step / 3
    steps = int((60 * minutes - measures) / (step + step / 3))
    if steps < 1:
        least = math.ceil((measures + 1.5 * step) / 0.6) / 100
        raise UserError(
            f"--heal-minutes {minutes:g}: a step takes {step:.1f} s, and the passes of held-out "
            f"sequences {measures:.1f} s. Give {least:g} or more."
        )
    return min(steps, MOST_STEPS)


def _dtype_on(device: str, dtype: str) -> str:
    """The dtype of the dense model: of float32 where the device has no bfloat16 instructions."""
    return "float32" if dtype == "auto" and not has_bfloat16(torch.device(device)) else dtype


def _choose(architecture: Architecture, recipe: Recipe, heal: Heal) -> list[Target]:
    """The weights that heal, if they can be updated."""
    if heal.weights == "all":
        return architecture.select("all-linear")
    return architecture.targets_of(recipe.targets)


def _to_train(
    architecture: Architecture, recipe: Recipe, heal: Heal, plan: HealingPlan, trust: bool
) -> tuple[PreTrainedModel, Masks, list[str], list[str]]:
    """A pruned checkpoint in memory, in float32; its zeros; the names of what moves; and those of
    the norms among it.
    """
    checkpoint = architecture.checkpoint
    device = torch.device(plan.device)
    model = load_model(checkpoint.folder, plan.device_map, "float32", trust, device=device)
    chosen = _choose(architecture, recipe, heal)
    layers = [target.layer.parameter for target in updatable(chosen)]
    norms = _norm_parameters(model, architecture) if heal.weights == "all" else []
    masks = read_masks(checkpoint, chosen, model)
    return model, masks, [*dict.fromkeys(layers), *norms], norms


def _teacher(
    folder: Path, architecture: Architecture, plan: HealingPlan, dtype: str, trust: bool
) -> PreTrainedModel:
    """The dense model. It stays on disk, from which each block is read when its turn comes; but
    transformers would write to disk what it puts together or dequantises, and blocks that cannot
    run alone would be read again for each sequence.
    """
    layers = [target.layer for target in architecture.select("all-linear")]
    quantised = "quantization_config" in architecture.checkpoint.config
    device = torch.device(plan.device)
    if not quantised and all(layer.expert is None for layer in layers):
        model = load_model(folder, "disk", dtype, trust, device=device)
        if _runner_of(model, torch.zeros(1, 2, dtype=torch.int64)) is not None:
            return model
        del model
    return load_model(folder, plan.device_map, dtype, trust, device=device)


def _write_weights(
    checkpoint: Checkpoint,
    architecture: Architecture,
    model: nn.Module,
    targets: Sequence[Target],
    norms: Sequence[str],
) -> None:
    """Put the weights of a healed model in the place of those of its checkpoint."""
    for target in targets:
        _overwrite(target.matrix, weight_of(model, target.layer))
    for name in norms:
        stored = checkpoint.tensors[architecture.stored_names[name]]
        row = Matrix(replace(stored, shape=(1, stored.numel)))
        _overwrite(row, model.get_parameter(name).data[None])


def _overwrite(matrix: Matrix, weight: Tensor) -> None:
    """Put a weight of shape (outputs, inputs) in the place of a matrix in its file."""
    words = words_of(in_dtype(weight.cpu(), torch_dtype(matrix.stored.dtype)).contiguous())
    with matrix.stored.shard.open("r+b") as file:
        for offset, raw in matrix.pieces(0, words):
            file.seek(offset)
            file.write(raw)


def train(
    model: PreTrainedModel,
    dense_logits: "_DenseLogits",
    tokens: Tensor,
    masks: Masks,
    moving: Iterable[str],
    progress: Progress,
    steps: int,
    *,
    labels: float = 0.0,
    at_once: int = 1,
    checkpointing: bool = False,
    seed: int = 0,
    log: Log | None = None,
) -> HealingRecord:
    """Move weights of a pruned model in memory, in place, until the held-out loss no longer falls.
    A collective call.

    Args:
        model: pruned, whole in memory, float32. If no step is better than none (`best` is 0), its
            weights are of no use.
        dense_logits: of the dense model.
        tokens: the text, int64, shape (sequences, length). One sequence of sixteen is held out: it
            chooses the step whose weights are kept.
        masks: weights that stay zero.
        moving: names of the parameters that move.
        progress: what an interrupted call with the same arguments has kept.
        labels: share of the next tokens of the text in what the model learns.
        steps, at_once, seed: number of steps of four sequences, sequences of a forward pass, and
            the seed of their order.
        checkpointing: of gradients: blocks keep their inputs alone, and run again.
        log: gets the numbers of each step.

    Raises:
        UserError: the dense model's loss is not finite.
    """
    healer, adam = _healer(
        model, dense_logits, tokens, masks, moving, at_once, checkpointing, labels
    )
    order = order_of(len(tokens), steps, seed)
    every = max(1, steps // _MEASURES)
    with (
        closing(progress_bar(steps, "heal", "step")) as bar,
        progress.writing(adam),
    ):
        if not progress.measured:
            progress.measured[0] = healer.measure()
            _check_dense(progress.measured[0])
            _log_measure(log, progress)
            progress.save()
        elif not progress.has_ended():
            progress.load(progress.step)
        bar.update(progress.step)
        while not progress.has_ended():
            step = progress.step
            dense_logits.look_ahead(order, step)
            adam.share = share_of_rate(step, steps) / progress.cut
            began = time.perf_counter()
            divergence = healer.step(order[SEQUENCES * step : SEQUENCES * (step + 1)])
            progress.step += 1
            if log is not None:
                rate = adam.rate * adam.share
                numbers = {"train/divergence": float(divergence), "train/rate": rate}
                seconds = time.perf_counter() - began
                numbers["train/tokens per second"] = SEQUENCES * tokens.shape[1] / seconds
                log(numbers, progress.step)
            bar.update(1)
            if progress.step % every == 0 or progress.step == steps:
                progress.measured[progress.step] = healer.measure()
                _log_measure(log, progress)
                progress.go_back_if_worse()
                progress.save()
        progress.load(progress.best)
    adam.finish()
    start = progress.measured[0]
    best = progress.measured[progress.best]
    return HealingRecord(
        steps=progress.step,
        tokens=progress.step * SEQUENCES * tokens.shape[1],
        best=progress.best,
        curve=[(step, measure.divergence) for step, measure in progress.measured.items()],
        perplexity={
            "dense": start.dense,
            "before": start.perplexity,
            "after": best.perplexity,
        },
    )


def _healer(
    model: PreTrainedModel,
    dense_logits: "_DenseLogits",
    tokens: Tensor,
    masks: Masks,
    moving: Iterable[str],
    at_once: int,
    checkpointing: bool,
    labels: float = 0.0,
) -> tuple["_Healer", Adam]:
    """The passes of a training, and what moves the weights; the arguments are those of `train`."""
    masks.apply(model)
    model.requires_grad_(False)
    model.eval()
    in_bfloat16 = has_bfloat16(model.device)
    parameters = {name: model.get_parameter(name) for name in moving}
    adam = Adam(parameters, masks, rate_of(model.config), in_bfloat16)
    if in_bfloat16:
        _halve_others(model)
    if checkpointing:
        _checkpoint_blocks(model)
    return _Healer(model, dense_logits, tokens, adam, at_once, in_bfloat16, labels), adam


def _log_measure(log: Log | None, progress: Progress) -> None:
    """Send what was measured on the held-out sequences after the present step."""
    if log is not None:
        measure = progress.measured[progress.step]
        numbers = {"divergence": measure.divergence, "perplexity": measure.perplexity}
        log({f"held out/{name}": value for name, value in numbers.items()}, progress.step)


def order_of(sequences: int, steps: int, seed: int) -> list[int]:
    """The numbers of the training sequences in the order of their visits, four for each step: all
    of them in one random order after another.
    """
    training = sequences - set_aside(sequences)
    generator = torch.Generator().manual_seed(seed)
    visits: list[int] = []
    while len(visits) < steps * SEQUENCES:
        visits += torch.randperm(training, generator=generator).tolist()
    return visits[: steps * SEQUENCES]


def how_often(sequences: int, steps: int) -> str:
    """How often a training reads each sequence of its text, in words."""
    training = sequences - set_aside(sequences)
    times = math.ceil(steps * SEQUENCES / training)
    words = f"trains on {count_of(min(training, steps * SEQUENCES), 'sequence')}"
    if times == 1:
        return f"{words}, each once"
    return f"{words}, each up to {times} times: the text has no more, and new text heals better"


def _visit(numbers: Sequence[int]) -> list[int]:
    """The sequences of a step that this rank visits: its own, or the first one if it has none."""
    return list(ranks().assigned(numbers)) or [numbers[0]]


def _check_dense(start: Measure) -> None:
    """Raise UserError if the dense model's probabilities are of no use."""
    if not math.isfinite(start.dense):
        raise UserError(
            f"healing: the dense model's perplexity is {start.dense} on the held-out text, so "
            "nothing can be learned from it. Its values may exceed its dtype; give --dtype float32."
        )


class _Healer:
    """The forward and backward passes of a training.

    Args:
        model: prepared for its training.
        dense_logits: of the dense model.
        tokens: the text, int64, shape (sequences, length).
        adam: moves the weights within the backward pass.
        at_once: sequences of a pass.
        in_bfloat16: the products.
        labels: share of the next tokens of the text in what the model learns.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dense_logits: "_DenseLogits",
        tokens: Tensor,
        adam: Adam,
        at_once: int,
        in_bfloat16: bool,
        labels: float = 0.0,
    ) -> None:
        self._model = model
        self._dense_logits = dense_logits
        self._tokens = tokens
        self._adam = adam
        self._at_once = at_once
        self._in_bfloat16 = in_bfloat16
        self._labels = labels
        self._passes = 0

    def step(self, numbers: Sequence[int]) -> Tensor:
        """Move the weights along the gradient of the mean divergence of four sequences.

        A rank with fewer sequences than others adds a gradient of zero, so that all ranks meet.

        Returns:
            The mean divergence of this rank's sequences, in nats per token.
        """
        total = torch.zeros((), device=self._model.device)
        own = list(ranks().assigned(numbers))
        in_place = _visit(numbers)[:1]
        passes = passes_of(self._at_once)
        self._adam.begin()
        for index in range(passes):
            chunk = own[index * self._at_once : (index + 1) * self._at_once]
            self._adam.due = index == passes - 1
            visited = chunk or in_place
            divergence = self._divergence(*self._logits(visited), self._tokens[visited])
            share = 1 / (len(numbers) * self._tokens.shape[1]) if chunk else 0.0
            (share * divergence).backward()  # type: ignore[no-untyped-call]
            if chunk:
                total += divergence.detach()
        self._adam.end()
        return total / (max(1, len(own)) * self._tokens.shape[1])

    @torch.no_grad()
    def measure(self) -> Measure:
        """The divergence and the perplexities of the held-out sequences, on all ranks."""
        length = self._tokens.shape[1]
        first = len(self._tokens) - set_aside(len(self._tokens))
        rows: list[tuple[int, float, float, float]] = []
        for number in ranks().assigned(range(first, len(self._tokens))):
            logits, wanted = self._logits([number])
            ids = self._tokens[number : number + 1]
            divergence = float(self._divergence(logits, wanted, ids)) / length
            losses = [float(mean_losses(each, ids)) for each in (logits, wanted)]
            rows.append((number, divergence, *losses))  # type: ignore[arg-type]
        gathered = torch.tensor(
            sorted(row for of_rank in ranks().gather(rows) for row in of_rank), dtype=torch.float64
        )
        _, divergence, loss, dense = gathered.mean(0)
        return Measure(float(divergence), float(loss.exp()), float(dense.exp()))

    def _logits(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The logits of some sequences, by the model and by the dense one, shape (sequences,
        length, vocabulary).
        """
        self._passes += 1
        if self._passes % _TRIM == 1:
            trim_heap()  # between passes little is in use
        ids = self._tokens[list(numbers)].to(self._model.device)
        products = torch.autocast(ids.device.type, torch.bfloat16, enabled=self._in_bfloat16)
        with products, fast_attention(ids.device, torch.float32):
            with torch.no_grad():
                wanted = self._dense_logits(numbers)
            logits = self._model(input_ids=ids, use_cache=False).logits
        return logits, wanted.to(logits.device)

    def _divergence(self, logits: Tensor, wanted: Tensor, ids: Tensor) -> Tensor:
        given = logits, wanted, ids, self._labels
        return _Divergence.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


def _checkpoint_blocks(model: PreTrainedModel) -> None:
    """Gradient checkpointing: the blocks keep their inputs alone, and run again for gradients."""
    for block in find_blocks(model)[1]:
        block.forward = partial(
            gradient_checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # there is no dropout
            context_fn=lambda: (nullcontext(), fast_attention(model.device, torch.float32)),
        )


def _halve_others(model: nn.Module) -> None:
    """Keep tables and matrices that do not move in bfloat16 where that changes no bit of a product.
    Hidden states stay in float32.
    """
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not weight.requires_grad:
            users.setdefault(weight, []).append(module)
    for weight, modules in users.items():
        halved = weight.data.bfloat16()
        known = all(type(module) in (nn.Linear, nn.Embedding) for module in modules)
        if known and torch.equal(halved.float(), weight.data):
            weight.data = halved
            for module in modules:
                if isinstance(module, nn.Embedding):
                    module.register_forward_hook(lambda module, given, output: output.float())


class _DenseLogits(AbstractContextManager["_DenseLogits"]):
    """The dense model's logits of sequences of the text. Use it as a context.

    The sequences pass through the dense blocks before they are needed, and their last hidden states
    are kept; only the final norm and the head run again. The logits have the same bits as those of
    the whole model, which runs for each sequence where its blocks cannot run alone.

    Args:
        dense: the model.
        tokens: the text, int64, shape (sequences, length).
        hidden_states: where they are kept.
        expendable: the blocks are not needed when all sequences have passed through them.
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        tokens: Tensor,
        hidden_states: Place = "auto",
        expendable: bool = False,
    ) -> None:
        self._dense = dense
        self._tokens = tokens
        self._runner = _runner_of(dense, tokens[:1])
        if self._runner is not None:
            self._runner.hidden_states = hidden_states
        self._expendable = expendable
        self._walks: dict[str, Walk] = {}
        self._places: dict[int, tuple[str, int]] = {}  # number -> its walk, and its place there
        size = tokens.shape[1] * hidden_width(dense.config.to_dict()) * dense.dtype.itemsize
        self._piece = max(SEQUENCES, _PIECE // ranks_here() // size)  # sequences

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """The logits of some sequences, shape (sequences, length, vocabulary)."""
        if self._runner is None:
            ids = self._tokens[list(numbers)].to(self._dense.device)
            logits: Tensor = self._dense(input_ids=ids, use_cache=False).logits
            return logits
        together: Tensor | None = None
        for row, number in enumerate(numbers):
            name, place = self._places[number]
            of_one: Tensor = self._walks[name].tail(place).logits
            if len(numbers) == 1:
                return of_one
            if together is None:  # `torch.cat` would hold all of them twice
                together = of_one.new_empty((len(numbers), *of_one.shape[1:]))
            together[row] = of_one[0]
        assert together is not None
        return together

    def prepare(self, tokens: Tensor, steps: int, seed: int, progress: Progress) -> None:
        """Run the blocks for the held-out sequences and for the first steps of a training. They are
        done before its model takes memory.
        """
        if not progress.has_ended():
            sequences = len(tokens)
            held = set_aside(sequences)
            own = ranks().assigned(range(sequences - held, sequences))
            self._keep("held out", list(own))
            self.look_ahead(order_of(sequences, steps, seed), progress.step)

    def look_ahead(self, order: Sequence[int], step: int) -> None:
        """Run the blocks for the visits from a step on, as many as may be kept at a time, unless
        those of the step are kept already.
        """
        here = _visit(order[SEQUENCES * step : SEQUENCES * (step + 1)])
        if self._runner is None or self._places.keys() >= set(here):
            return
        firsts = range(SEQUENCES * step, len(order), SEQUENCES)
        visits = [number for first in firsts for number in _visit(order[first : first + SEQUENCES])]
        coming = list(islice(dict.fromkeys(visits), self._piece))
        self._keep("training", coming)
        if self._expendable and set(coming) == set(visits):
            self._runner.blocks.to("meta")

    def _keep(self, name: str, numbers: list[int]) -> None:
        """Keep the hidden states of some sequences, in place of others of the same name."""
        self._drop(name)
        if self._runner is None or not numbers:
            return
        walk = self._walks[name] = self._runner.walk(torch.split(self._tokens[numbers], 1), "dense")
        for step in walk.steps():
            step.run()
        if self._runner.hidden_states == "auto":
            walk.hidden = walk.hidden.off_device()
        self._places |= {number: (name, place) for place, number in enumerate(numbers)}

    def _drop(self, name: str) -> None:
        if name in self._walks:
            self._walks.pop(name).__exit__()
            self._places = {key: place for key, place in self._places.items() if place[0] != name}

    def __exit__(self, *_: object) -> None:
        for name in list(self._walks):
            self._drop(name)


def _runner_of(model: PreTrainedModel, batch: Tensor) -> BlockwiseModel | None:
    """The model, block by block; None if its blocks cannot be told apart."""
    try:
        runner = BlockwiseModel(model)
        runner.prepare(batch)
    except UserError:
        return None
    return runner


class _Divergence(torch.autograd.Function):
    """The sum over the tokens of KL(q || pruned) in nats, of logits of shape (sequences, tokens,
    vocabulary). q are the wanted probabilities, mixed with a share of labels: the next of the ids,
    int64, shape (sequences, tokens). The last token has none.

    The gradient for the pruned logits, softmax(logits) - q, comes with the value: memory holds
    float32 copies of a few positions at a time, and nothing is computed twice.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, wanted: Tensor, ids: Tensor, labels: float) -> Tensor:
        gradient = torch.empty_like(logits) if context.needs_input_grad[0] else None
        sums = []
        for first in range(0, logits.shape[1], POSITIONS):
            here = slice(first, first + POSITIONS)
            of_pruned = logits[:, here].float().log_softmax(-1)
            of_dense = wanted[:, here].float().log_softmax(-1)
            probabilities = of_dense.exp()
            if labels:
                following = ids[:, first + 1 : first + POSITIONS + 1, None].to(logits.device)
                mixed = probabilities[:, : following.shape[1]].mul_(1 - labels)
                mixed.scatter_add_(
                    -1, following, torch.full_like(following, labels, dtype=mixed.dtype)
                )
                of_dense = probabilities.clamp(min=torch.finfo(mixed.dtype).tiny).log_()
            sums.append(of_dense.sub_(of_pruned).mul_(probabilities).sum())
            if gradient is not None:
                gradient[:, here] = of_pruned.exp_().sub_(probabilities)
        if gradient is not None:
            context.save_for_backward(gradient)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(context: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = context.saved_tensors
        return gradient.mul_(scale), None, None, None


def healing_warnings(healing: HealingRecord) -> list[str]:
    """A sentence if the training was of no use."""
    if healing.best:
        return []
    return [
        "healing did not lower the divergence on held-out sequences, so the weights are those "
        "before it."
    ]


def _norm_parameters(model: nn.Module, architecture: Architecture) -> list[str]:
    """The parameters of normalisations in the blocks of a model."""
    names = (
        (name, model.get_submodule(name.rpartition(".")[0])) for name in architecture.block_shapes
    )
    return [name for name, module in names if "norm" in type(module).__name__.lower()]
