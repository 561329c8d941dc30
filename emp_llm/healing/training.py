"""Healing: the kept weights of a pruned model learn the dense model's next-token probabilities.
Zeros stay zero.

    min over the kept weights of mean_t KL(p_dense(. | x_<=t) || p_pruned(. | x_<=t))

on the calibration text, without labels or further data. `transformers.Trainer` runs it: Adam on
float32 weights, products in bfloat16 where the processor has instructions for them, a checkpoint at
every measurement of the loss on held-out sequences.
"""

import copy
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import TRAINER_STATE_NAME

from emp_llm.calibration.data import CalibrationText, data_in_memory
from emp_llm.calibration.passes import fit_origin, in_evaluation_mode
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import file_hash, read_json, sync_tree, write_json
from emp_llm.checkpoint.matrices import Matrix, torch_dtype
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError, format_bytes
from emp_llm.common.machine import (
    available_memory,
    default_modes,
    has_bfloat16,
    out_of_memory,
    trim_heap,
)
from emp_llm.common.progress import Bar, progress_bar, stage
from emp_llm.common.ranks import ranks
from emp_llm.healing.blocks import heal_blocks, rate_of, rated
from emp_llm.healing.checks import SEQUENCES, check_healable, healing_bytes, healing_memory
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.attention import fast_attention
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model
from emp_llm.models.masks import Masks
from emp_llm.models.model_weights import ModelWeights, architecture_of
from emp_llm.models.modules import as_created, mean_losses, set_to_zero, weight_of
from emp_llm.models.offload import is_offloaded
from emp_llm.models.reapply import find_masks, stored_masks
from emp_llm.options.calibration import CalibrationOptions, Place
from emp_llm.options.recipe import Heal, Recipe
from emp_llm.records.run_report import HealingRecord
from emp_llm.records.source import CalibrationRecord
from emp_llm.selection.rows import words_of
from emp_llm.walk.checks import check_apart, held_out, updatable
from emp_llm.walk.moved import MovedWeights, in_dtype

