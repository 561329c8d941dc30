"""Healing: the kept weights of a pruned model learn the dense model's next-token probabilities.
Zeros stay zero.

    min over the kept weights of mean_t KL(p_dense(. | x_<=t) || p_pruned(. | x_<=t))

on the calibration text, without labels or further data: Adam on float32 weights, products in
bfloat16 where the processor has instructions for them. A step is four sequences, on any number of
devices and ranks. Each weight moves as soon as its gradient is known, within the backward pass.

The dense model runs first: its last hidden states are kept, and its blocks are not in memory while
the pruned model trains.
"""

import copy
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_twice
from transformers import PreTrainedModel

from emp_llm.calibration.data import CalibrationText, data_in_memory
from emp_llm.calibration.passes import fit_origin, in_evaluation_mode
from emp_llm.checkpoint.agreement import check_agreement
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import file_hash, read_json, write_bytes, write_json
from emp_llm.checkpoint.matrices import Matrix, torch_dtype
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError
from emp_llm.common.machine import available_memory, has_bfloat16, out_of_memory, trim_heap
from emp_llm.common.progress import progress_bar, stage
from emp_llm.common.ranks import ranks
from emp_llm.healing.blocks import heal_blocks, rate_of, rate_of_weight, share_of_rate
from emp_llm.healing.checks import SEQUENCES, check_healable, healing_bytes
from emp_llm.healing.memory import HealingPlan, Sizes, free_on, passes_of, ways
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.attention import FastAttention
from emp_llm.models.blockwise import BlockwiseModel, Walk
from emp_llm.models.loading import load_model
from emp_llm.models.masks import Masks
from emp_llm.models.model_weights import ModelWeights, architecture_of
from emp_llm.models.modules import find_blocks, mean_losses, set_to_zero, weight_of
from emp_llm.models.offload import is_offloaded
from emp_llm.models.reapply import find_masks, stored_masks
from emp_llm.models.sharded import check_not_sharded
from emp_llm.options.calibration import CalibrationOptions, Place
from emp_llm.options.recipe import Heal, Recipe
from emp_llm.records.run_report import HealingRecord
from emp_llm.records.source import CalibrationRecord
from emp_llm.selection.rows import words_of
from emp_llm.walk.checks import held_out, updatable
from emp_llm.walk.moved import MovedWeights, in_dtype

logger = logging.getLogger(__name__)
_RECORD = "progress.json"  # of a training, beside the folders of its checkpoints
_RISE = 1.02  # of the held-out loss; a high rate may raise it by less for a while
_CUT = 3.0  # the rate is divided by this where the loss rises, and by its square where it doubles
_PATIENCE = 4  # rises in a row
_TRIM = 2  # passes between two trims of the heap: with one at each, 0.1 GB less and a tenth longer
_POSITIONS = 32  # of a sequence whose probabilities are in memory at a time
_MEASURES = 10  # of the held-out loss
_PART = 1 << 28  # bytes of a file of a checkpoint
_PIECE = 16 << 30  # bytes of the dense model's hidden states that are kept at a time
_BETAS = (0.9, 0.95)  # of Adam
_EPSILON = 1e-8


