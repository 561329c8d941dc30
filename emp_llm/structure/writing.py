"""The checkpoint with fewer heads or neurons: written shard by shard, and compared with the dense model.

The shards, their order and dtypes stay; tensors get smaller, or hold zeros. A shard that an interrupted run finished is not
written again.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from emp_llm.checkpoint.files import INDEX_LIMIT, FilePool, read_json, sync_path, write_json
from emp_llm.checkpoint.headers import BITS, StoredTensor, header_text
from emp_llm.checkpoint.matrices import WORD, Words, read_words, words_in
from emp_llm.common.errors import UserError
from emp_llm.common.paths import INDEX_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.layers import Layer
from emp_llm.models.modules import weight_of
from emp_llm.models.offload import input_device
from emp_llm.models.placement import max_context
from emp_llm.structure.choice import Choice
from emp_llm.structure.units import Changes, Indices, UnitModel, changed_config

Fitted = Callable[[str], Tensor | None]  # the weight of a layer after a refit, shape (outputs, inputs); None: not fitted
_WORDS = 1 << 22  # of an unchanged tensor, read at a time
_ALIGNMENT = 8  # of the first tensor, as in safetensors
_PROMPT = 512  # tokens
_ROUNDS = 7
_SECONDS = 15.0  # no new round of passes begins after this time
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass
class Slice:
    """What stays of one matrix or bias, in its stored orientation.

    Attributes:
        kept: axis -> indices that stay, ascending; an axis that is missing stays whole.
        target: the layer whose fitted weights take its place, if there are any.
        transposed: stored as (inputs, outputs).
    """

    kept: dict[int, Indices] = field(default_factory=dict)
    target: str | None = None
    transposed: bool = False


Edits = dict[str, dict[int | None, Slice]]  # stored tensor -> expert (None: one matrix, or a bias) -> what stays


def edits_of(model: UnitModel, choices: Sequence[Choice]) -> Edits:
    """What stays of each stored tensor that changes."""
    edits: Edits = {}

    def keep(layer: Layer, axis: int, table: Indices, stays: Indices) -> Slice:
        matrix = model.matrices[layer]
        size = matrix.rows if axis == 0 else matrix.columns
        part = edits.setdefault(matrix.stored.name, {}).setdefault(matrix.expert, Slice(transposed=matrix.transposed))
        gone = np.delete(table, stays, 0).ravel()
        part.kept[1 - axis if matrix.transposed else axis] = np.setdiff1d(np.arange(size, dtype=np.int64), gone)
        return part

    for choice in choices:
        units = choice.units
        keep(units.output, 1, units.columns, choice.kept).target = units.name
        for layer, table in units.rows.items():
            part = keep(layer, 0, table, choice.kept)
            bias = model.architecture.stored_names.get(f"{layer.name}.bias")
            if bias in model.checkpoint.tensors and layer.expert is None:
                edits[bias] = {None: Slice({0: part.kept[1 if part.transposed else 0]})}
    return edits


def smaller_shape(tensor: StoredTensor, edits: Edits) -> tuple[int, ...]:
    """The shape of a stored tensor after the removal. All experts of a tensor have the same."""
    slices = edits.get(tensor.name)
    if slices is None:
        return tensor.shape
    shape, stack = list(tensor.shape), 0 if None in slices else len(tensor.shape) - 2
    for axis, kept in next(iter(slices.values())).kept.items():
        shape[stack + axis] = len(kept)
    return tuple(shape)


def size_of(tensors: Mapping[str, StoredTensor], edits: Edits) -> tuple[int, int]:
    """(elements, bytes) of all tensors after the removal."""
    shapes = [(math.prod(smaller_shape(tensor, edits)), tensor) for tensor in tensors.values()]
    return sum(count for count, _ in shapes), sum(count * BITS[tensor.dtype] // 8 for count, tensor in shapes)


def write_checkpoint(
    model: UnitModel,
    edits: Edits,
    changes: Changes | None,
    fitted: Fitted,
    folder: Path,
    done: Mapping[str, str],
    note: Callable[[dict[str, str]], None],
) -> dict[str, str]:
    """Write shards and side files into a folder.

    Args:
        model: the dense one.
        edits: what stays.
        changes: fields of config.json that change; None: units are set to zero, and all shapes stay.
        fitted: the weights of a refit.
        folder: exists; empty, or with the files of an interrupted run.
        done: BLAKE3 of the shards that an interrupted run finished, by name.
        note: called with the hashes of all finished shards after each.

    Returns:
        BLAKE3 of each shard.
    """
    checkpoint, hashes, remove = model.checkpoint, dict(done), changes is not None
    parameters, size = size_of(checkpoint.tensors, edits)
    for relative in checkpoint.side_files():
        source, path = checkpoint.folder / relative, folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if changes is not None and str(relative) == "config.json":
            write_json(path, changed_config(read_json(source), changes))
        elif remove and str(relative) == INDEX_NAME:
            index = read_json(source, limit=INDEX_LIMIT)
            metadata = index.get("metadata") or {}
            new = {"total_size": size, "total_parameters": parameters}
            write_json(path, index | {"metadata": metadata | {name: new[name] for name in new if name in metadata}})
        else:
            shutil.copyfile(source, path)
    with progress_bar(sum(shard.stat().st_size for shard in checkpoint.shards), "write", "B") as bar, FilePool() as files:
        for shard in checkpoint.shards:
            if shard.name not in hashes or not (folder / shard.name).is_file():
                tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.shard == shard]
                hashes[shard.name] = write_shard(shard, tensors, edits, remove, fitted, folder / shard.name, files)
                note(hashes)
            bar.update(shard.stat().st_size)
    checkpoint.check_unchanged()
    return hashes


def write_shard(
    shard: Path, tensors: list[StoredTensor], edits: Edits, remove: bool, fitted: Fitted, path: Path, files: FilePool
) -> str:
    """Write one shard; returns its BLAKE3. The tensors keep their order in the file and in its header."""
    tensors = sorted(tensors, key=lambda tensor: tensor.start)
    digest, offset, entries = blake3(), 0, {}
    for tensor in tensors:
        shape = smaller_shape(tensor, edits) if remove else tensor.shape
        end = offset + math.prod(shape) * BITS[tensor.dtype] // 8
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    old = json.loads(header_text(shard))
    header = {name: entries.get(name, each) for name, each in old.items()}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        for piece in chain([len(text).to_bytes(8, "little") + text], _content(tensors, edits, remove, fitted, files)):
            file.write(piece)
            digest.update(piece)
    sync_path(path)
    return str(digest.hexdigest())


def _content(tensors: list[StoredTensor], edits: Edits, remove: bool, fitted: Fitted, files: FilePool) -> Iterator[bytes]:
    """The bytes of the tensors of a shard, one matrix at a time."""
    for tensor in tensors:
        reader, slices = files.reader(tensor.shard), edits.get(tensor.name)
        if slices is None:
            count = words_in(tensor)
            for first in range(0, count, _WORDS):
                yield read_words(reader, tensor, first, min(_WORDS, count - first)).tobytes()
            continue
        shape = tensor.shape if None in slices else tensor.shape[1:]
        size = math.prod(shape)
        for number in [None] if None in slices else range(tensor.shape[0]):
            part = slices[number]
            weight = None if part.target is None else fitted(part.target)
            if weight is None:
                words = read_words(reader, tensor, (number or 0) * size, size).reshape(shape)
            else:
                words = _words_of(weight.T if part.transposed else weight)
            for axis, kept in part.kept.items():
                if remove:
                    words = np.take(words, kept, axis)
                else:
                    words = words.copy()
                    words[(slice(None),) * axis + (np.setdiff1d(np.arange(words.shape[axis]), kept),)] = 0
            yield words.tobytes()


def _words_of(weight: Tensor) -> Words:
    """The bits of a tensor of 16, 32 or 64 bits on the CPU, in its shape."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    words: Words = weight.contiguous().view(integer).numpy().view(WORD[weight.element_size()])
    return words


