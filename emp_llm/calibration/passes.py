"""The forward passes of a calibration: data through a model, and the norms of the inputs of its
layers.

The whole model runs on one batch after another; or each decoder block runs on all batches before
the next one does, so that memory holds one block and the hidden states. With pruned propagation, a
block's targets are masked once its norms are collected, and the batches pass through it again, so
that the next block sees the pruned model's inputs (as in Sun et al., A Simple and Effective Pruning
Approach for Large Language Models, 2023).

A calibration by blocks saves its state in a folder now and then, so that an interrupted one resumes
from there. A whole model takes minutes, and starts over.

    hidden-BLOCKS-BATCH.safetensors   the hidden states of a batch after so many blocks
    sums-BLOCKS.safetensors           the sums after these blocks
    state.json                        which of these files count, with their hashes

The ranks go from block to block together: each writes the hidden states of its batches; the first
rank decides when, and replaces `state.json` in one step once all files are there.
"""

import hashlib
import inspect
import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.calibration.activations import Activations, InputSums, input_hooks
from emp_llm.calibration.data import IN_MEMORY, CalibrationText
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import (
    is_intact,
    keep_only,
    read_own,
    remove,
    write_bytes,
    write_own,
)
from emp_llm.common.errors import FULL, UserError, count_of, format_bytes, reason
from emp_llm.common.machine import enough_memory, ran_out, versions
from emp_llm.common.progress import progress_bar
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.models.attention import fast_attention
from emp_llm.models.blockwise import BlockwiseModel, InseparableError, Walk, decoder_ids
from emp_llm.models.layers import Layer
from emp_llm.models.loading import execution_device, is_offloaded
from emp_llm.models.modules import (
    as_created,
    body_of,
    find_towers,
    inputs_of,
    is_encoder_decoder,
    set_to_zero,
    weight_of,
)
from emp_llm.models.placement import Quantization, quantization_record
from emp_llm.options.recipe import Match, Recipe
from emp_llm.options.shared import CalibrationOptions, Propagate
from emp_llm.records.base import CalibrationRecord, ModelIdentity
from emp_llm.selection.criteria import NORM

logger = logging.getLogger(__name__)
# A context around the call with a batch, given its first argument.
Guard = Callable[[Any], AbstractContextManager[None]]


class Masker(Protocol):
    """Computes the masks of a block's targets from the statistics of their inputs. The pruner of a
    run implements it.
    """

    @property
    def targets(self) -> Sequence[Target]:
        """The targets of all blocks."""

    def mask(self, target: Target, activations: Activations) -> Tensor:
        """The mask of a target: bool, shape (outputs, inputs), true where kept.

        Args:
            target: of the current block.
            activations: of the block's layers.
        """