def heal_model(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    data: Any,
    tokenizer: Any = None,
    *,
    masks: Masks | Path | str | Mapping[str, Tensor],
    weights: Literal["targets", "all"] = "targets",
    steps: int = 300,
    samples: int | None = None,
    seqlen: int | None = None,
    batch_size: int = SEQUENCES,
    seed: int = 0,
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
        batch_size: sequences per forward pass.

    Returns:
        The divergence on held-out sequences during the training, which chose the weights.

    Raises:
        UserError: a model is not whole in memory, the masks are of another model, or the text is
            missing or too short.
    """
    if weights not in ("targets", "all"):
        raise UserError(f"weights must be 'targets' or 'all', got {weights!r}.")
    if type(steps) is not int or steps < 1:
        raise UserError(f"steps must be a whole number of at least 1, got {steps!r}.")
    for given in (model, dense):
        if not isinstance(given, PreTrainedModel):
            raise UserError(
                f"model is a {type(given).__name__}; heal_model takes a model of transformers. Of "
                "a wrapped model, give what is inside (model.module)."
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
    text = text_to_heal(data, tokenizer, options, model, dense)
    check_agreement({"ids": text.signature, "steps": steps, "seed": seed})
    zeros = find_masks(masks, model)
    moving = list(zeros)
    if weights == "all":
        architecture = architecture_of(model, ModelWeights(model))
        layers = (target.layer.parameter for target in updatable(architecture.select("all-linear")))
        moving = [*dict.fromkeys([*zeros, *layers]), *_norm_parameters(model, architecture)]
    at_once, twice = _way_in_memory(model, moving, text.tokens, batch_size)
    with (
        tempfile.TemporaryDirectory(prefix="emp-llm-heal-") as folder,
        stage("heal"),
        _DenseLogits(dense, text.tokens) as dense_logits,
    ):
        progress = _Progress(Path(folder))
        dense_logits.prepare(text.tokens, steps, seed, progress)
        healed = copy.deepcopy(model).float()
        record = train(
            healed,
            dense_logits,
            text.tokens,
            zeros,
            moving,
            progress,
            steps,
            at_once=at_once,
            twice=twice,
            seed=seed,
        )
    if record.best:
        for name in moving:
            values = model.get_parameter(name).data
            values.copy_(in_dtype(healed.get_parameter(name).data, values.dtype))
    zeros.apply(model)
    return record


def text_to_heal(
    data: Any, tokenizer: Any, options: CalibrationOptions, *models: PreTrainedModel
) -> CalibrationText:
    """The text for models in memory; UserError if one of them cannot be healed by it."""
    text = data_in_memory(data, tokenizer, options, models[0].config)
    if text is None:
        raise UserError("data: healing trains on text alone; give texts or token ids, not batches.")
    check_healable(models[0].config.to_dict(), text)
    if any(is_offloaded(model) for model in models):
        raise UserError(
            "healing needs both models whole in memory, and a part of one is offloaded."
        )
    return text


def _way_in_memory(
    model: PreTrainedModel, moving: Sequence[str], tokens: Tensor, batch_size: int
) -> tuple[int, bool]:
    """Sequences at a time for a model in memory, and whether its blocks are computed twice: the
    fastest way that fits beside what its devices hold, else the smallest.
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
    )
    room = len(devices) * min(free_on(device) for device in devices)
    most = 1 if model.device.type == "cpu" else min(batch_size, SEQUENCES)
    fastest_first = list(ways(sizes, most))
    fits = (way for way in fastest_first if sum(way[2].values()) <= room)
    at_once, twice, _ = next(fits, fastest_first[-1])
    return at_once, twice


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
) -> HealingRecord:
    """Train the weights of a pruned checkpoint in a work folder, and write them in place. A
    collective call.

    A call that was interrupted resumes from its last checkpoint, and writes the same bytes.

    Args:
        out: of the run, with the pruned checkpoint in `out.files`.
        dense: folder of the dense model.
        recipe: which layers were pruned.
        heal: which layers heal, and for how many steps.
        data: the text.
        about: the dense model, from `model_origin`.
        plan: whole or by blocks, and where; from `plan_healing`.
        dtype, trust_remote_code: of `load_model`.
        batch_size: as the record of its text names it.
        seed: of the order of the sequences.

    Raises:
        UserError: memory runs out, or the checkpoints of the training do not fit on the disk.
    """
    checkpoint = Checkpoint(out.files)
    trust = trust_remote_code
    architecture = Architecture.of_checkpoint(checkpoint, recipe.targets.blocks, trust)
    everything = heal.weights == "all"
    chosen = (
        architecture.select("all-linear") if everything else architecture.targets_of(recipe.targets)
    )
    targets = updatable(chosen)
    by_blocks = plan.by == "blocks"
    out.check_space(checkpoint.output_bytes + healing_bytes(checkpoint, targets, heal, by_blocks))
    out.note(healing_plan=asdict(plan))
    logger.info("healing %s.", plan.words())
    device = torch.device(plan.device)
    if dtype == "auto" and not has_bfloat16(device):
        dtype = "float32"
    if by_blocks:
        teacher = load_model(dense, plan.device_map, dtype, trust, device=device)
        moved = MovedWeights(out.work / "healing")
        with stage("heal"), in_evaluation_mode(teacher):
            record = heal_blocks(
                teacher,
                targets,
                checkpoint,
                data.tokens,
                moved,
                heal.steps,
                at_once=plan.at_once,
                name_of_blocks=recipe.targets.blocks,
                hidden_states=plan.hidden_states,
                seed=seed,
            )
        for target in targets if ranks().main else ():
            weight = moved.rows(target, 0, target.matrix.rows)
            if weight is not None:
                _overwrite(target.matrix, weight)
    else:
        progress = _Progress(out.work / "healing")
        if out.get("healed") and not progress.measured:
            raise UserError(
                f"{out.work}: some weights are healed, and the training that healed "
                "them is lost. Delete it."
            )
        teacher = _teacher(dense, architecture, plan, dtype, trust)
        with stage("heal"), _DenseLogits(teacher, data.tokens, plan.hidden_states, True) as logits:
            logits.prepare(data.tokens, heal.steps, seed, progress)
            model = load_model(out.files, plan.device_map, "float32", trust, device=device)
            norms = _norm_parameters(model, architecture) if everything else []
            moving = [*dict.fromkeys(target.layer.parameter for target in targets), *norms]
            record = train(
                model,
                logits,
                data.tokens,
                stored_masks(checkpoint, chosen, model),
                moving,
                progress,
                heal.steps,
                at_once=plan.at_once,
                twice=plan.checkpointing,
                seed=seed,
            )
        if ranks().main and record.best:
            # From here on, the weights are no longer those that the training began with.
            out.note(healed=True)
            _write_weights(checkpoint, architecture, model, targets, norms)
    record.origin = fit_origin(data, batch_size, about, record.by)
    record.origin.seed = seed  # of the order of the sequences
    return record


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
    progress: "_Progress",
    steps: int,
    *,
    at_once: int = 1,
    twice: bool = False,
    seed: int = 0,
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
        steps, at_once, seed: number of steps of four sequences, sequences of a forward pass, and
            the seed of their order.
        twice: blocks keep their inputs alone, and run again for the gradients.

    Raises:
        UserError: memory runs out, or the dense model's loss is not finite.
    """
    masks.apply(model)
    model.requires_grad_(False)
    model.eval()
    in_bfloat16 = has_bfloat16(model.device)
    adam = _Adam(model, moving, masks, rate_of(model.config), in_bfloat16)
    if in_bfloat16:
        _halve_others(model)
    if twice:
        _run_blocks_twice(model)
    healer = _Healer(model, dense_logits, tokens, adam, at_once, in_bfloat16)
    order = order_of(len(tokens), steps, seed)
    every = max(1, steps // _MEASURES)
    remedy = (
        "healing: out of memory. Give a lower --batch-size or --seqlen, or heal block by "
        "block with --device-map disk."
    )
    with (
        closing(progress_bar(steps, "heal", "step")) as bar,
        out_of_memory(lambda: remedy),
        progress.writing(adam),
    ):
        if not progress.measured:
            progress.measured[0] = healer.measure()
            _check_dense(progress.measured[0])
            progress.save()
        elif not progress.has_ended(steps):
            progress.load(progress.step)
        bar.update(progress.step)
        while not progress.has_ended(steps):
            step = progress.step
            dense_logits.look_ahead(order, step)
            adam.share = share_of_rate(step, steps) / progress.cut
            healer.step(order[SEQUENCES * step : SEQUENCES * (step + 1)])
            progress.step += 1
            bar.update(1)
            if progress.step % every == 0 or progress.step == steps:
                progress.measured[progress.step] = healer.measure()
                progress.go_back_if_worse()
                progress.save()
        progress.load(progress.best)
    adam.finish()
    start, best = progress.measured[0], progress.measured[progress.best]
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


def order_of(sequences: int, steps: int, seed: int) -> list[int]:
    """The numbers of the training sequences in the order of their visits, four for each step: all
    of them in one random order after another.
    """
    training = sequences - held_out(sequences)
    generator = torch.Generator().manual_seed(seed)
    visits: list[int] = []
    while len(visits) < steps * SEQUENCES:
        visits += torch.randperm(training, generator=generator).tolist()
    return visits[: steps * SEQUENCES]


def _visited(numbers: Sequence[int]) -> list[int]:
    """The sequences of a step that this rank visits: its own, or the first one if it has none."""
    return list(ranks().assigned(numbers)) or [numbers[0]]


def _check_dense(start: "Measure") -> None:
    """Raise UserError if the dense model's probabilities are of no use."""
    if not math.isfinite(start.dense):
        raise UserError(
            f"healing: the dense model's perplexity is {start.dense} on the held-out text, so "
            "nothing can be learned from it. Its values may exceed its dtype; give --dtype float32."
        )