logger = logging.getLogger(__name__)
# It warns of checkpoints written within a second.
logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
_SAVED = "weights.safetensors"  # in a checkpoint of the training
_START = "start"  # the folder of the weights that the training begins with
_RISE = 1.02  # of the held-out loss; a high rate may raise it by less for a while
_CUT = 3.0  # the rate is divided by this where the loss rises, and by its square where it doubles
_PATIENCE = 4  # rises in a row
_HASHES = "hashes.json"  # written last in a checkpoint
_TRIM = 2  # passes between two trims of the heap: with one at each, 0.1 GB less and a tenth longer
_POSITIONS = 32  # of a sequence whose probabilities are in memory at a time
_MEASURES = 10  # of the held-out loss
_BETAS = (0.9, 0.95)  # of Adam
_EPSILON = 1e-8


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
    samples: int | None = None,
    seqlen: int | None = None,
    batch_size: int = SEQUENCES,
    seed: int = 0,
) -> HealingRecord:
    """Train the kept weights of a pruned model in memory, in place, on the dense model's next-token
    probabilities.

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
    zeros = find_masks(masks, model)
    moving = list(zeros)
    if weights == "all":
        architecture = architecture_of(model, ModelWeights(model))
        layers = (target.layer.parameter for target in updatable(architecture.select("all-linear")))
        moving = [*dict.fromkeys([*zeros, *layers]), *_norm_parameters(model, architecture)]
    healed = copy.deepcopy(model).float()
    work = tempfile.TemporaryDirectory(prefix="emp-llm-heal-")
    with work as folder, stage("heal"), in_evaluation_mode(dense):
        record = train(
            healed, dense, text.tokens, zeros, moving, Path(folder), steps, batch_size, seed
        )
    if record.best:
        for name in moving:
            values = model.get_parameter(name).data
            with as_created(values):
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


def heal_folder(
    out: OutputFolder,
    dense: Path,
    recipe: Recipe,
    heal: Heal,
    data: CalibrationText,
    about: CalibrationRecord,
    *,
    device_map: str,
    dtype: str,
    trust_remote_code: bool = False,
    batch_size: int = SEQUENCES,
    hidden_states: Place = "auto",
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
        device_map, dtype, trust_remote_code: of `load_model`.
        batch_size: sequences at a time on a GPU.
        hidden_states: where they are stored between blocks.
        seed: of the order of the sequences.

    Raises:
        UserError: the models do not fit in memory, or the checkpoints of the training on the disk.
    """
    checkpoint = Checkpoint(out.files)
    trust = trust_remote_code
    architecture = Architecture.of_checkpoint(checkpoint, recipe.targets.blocks, trust)
    everything = heal.weights == "all"
    chosen = (
        architecture.select("all-linear") if everything else architecture.targets_of(recipe.targets)
    )
    targets = updatable(chosen)
    if device_map == "auto" and not torch.cuda.is_available():
        in_bfloat16 = has_bfloat16(torch.device("cpu"))
        needed = healing_memory(checkpoint, targets, heal, data.tokens.shape[1], in_bfloat16)
        if _is_too_large(out, needed):
            device_map = "disk"
    model = load_model(out.files, device_map, "float32", trust)
    if dtype == "auto" and not has_bfloat16(model.device):
        dtype = "float32"
    teacher = load_model(dense, device_map, dtype, trust)
    by_blocks = is_offloaded(model) or is_offloaded(teacher)
    out.check_space(checkpoint.output_bytes + healing_bytes(checkpoint, targets, heal, by_blocks))
    if by_blocks:
        _check_by_blocks(checkpoint, recipe, heal)
        del model
        moved = MovedWeights(out.work / "healing")
        with stage("heal"), in_evaluation_mode(teacher):
            record = heal_blocks(
                teacher,
                targets,
                checkpoint,
                data.tokens,
                moved,
                heal.steps,
                name_of_blocks=recipe.targets.blocks,
                hidden_states=hidden_states,
                seed=seed,
            )
        for target in targets:
            weight = moved.rows(target, 0, target.matrix.rows)
            if weight is not None:
                _overwrite(target.matrix, weight)
    else:
        norms = _norm_parameters(model, architecture) if everything else []
        moving = [*dict.fromkeys(target.layer.parameter for target in targets), *norms]
        masks = stored_masks(checkpoint, chosen, model)
        folder = out.work / "healing"
        if out.get("healed") and ranks().first(partial(_last_checkpoint, folder)) is None:
            raise UserError(
                f"{out.work}: some weights are healed, and the training that healed "
                "them is lost. Delete it."
            )
        with stage("heal"):
            record = train(
                model,
                teacher,
                data.tokens,
                masks,
                moving,
                folder,
                heal.steps,
                batch_size,
                seed,
                expendable=True,
            )
        if ranks().main and record.best:
            # From here on, the weights are no longer those that the training began with.
            out.note(healed=True)
            _write_weights(checkpoint, architecture, model, targets, norms)
    record.origin = fit_origin(data, batch_size, about, record.by)
    record.origin.seed = seed  # of the order of the sequences
    return record


def _is_too_large(out: OutputFolder, needed: int) -> bool:
    """Whether healing a whole model needs more memory than there is. An interrupted run keeps its
    answer. A collective call.
    """
    if out.get("healed_by_blocks") is None:
        out.note(healed_by_blocks=ranks().first(lambda: needed > available_memory()))
    if out.get("healed_by_blocks"):
        logger.info(
            "healing block by block, because the whole model takes %s of memory.",
            format_bytes(needed),
        )
    return bool(out.get("healed_by_blocks"))