def collect_norms(
    model: PreTrainedModel,
    data: CalibrationText,
    layers: list[Layer],
    about: CalibrationRecord,
    options: CalibrationOptions,
    *,
    statistics: Collection[str] = (),
    masker: Masker | None = None,
    blocks: str | None = None,
    resume: Path | None = None,
) -> Activations:
    """The input norms of a model's layers over calibration data, and their origin. Each of several
    ranks runs its share.

    Args:
        model: dense, on any devices.
        data: from `calibration_data` or `data_in_memory`.
        layers: linear layers, and matrices of experts.
        about: the model and, for pruned propagation, the recipe: from `model_origin`.
        options: of the forward passes.
        statistics: names of further statistics, beside the norms.
        masker: computes the masks of a pruned propagation; None: dense propagation.
        blocks: name of the list of decoder blocks; None: detected.
        resume: folder for the saved state, from which an interrupted run of the same calibration
            by blocks resumes; None: it starts over. The caller deletes it with `delete_progress`
            when the norms are saved. Several ranks must see one folder.

    Raises:
        UserError: a norm is not finite, memory runs out, or the model cannot run in this way.
    """
    batch_size = options.batch_size
    record = msgspec.structs.replace(
        fit_origin(data, batch_size, about), dtype=str(model.dtype).removeprefix("torch.")
    )
    with in_evaluation_mode(model):
        by_itself = (
            options.execution == "auto" and is_offloaded(model) and not is_encoder_decoder(model)
        )
        by_blocks = options.execution == "blocks" or masker is not None or by_itself
        runner = BlockwiseModel(model, blocks, options.hidden_states) if by_blocks else None
        if runner is not None and by_itself and masker is None:
            try:
                runner.prepare(data.tokens[:batch_size])
            except InseparableError as error:
                logger.warning(
                    "warning: %s. It runs as a whole, and reads its weights for each batch.",
                    error.problem,
                )
                by_blocks = False
        logger.debug(
            "calibrating %s on %d sequences of %d tokens, %d at a time, %s.",
            count_of(len(layers), "layer"),
            *data.tokens.shape,
            batch_size,
            "block by block" if by_blocks else "the whole model at once",
        )
        if runner is not None and by_blocks:
            made_of = {
                "layers": [layer.name for layer in layers],
                "config": model.config.to_json_string(),
                "statistics": sorted(statistics),
            }
            signature = record.as_dict() | made_of | {"ids": data.signature}
            progress = None if resume is None else CalibrationProgress(resume, signature)
            norms = calibrate_blocks(
                runner, layers, data.tokens, batch_size, masker, progress, statistics
            )
        else:
            norms = calibrate_model(model, layers, data.tokens, batch_size, statistics)
    # The file names no folders.
    if record.pruned_by is not None and isinstance(record.pruned_by.counts, Match):
        counts = record.pruned_by.counts
        record.pruned_by = record.pruned_by.but(counts=replace(counts, run=Path(counts.run).name))
    record.execution = "blocks" if by_blocks else "model"
    record.propagate = "dense" if masker is None else "pruned"
    record.hidden_states = norms.about.hidden_states
    return replace(norms, about=record)