@dataclass(frozen=True)
class Measure:
    """What was measured on the held-out sequences.

    Attributes:
        divergence: from the dense model, in nats per token.
        perplexity, dense: of the model that heals, and of the dense one.
    """

    divergence: float
    perplexity: float
    dense: float


class _Healer:
    """The forward and backward passes of a training.

    Args:
        model: prepared for its training.
        dense_logits: of the dense model.
        tokens: the text, int64, shape (sequences, length).
        adam: moves the weights within the backward pass.
        at_once: sequences of a pass.
        in_bfloat16: the products.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dense_logits: "_DenseLogits",
        tokens: Tensor,
        adam: "_Adam",
        at_once: int,
        in_bfloat16: bool,
    ) -> None:
        self._model = model
        self._dense_logits = dense_logits
        self._tokens = tokens
        self._adam = adam
        self._at_once = at_once
        self._in_bfloat16 = in_bfloat16
        self._passes = 0

    def step(self, numbers: Sequence[int]) -> None:
        """Move the weights along the gradient of the mean divergence of four sequences.

        A rank with fewer sequences than others adds a gradient of zero, so that all ranks meet.
        """
        own = list(ranks().assigned(numbers))
        in_place = _visited(numbers)[:1]
        passes = passes_of(self._at_once)
        self._adam.begin()
        for index in range(passes):
            chunk = own[index * self._at_once : (index + 1) * self._at_once]
            self._adam.due = index == passes - 1
            divergence = self._divergence(*self._logits(chunk or in_place))
            share = 1 / (len(numbers) * self._tokens.shape[1]) if chunk else 0.0
            (share * divergence).backward()  # type: ignore[no-untyped-call]
        self._adam.end()

    @torch.no_grad()
    def measure(self) -> Measure:
        """The divergence and the perplexities of the held-out sequences, on all ranks."""
        length = self._tokens.shape[1]
        first = len(self._tokens) - held_out(len(self._tokens))
        rows: list[tuple[int, float, float, float]] = []
        for number in ranks().assigned(range(first, len(self._tokens))):
            logits, wanted = self._logits([number])
            ids = self._tokens[number : number + 1]
            divergence = float(self._divergence(logits, wanted)) / length
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
        with products, FastAttention():
            with torch.no_grad():
                wanted = self._dense_logits(numbers)
            logits = self._model(input_ids=ids, use_cache=False).logits
        return logits, wanted.to(logits.device)

    @staticmethod
    def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
        return _Divergence.apply(logits, wanted)  # type: ignore[no-untyped-call, no-any-return]


def _run_blocks_twice(model: PreTrainedModel) -> None:
    """Let the blocks keep their inputs alone, and compute the rest again for their gradients."""
    for block in find_blocks(model)[1]:
        block.forward = partial(
            run_twice,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # there is no dropout
            context_fn=lambda: (nullcontext(), FastAttention()),
        )


def _halve_others(model: nn.Module) -> None:
    """Keep the weights that do not move in bfloat16 where that changes no bit of a product."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        weight = module.weight if type(module) is nn.Linear else None
        if weight is None or weight.requires_grad or weight in tables:
            continue
        halved = weight.data.bfloat16()
        if torch.equal(halved.float(), weight.data):
            weight.data = halved


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
        config = dense.config.get_text_config()
        size = tokens.shape[1] * config.hidden_size * dense.dtype.itemsize
        self._piece = max(SEQUENCES, _PIECE // size)  # sequences

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """The logits of some sequences, shape (sequences, length, vocabulary)."""
        if self._runner is None:
            ids = self._tokens[list(numbers)].to(self._dense.device)
            logits: Tensor = self._dense(input_ids=ids, use_cache=False).logits
            return logits
        places = [self._places[number] for number in numbers]
        return torch.cat([self._walks[name].tail(place).logits for name, place in places])

    def prepare(self, tokens: Tensor, steps: int, seed: int, progress: "_Progress") -> None:
        """Run the blocks for the held-out sequences and for the first steps of a training. They are
        done before its model takes memory.
        """
        if not progress.has_ended(steps):
            sequences = len(tokens)
            held = held_out(sequences)
            own = ranks().assigned(range(sequences - held, sequences))
            self._keep("held out", list(own))
            self.look_ahead(order_of(sequences, steps, seed), progress.step)

    def look_ahead(self, order: Sequence[int], step: int) -> None:
        """Run the blocks for the visits from a step on, as many as may be kept at a time, unless
        those of the step are kept already.
        """
        here = _visited(order[SEQUENCES * step : SEQUENCES * (step + 1)])
        if self._runner is None or self._places.keys() >= set(here):
            return
        firsts = range(SEQUENCES * step, len(order), SEQUENCES)
        visits = [number for first in firsts for number in _visited(order[first:][:SEQUENCES])]
        coming = list(islice(dict.fromkeys(visits), self._piece))
        self._keep("training", coming)
        if self._expendable and set(coming) == set(visits):
            self._runner.blocks.to("meta")

    def _keep(self, name: str, numbers: list[int]) -> None:
        """Keep the hidden states of some sequences, in place of others of the same name."""
        self._drop(name)
        if self._runner is None or not numbers:
            return
        walk = self._runner.walk(torch.split(self._tokens[numbers], 1), "dense")
        for step in walk.steps():
            step.run()
        if self._runner.hidden_states == "auto":
            walk.hidden = walk.hidden.off_device()
        self._walks[name] = walk
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
    """The sum over the tokens of KL(wanted || pruned) in nats, of logits of shape (sequences,
    tokens, vocabulary).

    The gradient for the pruned logits, softmax(logits) - softmax(wanted), comes with the value:
    memory holds float32 copies of a few positions at a time, and nothing is computed twice.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        gradient = torch.empty_like(logits) if context.needs_input_grad[0] else None
        sums = []
        for first in range(0, logits.shape[1], _POSITIONS):
            here = slice(first, first + _POSITIONS)
            of_pruned = logits[:, here].float().log_softmax(-1)
            of_dense = wanted[:, here].float().log_softmax(-1)
            probabilities = of_dense.exp()
            sums.append(of_dense.sub_(of_pruned).mul_(probabilities).sum())
            if gradient is not None:
                gradient[:, here] = of_pruned.exp_().sub_(probabilities)
        if gradient is not None:
            context.save_for_backward(gradient)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(context: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient,) = context.saved_tensors
        return gradient.mul_(scale), None


class _Progress:
    """How far a training is, in a folder: the last checkpoint and the best one, and a record of
    both. The first rank writes; all ranks read.

    Args:
        folder: what an interrupted training left there is taken up, or deleted if it is damaged.

    Attributes:
        step: steps that are done.
        cut: divides the rate.
        measured: step -> what was measured.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        record = ranks().first(partial(_intact_record, folder)) or {}
        self.step: int = record.get("step", 0)
        self.cut: float = record.get("cut", 1.0)
        self.measured: dict[int, Measure] = {
            step: Measure(*(math.nan if value is None else value for value in values))
            for step, *values in record.get("measured", ())
        }
        self._hashes: dict[str, str] = record.get("files", {})
        self._adam: _Adam | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @property
    def best(self) -> int:
        """The step with the lowest divergence; the first of several."""

        def rank(step: int) -> tuple[bool, float]:
            divergence = self.measured[step].divergence
            return not math.isfinite(divergence), divergence

        return min(self.measured, key=rank)

    @property
    def _losses(self) -> list[float]:
        return [measure.divergence for measure in self.measured.values()]

    def has_ended(self, steps: int) -> bool:
        """Whether all steps are done, or the held-out loss rose so many times in a row that no
        lower rate will help.
        """
        losses = self._losses
        hopeless = len(losses) > _PATIENCE and all(
            _rises(losses[: len(losses) - n]) for n in range(_PATIENCE)
        )
        return self.step >= steps or hopeless

    @contextmanager
    def writing(self, adam: "_Adam") -> Iterator[None]:
        """Inside this context, checkpoints are of the weights that `adam` moves. Those of a GPU are
        written beside the training.
        """
        self._adam = adam
        with ThreadPoolExecutor(1, "emp-llm-healing") as self._thread:
            yield
            self._finish_writing()

    def save(self) -> None:
        """Write a checkpoint of the present step, and delete those that it replaces."""
        if not ranks().main or self._adam is None or self._thread is None:
            return
        self._finish_writing()
        values = self._adam.parts(with_states=self.step > 0)
        record = {
            "step": self.step,
            "cut": self.cut,
            "measured": [
                [step, *(value if math.isfinite(value) else None for value in astuple(measure))]
                for step, measure in self.measured.items()
            ],
        }
        kept = {_checkpoint(self.step), _checkpoint(self.best)}
        if self._adam.on_cpu or 2 * self._adam.bytes > available_memory():
            self._write(values, record, kept)
        else:
            self._pending = self._thread.submit(self._write, list(values), record, kept)

    def _write(
        self, parts: Iterable[dict[str, Tensor]], record: dict[str, Any], kept: set[str]
    ) -> None:
        folder = self._folder / _checkpoint(record["step"])
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted write
        hashes = {
            name: value for name, value in self._hashes.items() if name.partition("/")[0] in kept
        }
        for number, part in enumerate(parts):
            path = folder / f"{number:05d}.safetensors"
            write_bytes(path, save(part))
            hashes[f"{folder.name}/{path.name}"] = file_hash(path)
        write_json(self._folder / _RECORD, record | {"files": hashes})
        self._hashes = hashes
        for path in self._folder.glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path)

    def _finish_writing(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def load(self, step: int, with_states: bool = True) -> None:
        """Give the weights the values that they had after a step; `with_states`: and their
        gradients' moments, which begin anew otherwise. A collective call.
        """
        ranks().first(self._finish_writing)
        assert self._adam is not None
        self._adam.forget()
        for path in sorted((self._folder / _checkpoint(step)).glob("*.safetensors")):
            self._adam.restore(load_file(path), with_states)

    def go_back_if_worse(self) -> None:
        """Where the held-out loss rises, take the best weights again, with a lower rate."""
        if _rises(self._losses):
            self.cut *= _CUT**2 if _rises(self._losses, 2.0) else _CUT
            self.load(self.best, with_states=False)


def _checkpoint(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step}"


def _intact_record(folder: Path) -> dict[str, Any] | None:
    """The record of an interrupted training whose files are as they were written; None if there is
    none. What cannot be taken up is deleted.
    """
    if not os.path.lexists(folder):
        return None
    with suppress(UserError, OSError, AttributeError):
        record = read_json(folder / _RECORD)
        if all(file_hash(folder / name) == value for name, value in record["files"].items()):
            return record
    if folder.is_dir() and not any(folder.iterdir()):
        return None
    logger.warning(
        "healing: %s is damaged or incomplete, so the training begins again.", folder.name
    )
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink()
    return None


def _rises(losses: list[float], times: float = _RISE) -> bool:
    """Whether the last loss is NaN, or at least `times` the best one before it."""
    return len(losses) > 1 and not losses[-1] < times * min(losses[:-1])


@dataclass
class _Moving:
    """A parameter that moves.

    Attributes:
        parameter: of the model.
        rate: the highest one.
        lower: the lower half of a weight in two halves, int16; None: the parameter is of float32.
        steps: how often it has moved since its moments began.
        mean, square: the moments of its gradients, bfloat16; None before the first step.
    """

    parameter: nn.Parameter
    rate: float
    lower: Tensor | None
    steps: int = 0
    mean: Tensor | None = None
    square: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The weight in float32; of one in two halves, a copy."""
        if self.lower is None:
            return self.parameter.data
        upper = self.parameter.data.view(torch.int16).int() << 16
        return upper.add_(self.lower).view(torch.float32)

    @value.setter
    def value(self, value: Tensor) -> None:
        if self.lower is None:
            self.parameter.data.copy_(value)
        else:
            upper, lower = _halves(value)
            self.parameter.data.copy_(upper)
            self.lower.copy_(lower)


class _Adam:
    """Adam (Kingma & Ba 2015, arXiv 1412.6980) on float32 weights in two halves of 16 bits. The
    model computes with the upper one, which is the weight in bfloat16. The lower one lies here.

    The two moments of each weight are of bfloat16. A step changes the second by a twentieth, far
    more than rounding. A weight takes 6 bytes beside the model's: its lower half and two moments.
    Its gradient is freed as soon as it has moved, within the last backward pass of a step.

    Args:
        model: float32, with zeros where the masks have them.
        moving: names of the parameters that move; from now on they take gradients.
        masks: weights that stay zero.
        rate: as a share of the root mean square of each parameter's kept weights.
        halved: whether the weights are halved; else they stay float32.

    Attributes:
        share: of the rate, in this step.
        due: whether this backward pass is the last one of its step.
    """

    def __init__(
        self, model: nn.Module, moving: Iterable[str], masks: Masks, rate: float, halved: bool
    ) -> None:
        self.share = 1.0
        self.due = True
        self._masks = masks
        self._weights: dict[str, _Moving] = {}
        self._order: list[str] = []  # of the weights that are still to move in this step
        self._complete: set[str] = set()  # those of them whose gradients are complete
        self._handles = []
        for name in moving:
            parameter = model.get_parameter(name)
            weight = _Moving(parameter, rate_of_weight(parameter.data, rate), None)
            if halved:
                parameter.data, weight.lower = _halves(parameter.data)
            parameter.requires_grad_(True)
            self._weights[name] = weight
            hook = partial(self._has_gradient, name)
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(hook))

    @property
    def on_cpu(self) -> bool:
        """Whether the weights lie in the memory of the CPU."""
        return all(weight.parameter.device.type == "cpu" for weight in self._weights.values())

    @property
    def bytes(self) -> int:
        """Of a checkpoint, at most."""
        return sum(8 * weight.parameter.numel() for weight in self._weights.values())

    def begin(self) -> None:
        """Begin a step."""
        self._order = list(reversed(self._weights))  # as the gradients come, nearly
        self._complete = set()

    def end(self) -> None:
        """Move what the last pass gave no gradient: experts that only earlier passes have reached,
        or those of other ranks.
        """
        for name in self._order:
            if ranks().count > 1 or self._weights[name].parameter.grad is not None:
                self._move(name)
        self._order = []

    def _has_gradient(self, name: str, parameter: Tensor) -> None:
        """Move a weight whose gradient is complete. Several ranks add theirs in the same order."""
        if not self.due:
            return
        if ranks().count == 1:
            self._move(name)
            return
        self._complete.add(name)
        while self._order and self._order[0] in self._complete:
            self._move(self._order.pop(0))

    @torch.no_grad()
    def _move(self, name: str) -> None:
        weight = self._weights[name]
        parameter = weight.parameter
        gradient = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            parameter.grad = None
        if ranks().count > 1:
            ranks().add_up(gradient)
            if not bool(gradient.any()):  # no rank has reached it
                return
        if weight.mean is None or weight.square is None:
            weight.mean = torch.zeros_like(parameter, dtype=torch.bfloat16)
            weight.square = torch.zeros_like(parameter, dtype=torch.bfloat16)
        weight.steps += 1
        mean = weight.mean.float().lerp_(gradient, 1 - _BETAS[0])
        square = weight.square.float().mul_(_BETAS[1])
        square.addcmul_(gradient, gradient, value=1 - _BETAS[1])
        weight.mean.copy_(mean)
        weight.square.copy_(square)
        first, second = (1 - beta**weight.steps for beta in _BETAS)
        change = mean.div_(square.div_(second).sqrt_().add_(_EPSILON))
        value = weight.value
        value.add_(change, alpha=-self.share * weight.rate / first)
        if name in self._masks:
            set_to_zero(value, self._masks.removed(name, value))
        weight.value = value

    def _kept(self, name: str, values: Tensor) -> Tensor:
        """Where a parameter's weights are kept: bool, of its shape."""
        if name in self._masks:
            return ~self._masks.removed(name, values)
        return torch.ones_like(values, dtype=torch.bool)

    def parts(self, with_states: bool) -> Iterator[dict[str, Tensor]]:
        """The kept weights in float32 and their moments, on the CPU, a few at a time: "NAME", and
        "NAME/mean", "NAME/square", "NAME/steps".
        """
        part: dict[str, Tensor] = {}
        size = 0
        for name, weight in self._weights.items():
            kept = self._kept(name, weight.parameter)
            part[name] = weight.value[kept].cpu()
            if with_states and weight.mean is not None and weight.square is not None:
                part[f"{name}/mean"] = weight.mean[kept].cpu()
                part[f"{name}/square"] = weight.square[kept].cpu()
                part[f"{name}/steps"] = torch.tensor(weight.steps)
            size += 8 * part[name].numel()
            if size >= _PART:
                yield part
                part, size = {}, 0
        if part:
            yield part

    def restore(self, part: dict[str, Tensor], with_states: bool) -> None:
        """Take weights of `parts`, and their moments."""
        for name, values in part.items():
            name, _, state = name.partition("/")
            weight = self._weights[name]
            if state == "steps" and with_states:
                weight.steps = int(values)
            elif state in ("", "mean", "square") and (with_states or not state):
                dtype = torch.bfloat16 if state else torch.float32
                whole = torch.zeros_like(weight.parameter, dtype=dtype)
                whole[self._kept(name, whole)] = values.to(whole.device)
                setattr(weight, state or "value", whole)

    def forget(self) -> None:
        """Begin the moments anew."""
        for weight in self._weights.values():
            weight.steps, weight.mean, weight.square = 0, None, None

    def finish(self) -> None:
        """Free the moments, and give the model its weights in float32."""
        self.forget()
        for handle in self._handles:
            handle.remove()
        for weight in self._weights.values():
            weight.parameter.grad = None
            weight.parameter.requires_grad_(False)
            weight.parameter.data = weight.value
            weight.lower = None


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 values of a float32 tensor, and the difference of the bits, as integers:
    int16.
    """
    bits = value.view(torch.int32)
    upper = (bits + (1 << 15)) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def healing_warnings(healing: HealingRecord) -> list[str]:
    """A sentence if the training was of no use."""
    if healing.best:
        return []
    return [
        "healing did not bring the model nearer to the dense one on held-out sequences, so the "
        "weights are those before it."
    ]


def _norm_parameters(model: nn.Module, architecture: Architecture) -> list[str]:
    """The parameters of normalisations in the blocks of a model."""
    names = (
        (name, model.get_submodule(name.rpartition(".")[0])) for name in architecture.block_shapes
    )
    return [name for name, module in names if "norm" in type(module).__name__.lower()]