def _check_by_blocks(checkpoint: Checkpoint, recipe: Recipe, heal: Heal) -> None:
    """Raise UserError if a model cannot heal block by block."""
    smaller = recipe.structure is not None and not recipe.structure.keep_shapes
    if heal.weights == "all" or ranks().count > 1 or smaller:
        raise UserError(
            "--heal: the pruned model in float32 and the dense model do not fit in memory "
            "together, and healing block by block runs in one process, without --heal-weights "
            "all, and not after --structure. Use a larger machine."
        )
    check_apart(
        checkpoint.config, "--heal of a model that does not fit in memory", "Use a larger machine"
    )


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
    dense: PreTrainedModel,
    tokens: Tensor,
    masks: Masks,
    moving: Iterable[str],
    folder: Path,
    steps: int,
    batch_size: int = SEQUENCES,
    seed: int = 0,
    expendable: bool = False,
) -> HealingRecord:
    """Move weights of a pruned model in memory, in place, until the held-out loss no longer falls.
    A collective call.

    Args:
        model: pruned, whole in memory, float32. If no step is better than none (`best` is 0), its
            weights are of no use.
        dense: gives the probabilities.
        tokens: the text, int64, shape (sequences, length). One sequence of sixteen is held out: it
            chooses the step whose weights are kept.
        masks: weights that stay zero.
        moving: names of the parameters that move.
        folder: for the checkpoints; an interrupted call with the same arguments resumes from the
            last one.
        steps, batch_size, seed: number of steps of four sequences, sequences at a time on a GPU,
            and the seed of their order.
        expendable: the dense model is not needed afterwards.

    Raises:
        UserError: memory runs out.
    """
    held = held_out(len(tokens))
    masks.apply(model)
    model.requires_grad_(False)
    in_bfloat16 = has_bfloat16(model.device)
    adam = _Adam(model, moving, masks, rate_of(model.config), in_bfloat16)
    on_cpu = model.device.type == "cpu"
    at_once = 1  # on a CPU, more take more memory and no less time
    if not on_cpu:
        at_once = max(1, min(batch_size, SEQUENCES // ranks().count))
    passes = max(1, SEQUENCES // (at_once * ranks().count))
    arguments = _arguments(folder, steps, at_once, passes, seed, on_cpu)
    examples = [{"input_ids": ids, "number": number} for number, ids in enumerate(tokens)]
    remedy = (
        "healing: out of memory. Give a lower --batch-size or --seqlen, or heal block by "
        "block with --device-map disk."
    )
    with closing(progress_bar(steps, "heal", "step")) as bar, out_of_memory(lambda: remedy):
        trainer = _Healer(
            model,
            arguments,
            train_dataset=examples[:-held],
            eval_dataset=examples[-held:],
            data_collator=default_data_collator,
            optimizers=(adam, None),
            callbacks=[supervisor := _Supervisor(bar)],
            compute_metrics=_perplexities,
        )
        trainer.adam = adam
        trainer.in_bfloat16 = in_bfloat16
        supervisor.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        last = ranks().first(partial(_last_checkpoint, folder))
        if ranks().main:
            # The model has these weights, also where the training resumes.
            trainer._save(str(folder / _START))
        if last is not None:
            trainer.state = TrainerState.load_from_json(str(Path(last) / TRAINER_STATE_NAME))
        # It was interrupted after its end.
        if trainer.state.global_step >= steps or _has_ended(trainer.state):
            if trainer.state.best_global_step is not None:
                trainer._load_best_model()
        else:
            visits = steps * SEQUENCES // ranks().count
            with _dense_logits(dense, tokens, visits, expendable) as trainer.dense_logits:
                trainer.train(resume_from_checkpoint=last)
        adam.finish()
    curve = _curve(trainer.state)
    perplexity = _curve(trainer.state, "perplexity")
    best = min(curve, key=lambda step: (not math.isfinite(curve[step]), curve[step]))
    return HealingRecord(
        steps=trainer.state.global_step,
        tokens=trainer.state.global_step * at_once * passes * ranks().count * tokens.shape[1],
        best=best,
        curve=list(curve.items()),
        perplexity={
            "dense": _curve(trainer.state, "dense")[0],
            "before": perplexity[0],
            "after": perplexity[best],
        },
    )


def _arguments(
    folder: Path, steps: int, at_once: int, passes: int, seed: int, on_cpu: bool
) -> TrainingArguments:
    """The arguments of the trainer, with `passes` of `at_once` sequences for a step."""
    every = max(1, steps // _MEASURES)
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=at_once,
        per_device_eval_batch_size=at_once,
        gradient_accumulation_steps=passes,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 20,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=every,
        save_steps=every,
        save_total_limit=1,
        load_best_model_at_end=True,
        label_names=["input_ids"],
        remove_unused_columns=False,
        seed=seed % 2**32,  # numpy's are of 32 bits
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        use_cpu=on_cpu,
    )


class _Healer(Trainer):  # type: ignore[misc]
    """A trainer whose loss is the divergence from the dense model's probabilities."""

    dense_logits: Callable[[Tensor], Tensor]  # of sequences, by their numbers
    adam: "_Adam"
    in_bfloat16 = False  # the products
    passes = 0

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        """The mean over the tokens of KL(dense || pruned), in nats. Layers behave as in
        evaluation: no dropout.
        """
        model.eval()
        ids = inputs["input_ids"]
        self.passes += 1
        if self.passes % _TRIM == 1:
            trim_heap()  # between passes little is in use
        products = torch.autocast(ids.device.type, torch.bfloat16, enabled=self.in_bfloat16)
        with products, fast_attention(ids.device, torch.float32):
            with torch.no_grad():
                wanted = self.dense_logits(inputs["number"])
            logits = model(input_ids=ids, use_cache=False).logits
        loss = _Divergence.apply(logits, wanted.to(logits.device)) / ids.numel()  # type: ignore[no-untyped-call]
        return (loss, (logits, wanted)) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The divergence of a batch, and the mean loss of each of its sequences: of this model,
        and of the dense one.
        """
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            divergence, both = self.compute_loss(model, inputs, return_outputs=True)
        ids = inputs["input_ids"]
        losses = torch.stack([mean_losses(logits, ids).float() for logits in both], 1)
        return divergence, losses, losses

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A checkpoint is complete with the hashes of its files."""
        super()._save_checkpoint(model, trial)
        ranks().gather(None)  # each has written its part
        if self.args.should_save:
            folder = _checkpoint(self.args.output_dir, self.state.global_step)
            sync_tree(folder)
            write_json(folder / _HASHES, _hashes(folder))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Only the weights that move are saved, under the names that they have in memory."""
        moving = {
            name: self.adam.value_of(weight)
            for name, weight in self.model.named_parameters()
            if weight.requires_grad
        }
        Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)
        save_file(moving, Path(output_dir or self.args.output_dir) / _SAVED)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        for name, values in load_file(Path(resume_from_checkpoint) / _SAVED).items():
            self.adam.set_value(self.model.get_parameter(name), values)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(
            str(_checkpoint(self.args.output_dir, self.state.best_global_step))
        )


@contextmanager
def _dense_logits(
    dense: PreTrainedModel, tokens: Tensor, visits: int, expendable: bool = False
) -> Iterator[Callable[[Tensor], Tensor]]:
    """A function that returns the dense model's logits, given the numbers of sequences, int64,
    shape (sequences,).

    A training that visits as many sequences as there are sees most of them several times. Then
    all pass through the dense blocks once, before it, and only the final norm and the head run
    again, so the weights of the blocks of an expendable model are freed. The logits have the same
    bits either way.
    """
    runner = _runner_of(dense, tokens[:1]) if visits >= len(tokens) else None
    if runner is None:
        yield (
            lambda numbers: (
                dense(input_ids=tokens[numbers.cpu()].to(dense.device), use_cache=False).logits
            )
        )
        return
    with runner.walk(torch.split(tokens, 1), "dense") as walk:
        for step in walk.steps():
            step.run()
        if expendable:
            runner.blocks.to("meta")
        yield lambda numbers: torch.cat([walk.tail(number).logits for number in numbers.tolist()])


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


class _Supervisor(TrainerCallback):  # type: ignore[misc]
    """Shows progress. Where the held-out loss rises, the training goes back to the best weights,
    with a lower rate.
    """

    trainer: _Healer

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses = _held_out_losses(state)
        if _rises(losses):
            self._go_back(state.best_global_step or 0, _CUT**2 if _rises(losses, 2.0) else _CUT)
        if _has_ended(state):
            control.should_training_stop = True

    def _go_back(self, step: int, cut: float) -> None:
        """Take the weights after a step, forget the optimiser's moments, and divide its rate."""
        folder = Path(self.trainer.args.output_dir)
        place = _checkpoint(folder, step) if step else folder / _START
        self.trainer._load_from_checkpoint(str(place))
        optimizer = self.trainer.optimizer
        optimizer.state.clear()
        wrapped: Any = self.trainer.lr_scheduler
        schedule = getattr(wrapped, "scheduler", wrapped)  # accelerate's holds torch's
        schedule.base_lrs = [rate / cut for rate in schedule.base_lrs]
        for group in optimizer.param_groups:
            group["lr"] /= cut


def _held_out_losses(state: Any) -> list[float]:
    """The held-out losses so far."""
    return list(_curve(state).values())


def _rises(losses: list[float], times: float = _RISE) -> bool:
    """Whether the last loss is NaN, or at least `times` the best one before it."""
    return len(losses) > 1 and not losses[-1] < times * min(losses[:-1])


def _has_ended(state: Any) -> bool:
    """Whether the held-out loss rose so many times in a row that no lower rate will help."""
    losses = _held_out_losses(state)
    return len(losses) > _PATIENCE and all(
        _rises(losses[: len(losses) - n]) for n in range(_PATIENCE)
    )


class _Adam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv 1412.6980) on float32 weights in two halves of 16 bits. The
    model computes with the upper one, which is the weight in bfloat16. The lower one lies here.

    The two states of each weight are of bfloat16. A step changes the second by a twentieth, far
    more than rounding. A weight takes 8 bytes beside the model's: its lower half, its gradient and
    two states.

    Args:
        model: float32, with zeros where the masks have them.
        moving: names of the parameters that move; from now on they take gradients.
        masks: weights that stay zero.
        rate: as a share of the root mean square of each parameter's kept weights.
        halved: whether the weights are halved; else they stay float32.
    """

    def __init__(
        self, model: nn.Module, moving: Iterable[str], masks: Masks, rate: float, halved: bool
    ) -> None:
        self._masks = masks
        self._lower: dict[Tensor, Tensor] = {}
        groups = []
        for name in moving:
            weight = model.get_parameter(name)
            groups.append(rated(weight, rate) | {"name": name})
            if halved:
                weight.data, self._lower[weight] = _halves(weight.data)
            weight.requires_grad_(True)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move each weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad.float(), group["name"], group["lr"])

    def _move(self, weight: Tensor, gradient: Tensor, name: str, rate: float) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(weight, dtype=torch.bfloat16)
            state["square"] = torch.zeros_like(weight, dtype=torch.bfloat16)
        state["step"] += 1
        mean = state["mean"].float().lerp_(gradient, 1 - _BETAS[0])
        square = state["square"].float().mul_(_BETAS[1])
        square.addcmul_(gradient, gradient, value=1 - _BETAS[1])
        # Loaded states have the dtype of the weight.
        state["mean"] = mean.bfloat16()
        state["square"] = square.bfloat16()
        first, second = (1 - beta ** state["step"] for beta in _BETAS)
        value = self.value_of(weight)
        value.addcdiv_(mean, square.div_(second).sqrt_().add_(_EPSILON), value=-rate / first)
        if name in self._masks:
            set_to_zero(value, self._masks.removed(name, value))
        self.set_value(weight, value)

    def value_of(self, weight: Tensor) -> Tensor:
        """A weight in float32; of a halved one, a copy."""
        lower = self._lower.get(weight)
        if lower is None:
            return weight.data
        return (weight.data.view(torch.int16).int() << 16).add_(lower).view(torch.float32)

    def set_value(self, weight: Tensor, value: Tensor) -> None:
        """Change a weight to a float32 value, in place."""
        lower = self._lower.get(weight)
        if lower is None:
            weight.data.copy_(value)
        else:
            for place, half in zip((weight.data, lower), _halves(value), strict=True):
                place.copy_(half)

    def finish(self) -> None:
        """Free the gradients and states, and give the model its weights in float32."""
        self.zero_grad()
        self.state.clear()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.requires_grad_(False)
                weight.data = self.value_of(weight)
                self._lower.pop(weight, None)


def _halves(value: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 values of a float32 tensor, and the difference of the bits, as integers:
    int16.
    """
    bits = value.view(torch.int32)
    upper = (bits + (1 << 15)) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def _perplexities(held: Any) -> dict[str, float]:
    """Of this model and of the dense one, from the losses of held-out sequences, float32, shape
    (sequences, 2).
    """
    return dict(
        zip(
            ("perplexity", "dense"),
            torch.from_numpy(held.predictions).double().mean(0).exp().tolist(),
            strict=True,
        )
    )


def _curve(state: Any, what: str = "loss") -> dict[int, float]:
    """Step -> what was measured on the held-out sequences."""
    return {
        entry["step"]: entry[f"eval_{what}"]
        for entry in state.log_history
        if f"eval_{what}" in entry
    }


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


def _checkpoint(folder: str | Path, step: int) -> Path:
    """The checkpoint of a training after some steps."""
    return Path(folder) / f"checkpoint-{step}"


def _hashes(folder: Path) -> dict[str, str]:
    """The hash of each file of a checkpoint, by name."""
    return {path.name: file_hash(path) for path in sorted(folder.iterdir()) if path.name != _HASHES}


def _is_intact(folder: Path) -> bool:
    """Whether a checkpoint is complete, and its files are as they were written."""
    try:
        return bool(read_json(folder / _HASHES) == _hashes(folder))
    except (OSError, UserError):
        return False


def _last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of an interrupted training that is intact, and whose best one is.
    Newer ones are deleted.
    """
    if folder.exists() and not folder.is_dir():
        folder.unlink()
    numbers = ((path.name.partition("-")[2], path) for path in folder.glob("checkpoint-*"))
    checkpoints = {int(number): path for number, path in numbers if number.isdecimal()}
    for step, path in sorted(checkpoints.items(), reverse=True):
        if _is_intact(path):
            best = TrainerState.load_from_json(str(path / TRAINER_STATE_NAME)).best_global_step
            if best in (None, step) or _is_intact(_checkpoint(folder, best)):
                return str(path)
        logger.warning(
            "healing: %s is damaged or incomplete, so the training does not resume from it.",
            path.name,
        )
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return None