def calibration_signature(
    data: CalibrationText,
    options: CalibrationOptions,
    propagate: Propagate = "dense",
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """Everything that the norms depend on, except the model, as JSON; known before the model is
    loaded.
    """
    about = CalibrationRecord(
        execution=options.execution,
        propagate=propagate,
        quantization=quantization_record(quantization),
    )
    return _with_data(about, data, options.batch_size).as_dict() | {"ids": data.signature}


def model_origin(
    name: str,
    revision: str | None,
    checkpoint: Checkpoint,
    quantization: Quantization | None = None,
    pruned_by: Recipe | None = None,
) -> CalibrationRecord:
    """The part of the origin of norms that concerns the model.

    Args:
        name: as the user gave it; a folder is recorded without the folders above it.
        revision: commit on the Hub; None for a folder.
        checkpoint: of the model, whose weights are hashed.
        quantization: of the loaded model.
        pruned_by: the recipe of a pruned propagation.
    """
    identity = ranks().first(lambda: identity_of(checkpoint))
    return CalibrationRecord(
        model=name if revision is not None else checkpoint.folder.name,
        revision=revision,
        quantization=quantization_record(quantization),
        pruned_by=pruned_by,
        **ModelIdentity.of(checkpoint.folder, identity).as_dict(),
    )


def fit_origin(
    data: CalibrationText,
    batch_size: int,
    about: CalibrationRecord,
    execution: str = "blocks",
) -> CalibrationRecord:
    """The origin of weights that were fitted to calibration data; `about` is the part that
    concerns the model.
    """
    record = _with_data(about, data, batch_size)
    return msgspec.structs.replace(
        record, tokens=data.number, execution=execution, ranks=ranks().count, versions=versions()
    )


def _with_data(
    about: CalibrationRecord, data: CalibrationText, batch_size: int
) -> CalibrationRecord:
    texts = [corpus.record() for corpus in data.corpora]
    if texts[0].file == IN_MEMORY:
        texts[0].sha256 = data.signature
    for text in texts:
        if text.generate:
            text.sha256 = hashlib.sha256(data.generated).hexdigest()
    return msgspec.structs.replace(
        about,
        text=texts[0] if len(texts) == 1 else None,
        texts=texts if len(texts) > 1 else [],
        seed=data.seed,
        batch_size=batch_size,
    )


def delete_progress(folder: Path) -> None:
    """Delete the saved state, once the activations are written."""
    if ranks().main:
        shutil.rmtree(folder, ignore_errors=True)


def own_batches(tokens: Tensor, batch_size: int) -> list[Tensor]:
    """This rank's share of the batches. The batches do not depend on the number of ranks.

    Args:
        tokens: int64, shape (samples, length).
        batch_size: sequences per batch.

    Raises:
        UserError: there are fewer batches than ranks.
    """
    batches = torch.split(tokens, batch_size)
    if len(batches) < ranks().count:
        raise UserError(
            f"--batch-size {batch_size}: {count_of(tokens.shape[0], 'sample')} make "
            f"{count_of(len(batches), 'batch', 'batches')}, fewer than the {ranks().count} ranks. "
            "Lower it, or use fewer ranks."
        )
    return list(ranks().assigned(batches))


# The whole model, batch by batch.


def calibrate_model(
    model: PreTrainedModel,
    layers: list[Layer],
    tokens: Tensor,
    batch_size: int = 4,
    statistics: Collection[str] = (),
) -> Activations:
    """Run the calibration tokens through a model and collect the input norms of its layers.

    Args:
        model: a causal language model, on any devices.
        layers: linear layers, and matrices of experts.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.
        statistics: names of further statistics, beside the norms.

    Returns:
        Statistics over all tokens of all samples; `about` is empty.

    Raises:
        UserError: a norm is not finite, memory runs out, or the model does not run on text alone.
    """
    batches = own_batches(tokens, batch_size)
    hint = (
        "it does not run on text alone ({}). Use a magnitude method, which needs no forward pass."
    )
    guard = partial(_explain_errors, model, hint if find_towers(model).others else None)
    total = sum(batch.numel() for batch in batches), "tok"
    try:
        return norms_of_batches(
            model, layers, batches, statistics=statistics, shared=True, guard=guard, total=total
        )[0]
    except BaseException as end:
        if not isinstance(end, Exception):  # a signal
            logger.info("calibrate: the norms are not finished; the same command starts them over.")
        raise


@contextmanager
def _explain_errors(model: PreTrainedModel, hint: str | None, ids: Tensor) -> Iterator[None]:
    """Turn an error of a model that does not take its inputs, or a lack of memory, into a
    UserError.

    Args:
        hint: the sentence for inputs that the model does not take; None: their errors are not
            turned.
        ids: of the batch.
    """
    try:
        with enough_memory(lambda: (type(model).__name__, execution_device(model)), ids):
            yield
    except (TypeError, ValueError, AttributeError) as error:
        if hint is None or ran_out(error) or isinstance(error, UserError):
            raise
        raise UserError(f"{type(model).__name__}: {hint.format(reason(error))}") from error


def norms_of_batches(
    model: nn.Module,
    layers: list[Layer],
    data: Iterable[Any],
    *,
    statistics: Collection[str] = (),
    shared: bool = False,
    guard: Guard = nullcontext,
    total: tuple[int, str] | None = None,
) -> tuple[Activations, int]:
    """The input norms of a model's layers over batches.

    Args:
        model: on any devices.
        layers: linear layers, and matrices of experts.
        data: batches, such as those of a DataLoader: mappings with `input_ids` and other arguments
            of the model, tensors, or lists and tuples that begin with a tensor. Labels are left
            out. The sequences of a batch with padding run one by one, without the tokens that
            `attention_mask` leaves out.
        statistics: names of further statistics, beside the norms.
        shared: the data is this rank's share; the sums of all ranks are added.
        guard: explains errors of the model.
        total: number and unit of the progress bar, "tok" or "batch"; None: the number of batches,
            if it is known.

    Returns:
        The norms, without their origin, and the number of tokens (of rows, for a model without
        token ids).

    Raises:
        UserError: a batch cannot be used, or a norm is not finite.
    """
    known = isinstance(model, PreTrainedModel)
    body = (
        body_of(model)
        if known and not any(layer.purpose in ("head", "other") for layer in layers)
        else model
    )
    total = total or (len(data) if isinstance(data, Sized) else 0, "batch")
    device = execution_device(model)
    tokens = 0
    bar = progress_bar(total[0], "calibrate", total[1])
    hooks = input_hooks(model, layers, statistics)
    with hooks as collected, in_evaluation_mode(model), torch.no_grad(), bar:
        for batch in data:
            seen = 0
            for inputs in _without_padding(_inputs(batch)):
                first = next(iter(inputs.values()))
                with guard(first):
                    _call(body, inputs, device)
                seen += first.shape[:-1].numel() if first.is_floating_point() else first.numel()
            tokens += seen
            bar.update(seen if total[1] == "tok" else 1)
    if tokens == 0:
        raise UserError("data: it gives no batches.")
    if shared:
        collected.reduce()
    collected.complete(model, layers)
    return collected.activations(layers), tokens


def _inputs(batch: Any) -> dict[str, Any]:
    """The arguments of a model in a batch, the token ids first; "" is the name of a tensor
    without one.
    """
    if isinstance(batch, Mapping):
        name = next((name for name in ("input_ids", "inputs_embeds") if name in batch), None)
        if name is None:
            raise UserError(
                "data: a batch has no input_ids; its keys are "
                f"{', '.join(map(str, batch)) or 'none'}."
            )
        if not isinstance(batch[name], Tensor):
            raise UserError(
                f"data: {name} of a batch is of type {type(batch[name]).__name__}, not a tensor. "
                'For a DataLoader, give its data set with_format("torch").'
            )
        others = {
            name: value for name, value in batch.items() if name != "labels" and value is not None
        }
        return {name: batch[name]} | others
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor):
        raise UserError(
            f"data: a batch is {type(first).__name__}; give tensors, or mappings with input_ids. "
            "Texts are given as a list or a data set."
        )
    return {"": first}