@dataclass(frozen=True)
class SideBySide:
    """Numbers of the dense and of the written model, as in `StructureRecord`."""

    tokens: int
    difference: float
    flops: tuple[float, float]
    speed: tuple[float, float]


def side_by_side(dense: PreTrainedModel, written: PreTrainedModel, choices: Sequence[Choice], fitted: Fitted) -> SideBySide:
    """Compare the models on one prompt, and time them in turn.

    Args:
        dense: the dense model; it is changed and restored.
        written: loaded from the written checkpoint.
        choices: the kept units.
        fitted: the weights of a refit.

    Raises:
        UserError: the models compute different logits.
    """
    length = min(_PROMPT, max_context(dense.config) or _PROMPT)
    ids = torch.randint(0, dense.config.get_text_config().vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with _without_units(dense, choices, fitted):
        wanted = _logits(dense, ids)
    got = _logits(written, ids)
    difference = float((wanted - got).norm() / wanted.norm())
    if not difference <= _LIMITS.get(dense.dtype, 0.1):
        raise UserError(
            f"the written model does not compute what the dense model does without its removed parts: the logits differ by "
            f"{difference:.2g} of their norm. Its attention may depend on the number of heads; add --keep-shapes."
        )
    flops = (_flops(dense, ids), _flops(written, ids))
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    with progress_bar(2 * _ROUNDS, "speed", "pass") as bar:
        for number in range(_ROUNDS):
            if number > 1 and time.perf_counter() - start > _SECONDS:
                break
            for model, own in zip((dense, written), times, strict=True):
                own.append(_seconds(model, ids))
                bar.update(1)
    speeds = [length / statistics.median(own) for own in times]
    return SideBySide(length, difference, (flops[0] / length, flops[1] / length), (speeds[0], speeds[1]))


@contextmanager
def _without_units(model: PreTrainedModel, choices: Sequence[Choice], fitted: Fitted) -> Iterator[None]:
    """Inside this context, the columns that read removed units are zero, and the others have their fitted values."""
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for choice in choices:
            weight, new = weight_of(model, choice.units.output), fitted(choice.units.name)
            before.append((weight, weight.clone()))
            if new is not None:
                weight.copy_(new)
            weight[:, ~choice.columns.to(weight.device)] = 0
        yield
    finally:
        for weight, values in before:
            weight.copy_(values)


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids.to(input_device(model)), use_cache=False).logits
    return logits.float().cpu()


def _flops(model: PreTrainedModel, ids: Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        _logits(model, ids)
    return float(counter.get_total_flops())


def _seconds(model: PreTrainedModel, ids: Tensor) -> float:
    device = input_device(model)
    start = time.perf_counter()
    with torch.no_grad():
        model(ids.to(device), use_cache=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