def _without_padding(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of a model for each sequence of a batch, without its padding; the batch as it
    is if it has none. Experts and other modules would see the padding in an order of their own.

    Raises:
        UserError: an argument cannot be divided by sequences.
    """
    masks = {
        name.removesuffix("attention_mask"): value.bool()
        for name, value in inputs.items()
        if name in ("attention_mask", "decoder_attention_mask")
        and isinstance(value, Tensor)
        and value.dim() == 2
    }
    if all(bool(mask.all()) for mask in masks.values()):
        return [inputs]
    count = len(next(iter(masks.values())))
    sequences = []
    for number in range(count):
        sequence = {}
        for name, value in inputs.items():
            sequence[name] = value
            if not isinstance(value, Tensor):
                continue
            mask = masks.get("decoder_" if name.startswith("decoder_") else "")
            axis = None
            if mask is not None:
                places = range(value.dim() - 1)
                axis = next((n for n in places if value.shape[n : n + 2] == mask.shape), None)
            if mask is not None and axis is not None:
                kept = mask[number].nonzero()[:, 0].to(value.device)
                sequence[name] = value.narrow(axis, number, 1).index_select(axis + 1, kept)
            elif value.shape[:1] == (count,):
                sequence[name] = value[number : number + 1]
            elif count > 1:
                raise UserError(
                    f"data: a batch has padding, and its {name} of shape {list(value.shape)} "
                    f"cannot be divided into its {count} sequences. Give batches of one sequence."
                )
        if next(iter(sequence.values())).numel():
            sequences.append(sequence)
    return sequences


def _call(body: nn.Module, inputs: dict[str, Any], device: torch.device) -> None:
    """Call a model with a batch, moved to its device.

    A model of transformers gets floats in its own dtype, and only the arguments that it takes.
    """
    dtype = body.dtype if isinstance(body, PreTrainedModel) else None
    moved = {}
    for name, value in inputs.items():
        moved[name] = value
        if isinstance(value, Tensor):
            if value.is_inference():  # hooks ask for the version of a layer's input
                value = value.clone()
            moved[name] = value.to(device, dtype if value.is_floating_point() else None)
    if not isinstance(body, PreTrainedModel):
        positional = [moved.pop("")] if "" in moved else []
        body(*positional, **moved)
        return
    if "" in moved:
        moved["input_ids"] = moved.pop("")
    if is_encoder_decoder(body) and "input_ids" in moved and "decoder_input_ids" not in moved:
        moved["decoder_input_ids"] = decoder_ids(body, moved["input_ids"])
    parameters = inspect.signature(body.forward).parameters
    if not any(argument.kind == argument.VAR_KEYWORD for argument in parameters.values()):
        moved = {name: value for name, value in moved.items() if name in parameters}
    with fast_attention(device, body.dtype):
        body(**moved, use_cache=False)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside this context; afterwards every module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# The progress of a calibration.


_FORMAT = "emp-llm calibration state 7"
_STATE = "state.json"
# A large model's state takes gigabytes. It is saved when losing the work since the last
# save would hurt, and saving is a small part of that work.
_SECONDS = 30.0
_RATIO = 10


class _State(msgspec.Struct):
    """A saved state.

    Attributes:
        signature: of the calibration.
        done: finished blocks.
        input_of, tokens: of `InputSums`.
        files: BLAKE3 of those of the sums and of the hidden states, by name.
    """

    signature: str
    done: Annotated[int, msgspec.Meta(ge=1)]
    input_of: dict[str, str]
    tokens: dict[str, int]
    files: dict[str, str]


class CalibrationProgress:
    """A folder of progress.

    Args:
        folder: created by the first save.
        signature: everything that the norms depend on, as JSON. The progress of another calibration
            is not used.
    """

    def __init__(self, folder: Path, signature: dict[str, Any]) -> None:
        self.folder = folder
        self._signature = json.dumps({"format": _FORMAT} | signature)
        self._saved_at = time.monotonic()
        self._cost: float | None = None  # seconds of the last save
        self._full = False

    def restore(self, collected: InputSums, walk: Walk, layers: list[Layer]) -> int:
        """Restore the state that an earlier run with this signature saved; returns the number of
        its finished blocks.

        A collective call.
        """
        state = ranks().first(self._read_state)
        if state is None:
            return 0
        paths = [self._path(state.done, number) for number in range(len(walk.batches))]
        sums = self._sums(state.done)
        # Those of another rank may be on another disk.
        mine = [*paths, sums] if ranks().main else paths
        intact = all(is_intact(path, state.files.get(path.name)) for path in mine)
        if not all(ranks().gather(intact and self._fits(state, collected, walk, layers))):
            logger.warning(
                "warning: %s: files are missing or damaged; the calibration starts over.",
                self.folder,
            )
            return 0
        for number, path in enumerate(paths):
            tensors = {name: tensor.to(walk.device) for name, tensor in load_file(path).items()}
            hidden = tensors.pop("hidden")
            walk.hidden.hand_on(number, {int(place): tensors[place] for place in tensors})
            walk.hidden.put(number, hidden)
        _put_state(collected, state, ranks().first(partial(load_file, sums)))
        walk.bar.update(state.done)
        logger.info(
            "resumed after block %d of %d (%s).", state.done, len(walk.runner.blocks), self.folder
        )
        self._saved_at = time.monotonic()
        return state.done

    def _fits(self, state: _State, collected: InputSums, walk: Walk, layers: list[Layer]) -> bool:
        """Whether a state and its files, which are as they were written, are of this model and
        text.
        """
        model = walk.runner.model
        try:
            for number in range(len(walk.batches)):
                tensors = load_file(self._path(state.done, number))
                hidden = tensors.pop("hidden")
                begun = walk.hidden.get(number, hidden.device)
                if hidden.shape != begun.shape or not hidden.is_floating_point():
                    return False
                _ = [int(place) for place in tensors]
            if not ranks().main:
                return True
            sums = InputSums(statistic.name for statistic in collected.statistics)
            _put_state(sums, state, load_file(self._sums(state.done)))
            observed = {layer for statistic, layer in sums.totals if statistic == NORM.name}
            return (
                state.done < len(walk.runner.blocks)
                and {*state.input_of.values()} <= observed <= state.input_of.keys()
                and all(total.dtype == torch.float64 for total in sums.totals.values())
                and all(
                    values[layer.name].shape == (inputs_of(model, layer),)
                    for values in sums.activations(layers).statistics.values()
                    for layer in layers
                    if layer.name in values
                )
            )
        except (SafetensorError, LookupError, ValueError, RuntimeError):
            return False

    def _is_due(self, now: float) -> bool:
        wait = max(_SECONDS, _RATIO * (self._cost or 0.0))
        return not self._full and now - self._saved_at >= wait

    def _note_save(self, began: float, size: int) -> None:
        """Note the time of a save, and announce the first one."""
        if self._cost is None:
            told = (
                "%s: hidden states are saved there for resuming (%s); --no-resumable-calibration "
                "turns this off."
            )
            logger.info(told, self.folder, format_bytes(size))
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - began

    def _stop_saving(self) -> None:
        """Save nothing more on a disk that is full."""
        self._full = True
        with suppress(OSError):
            self.folder.rmdir()  # unless it holds an earlier state
        logger.warning(
            "warning: %s: the state does not fit on the disk, or is larger than ulimit -f allows. "
            "The calibration continues without saving it.",
            self.folder,
        )

    def _read_state(self) -> _State | None:
        """The state; None if no run with this signature has saved it."""
        state = read_own(self.folder / _STATE, _State)
        if state is not None and state.signature != self._signature:
            logger.info(
                "%s: it holds the progress of another calibration; this one starts over.",
                self.folder,
            )
            return None
        return state

    def _sums(self, done: int) -> Path:
        """The file of the sums."""
        return self.folder / f"sums-{done}.safetensors"

    def _path(self, done: int, number: int) -> Path:
        """The file of a batch of this rank; batches are numbered over all ranks."""
        return self.folder / f"hidden-{done}-{number * ranks().count + ranks().index}.safetensors"

    def save(self, done: int, collected: InputSums, walk: Walk) -> None:
        """Save the state after `done` blocks in place of the last one, unless too little time has
        passed since then.

        On a full disk, the calibration continues and keeps the last saved state. A collective call.
        """
        began = time.monotonic()
        if not ranks().broadcast(self._is_due(began)):
            return
        own: dict[str, str] = {}
        sizes = ranks().gather(_unless_full(lambda: self._write_hidden(done, walk, own)))
        files = {
            name: digest for of_rank in ranks().gather(own) for name, digest in of_rank.items()
        }
        if None not in sizes and ranks().main:
            sizes.append(_unless_full(lambda: self._write_state(done, collected, files)))
        sizes = ranks().broadcast(sizes)
        if None in sizes:
            with suppress(OSError):
                for number in range(len(walk.batches)):
                    self._path(done, number).unlink(missing_ok=True)
            self._stop_saving()
        else:
            self._note_save(began, sum(sizes))

    def _write_hidden(self, done: int, walk: Walk, hashes: dict[str, str]) -> int:
        """Write the hidden states of this rank's batches, one at a time, and put the hash of each
        file under its name; returns their size in bytes.
        """
        size = 0
        for number in range(len(walk.batches)):
            handed = walk.hidden.handed(number, torch.device("cpu"))
            tensors = {str(place): tensor.contiguous() for place, tensor in handed.items()}
            hidden = walk.hidden.get(number, torch.device("cpu")).contiguous()
            size += self._write(self._path(done, number), {"hidden": hidden} | tensors, hashes)
        return size

    def _write_state(self, done: int, collected: InputSums, files: dict[str, str]) -> int:
        """Replace the state, and delete the files of the one before; returns the size of the sums
        in bytes.
        """
        totals = {
            f"{layer}.{statistic}": total.cpu()
            for (statistic, layer), total in collected.totals.items()
        }
        size = self._write(self._sums(done), totals, files)
        state = _State(self._signature, done, collected.input_of, collected.tokens, files)
        write_own(self.folder / _STATE, msgspec.to_builtins(state))
        keep_only(self.folder, {_STATE, *files})
        return size

    @staticmethod
    def _write(path: Path, tensors: dict[str, Tensor], hashes: dict[str, str]) -> int:
        """Write a file, and put its hash under its name; returns its size in bytes."""
        content = save(tensors)
        remove(path)  # it may be a folder
        write_bytes(path, content)
        hashes[path.name] = str(blake3(content).hexdigest())
        return len(content)


def _put_state(collected: InputSums, state: _State, totals: dict[str, Tensor]) -> None:
    """Put a saved state, with the tensors of its sums, in place of what is collected."""
    collected.totals = {}
    for name, total in totals.items():
        layer, _, statistic = name.rpartition(".")
        collected.totals[statistic, layer] = total
    collected.input_of = state.input_of
    collected.tokens = state.tokens


def _unless_full(write: Callable[[], int]) -> int | None:
    """What `write` returns; None if the disk is full."""
    try:
        return write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        return None


# Block by block.


def calibrate_blocks(
    runner: BlockwiseModel,
    layers: list[Layer],
    tokens: Tensor,
    batch_size: int = 4,
    masker: Masker | None = None,
    progress: CalibrationProgress | None = None,
    statistics: Collection[str] = (),
) -> Activations:
    """Collect the input norms of layers block by block.

    Args:
        runner: the model.
        layers: linear layers, and matrices of experts.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.
        masker: computes the masks of a pruned propagation; None: dense propagation.
        progress: saves the state between blocks, and restores it.
        statistics: names of further statistics, beside the norms.

    Returns:
        Statistics over all tokens of all samples; `about` holds the place of the hidden states.

    Raises:
        UserError: a norm is not finite, memory runs out, or the blocks cannot be run one at a time.
    """
    model = runner.model
    batches = own_batches(tokens, batch_size)
    runner.prepare(batches[0])  # before the hooks, so that its passes do not count
    hooks = input_hooks(model, layers, statistics)
    with hooks as collected, runner.walk(batches, "calibrate") as walk:
        collected.reduce()  # layers before the first block
        first = 0 if progress is None else progress.restore(collected, walk, layers)
        for step in walk.steps(first):
            prefix = f"{step.name}."
            every = masker.targets if masker is not None else []
            targets = [target for target in every if target.name.startswith(prefix)]
            step.run(advance=not targets)
            collected.reduce(prefix)  # so that all ranks compute the same masks
            inside = [layer for layer in layers if layer.name.startswith(prefix)]
            collected.complete(model, inside)
            of_block = collected.activations(inside)  # stops here if one is not finite
            if masker is not None and targets:
                collected.paused = True
                masks = {target: masker.mask(target, of_block) for target in targets}
                with _mask(model, masks):
                    step.run()
                collected.paused = False
            if progress is not None and step.index + 1 < len(runner.blocks):
                progress.save(step.index + 1, collected, walk)
        collected.paused = True
        _run_tail(runner, walk, layers, collected)
        about = CalibrationRecord(hidden_states=walk.hidden.place)
    return replace(collected.activations(layers), about=about)


@contextmanager
def _mask(model: PreTrainedModel, masks: dict[Target, Tensor]) -> Iterator[None]:
    """Inside this context, weights are zero where their masks are false. Theirs are copies: the
    dense ones may lie in a mapped file, whose pages need no memory as long as nobody writes to
    them.
    """
    names = dict.fromkeys(target.layer.parameter for target in masks)
    parameters = [model.get_parameter(name) for name in names]
    dense = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            with as_created(parameter):
                parameter.data = parameter.data.clone()
        for target, mask in masks.items():
            weight = weight_of(model, target.layer)
            set_to_zero(weight, ~mask.to(weight.device))
        yield
    finally:
        for parameter, values in zip(parameters, dense, strict=True):
            parameter.data = values


def _run_tail(
    runner: BlockwiseModel, walk: Walk, layers: list[Layer], collected: InputSums
) -> None:
    """Collect the layers after the blocks: a projection of the output, and the head if it is a
    target.
    """
    remaining = [
        layer for layer in layers if layer.name not in collected.input_of and layer.block is None
    ]
    if not remaining:
        return
    body = (
        runner.model
        if any(layer.purpose == "head" for layer in remaining)
        else body_of(runner.model)
    )
    names = [statistic.name for statistic in collected.statistics]
    with input_hooks(runner.model, remaining, names) as after:
        for number in range(len(walk.batches)):
            walk.tail(number, body)
    after.reduce()
    collected.add(after)
