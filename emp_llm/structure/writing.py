"""The checkpoint with fewer units: written shard by shard, and compared with the dense model.

The shards, their order and dtypes stay; tensors get smaller, or hold zeros. A shard that an
interrupted run finished is not written again.
"""

import json
import logging
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from emp_llm.checkpoint.files import (
    INDEX_LIMIT,
    FilePool,
    read_json,
    sync_path,
    tensor_bytes,
    write_json,
)
from emp_llm.checkpoint.headers import BITS, StoredTensor, header_text
from emp_llm.checkpoint.matrices import as_tensor, torch_dtype
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError
from emp_llm.common.paths import INDEX_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.architecture import Target
from emp_llm.models.loading import headless_class
from emp_llm.models.modules import find_blocks, weight_of
from emp_llm.models.offload import input_device, is_offloaded
from emp_llm.models.placement import max_context
from emp_llm.records.run_report import StructureRecord
from emp_llm.structure.choice import Choice
from emp_llm.structure.experts import Experts, closed_routers
from emp_llm.structure.layers import Layers, passed_by
from emp_llm.structure.parts import Parts
from emp_llm.structure.units import Changes, UnitModel, changed_config
from emp_llm.walk.moved import MovedWeights

logger = logging.getLogger(__name__)
# Stored tensor -> expert (None: the tensor as a whole, or a bias) -> for each dimension, which of
# its indices stay: bool.
Kept = dict[str, dict[int | None, list[Tensor]]]
_CLOSED = -1e30  # added to what a router chooses by, or the lowest number of the dtype
_ALIGNMENT = 8  # of the first tensor, as in safetensors
_PROMPT = 512  # tokens
_ROUNDS = 7
_SECONDS = 15.0  # no new round of passes begins after this time
_REPORT = "Please report the class of the model"
_REMEDIES = {
    "heads": "Its attention may depend on the number of heads; add --keep-shapes. Or it stores "
    "queries, keys and values in another order than is known here.",
    "neurons": f"Its MLP stores gates and features in another order than is known here. {_REPORT}.",
    "experts": f"Its router chooses in a way that is not known here. {_REPORT}.",
    "layers": f"Its layers depend on their number in a way that is not known here. {_REPORT}.",
}
_KEPT_SHAPES = (
    "It stores queries, keys and values in another order than is known here, so its heads cannot "
    f"be pruned. {_REPORT}, and use --structure neurons."
)
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass
class Cut:
    """What becomes of the stored tensors.

    Attributes:
        kept: what stays of those of which a part goes.
        names: the new name of those that get one; None: the tensor goes.
        fills: tensor -> the value in the place of what does not stay, where shapes stay; others
            have 0.
    """

    kept: Kept = field(default_factory=dict)
    names: dict[str, str | None] = field(default_factory=dict)
    fills: dict[str, float] = field(default_factory=dict)


def cut_of(model: UnitModel, choices: Sequence[Choice], remove: bool) -> Cut:
    """What becomes of the stored tensors if only some units stay.

    Args:
        model: dense.
        choices: the kept units.
        remove: the others are removed; else they are set to zero, and experts are closed in their
            router.
    """
    done = Cut()
    tensors = model.checkpoint.tensors
    kept = done.kept
    for choice in choices:
        units = choice.units
        stays = [int(each) for each in choice.kept]
        if isinstance(units, Layers):
            new = {name: units.new_name(name, stays) for name in units.stored}
            done.names |= {name: other for name, other in new.items() if name != other}
        elif isinstance(units, Experts):
            for name, dimension in units.together.items():
                masks = [torch.ones(size, dtype=torch.bool) for size in tensors[name].shape]
                masks[dimension][choice.gone] = False
                kept[name] = {None: masks}
            for name, expert in units.own.items():
                if not remove and expert not in stays:
                    kept[name] = {None: [torch.zeros(tensors[name].shape[0], dtype=torch.bool)]}
                elif remove:
                    # The last number is the expert's.
                    before, _, after = name.rpartition(f".{expert}.")
                    done.names[name] = (
                        f"{before}.{stays.index(expert)}.{after}" if expert in stays else None
                    )
            for name in units.closes:
                dtype = torch_dtype(tensors[name].dtype)
                done.fills[name] = max(_CLOSED, torch.finfo(dtype).min / 4)
        elif isinstance(units, Parts):
            parts = [(units.output, units.columns, False)] + [
                (target, table, True) for target, table in units.rows.items()
            ]
            for target, table, outputs in parts:
                matrix = target.matrix
                removed = choice.removed(table)
                whole = [torch.ones(size, dtype=torch.bool) for size in matrix.stored.shape[-2:]]
                masks = kept.setdefault(matrix.stored.name, {}).setdefault(matrix.expert, whole)
                masks[int(outputs == matrix.transposed)][removed] = False
                bias = model.architecture.stored_names.get(f"{target.name}.bias")
                if outputs and bias in tensors and matrix.expert is None:
                    kept.setdefault(bias, {None: [torch.ones(matrix.rows, dtype=torch.bool)]})[
                        None
                    ][0][removed] = False
    return done


def cut(tensor: Tensor, kept: Sequence[Tensor], remove: bool, fill: float = 0.0) -> Tensor:
    """A stored tensor without what does not stay, or with another value in its place."""
    for dimension, stays in enumerate(kept):
        if not bool(stays.all()):
            places = (stays if remove else ~stays).nonzero()[:, 0]
            tensor = (
                tensor.index_select(dimension, places)
                if remove
                else tensor.index_fill(dimension, places, fill)
            )
    return tensor


def smaller_shape(tensor: StoredTensor, kept: Kept) -> tuple[int, ...]:
    """The shape of a stored tensor after the removal. All experts of a tensor have the same."""
    if tensor.name not in kept:
        return tensor.shape
    sizes = [int(stays.sum()) for stays in next(iter(kept[tensor.name].values()))]
    return (*tensor.shape[: len(tensor.shape) - len(sizes)], *sizes)


def left_of(tensor: StoredTensor, done: Cut) -> int:
    """How many elements of a stored tensor stay. Its experts may have different numbers of
    neurons, where shapes stay.
    """
    if done.names.get(tensor.name, "") is None:
        return 0
    parts = done.kept.get(tensor.name)
    return (
        tensor.numel
        if parts is None
        else sum(math.prod(int(each.sum()) for each in masks) for masks in parts.values())
    )


def size_of(model: UnitModel, choices: Sequence[Choice]) -> tuple[int, int]:
    """(elements, bytes) of all tensors if only some units stay; without choices, of the dense
    model.
    """
    done = cut_of(model, choices, remove=True)
    sizes = [
        (left_of(tensor, done), BITS[tensor.dtype]) for tensor in model.checkpoint.tensors.values()
    ]
    return sum(count for count, _ in sizes), sum(count * bits // 8 for count, bits in sizes)


def active_parameters(model: UnitModel, choices: Sequence[Choice], parameters: int) -> int:
    """How many of a model's parameters a token reaches, if these units of the dense model stay.

    Args:
        model: the dense one.
        choices: the kept units; empty for the dense model.
        parameters: of the model with these units.
    """
    stay = {choice.units: len(choice.kept) for choice in choices}
    for units in model.units:
        if isinstance(units, Experts):
            each = sum(target.matrix.numel for target in units.targets) // len(units)
            parameters -= (stay.get(units, len(units)) - units.top_k) * each
    return parameters


def write_checkpoint(
    model: UnitModel,
    choices: Sequence[Choice],
    changes: Changes | None,
    moved: MovedWeights | None,
    out: OutputFolder,
) -> dict[str, str]:
    """Write shards and side files into an output, which notes the finished shards.

    Args:
        model: the dense one.
        choices: the kept units.
        changes: fields of config.json that change; None: units are set to zero, and all shapes
            stay.
        moved: the weights of a refit.

    Returns:
        BLAKE3 of each shard.
    """
    checkpoint = model.checkpoint
    folder = out.files
    remove = changes is not None
    done = cut_of(model, choices, remove)
    hashes: dict[str, str] = dict(out.get("shards") or {})
    for relative in checkpoint.side_files():
        source = checkpoint.folder / relative
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if changes is not None and str(relative) == "config.json":
            write_json(path, changed_config(read_json(source), changes))
        elif changes is not None and str(relative) == INDEX_NAME:
            index = read_json(source, limit=INDEX_LIMIT)
            parameters, size = size_of(model, choices)
            metadata = index.get("metadata") or {}
            new = {"total_size": size, "total_parameters": parameters}
            named = {
                done.names.get(name, name): shard for name, shard in index["weight_map"].items()
            }
            index |= {
                "weight_map": {name: shard for name, shard in named.items() if name is not None}
            }
            write_json(
                path,
                index
                | {"metadata": metadata | {name: new[name] for name in new if name in metadata}},
            )
        else:
            shutil.copyfile(source, path)
    with progress_bar(
        sum(shard.stat().st_size for shard in checkpoint.shards), "write", "B"
    ) as bar:
        for shard in checkpoint.shards:
            if shard.name not in hashes or not (folder / shard.name).is_file():
                tensors = [
                    tensor for tensor in checkpoint.tensors.values() if tensor.shard == shard
                ]
                tensors.sort(key=lambda tensor: tensor.start)
                tensors = [
                    tensor for tensor in tensors if done.names.get(tensor.name, "") is not None
                ]
                shapes = [smaller_shape(tensor, done.kept if remove else {}) for tensor in tensors]
                names = [done.names.get(tensor.name) or tensor.name for tensor in tensors]
                content = _content(shard, tensors, done, remove, fitted_at(choices), moved)
                hashes[shard.name] = write_shard(
                    shard, tensors, names, shapes, content, folder / shard.name
                )
                out.note(shards=hashes)
            bar.update(shard.stat().st_size)
    checkpoint.check_unchanged()
    return hashes


def fitted(choice: Choice) -> list[Target]:
    """The matrices whose weights a refit moves: those that read heads or neurons, and the last ones
    of the kept experts and of the shared one."""
    if isinstance(choice.units, Experts):
        shared = [] if choice.units.shared is None else [choice.units.shared]
        return [choice.units.outputs[number] for number in choice.kept] + shared
    return [choice.units.output] if isinstance(choice.units, Parts) and len(choice.gone) else []


def fitted_at(choices: Sequence[Choice]) -> dict[str, dict[int | None, Target]]:
    """Stored tensor -> number of an expert in it (None: the tensor is one matrix) -> the matrix
    there that a refit moves.
    """
    found: dict[str, dict[int | None, Target]] = {}
    for target in (target for choice in choices for target in fitted(choice)):
        found.setdefault(target.matrix.stored.name, {})[target.matrix.expert] = target
    return found


def write_shard(
    shard: Path,
    tensors: Sequence[StoredTensor],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    content: Iterator[memoryview],
    path: Path,
) -> str:
    """Write a shard with other names and shapes; returns its BLAKE3. Tensors keep their order in
    the file and its header.
    """
    digest = blake3()
    offset = 0
    entries = {}
    for tensor, name, shape in zip(tensors, names, shapes, strict=True):
        end = offset + math.prod(shape) * BITS[tensor.dtype] // 8
        entries[tensor.name] = (
            name,
            {"dtype": tensor.dtype, "shape": list(shape), "data_offsets": [offset, end]},
        )
        offset = end
    stored = json.loads(header_text(shard))
    header = {name: each for name, each in stored.items() if name == "__metadata__"}
    header |= dict(entries[name] for name in stored if name in entries)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        for piece in chain([memoryview(len(text).to_bytes(8, "little") + text)], content):
            file.write(piece)
            digest.update(piece)
    sync_path(path)
    return str(digest.hexdigest())


def _content(
    shard: Path,
    tensors: Sequence[StoredTensor],
    done: Cut,
    remove: bool,
    moves: Mapping[str, Mapping[int | None, Target]],
    moved: MovedWeights | None,
) -> Iterator[memoryview]:
    """The bytes of the tensors of a shard, one matrix at a time. What stays whole is read from
    the file as it is written.
    """
    with safe_open(shard, framework="pt") as file:
        for tensor in tensors:
            stored = file.get_tensor(tensor.name)
            masks = done.kept.get(tensor.name, {None: []})
            for expert, target in moves.get(tensor.name, {}).items():
                weight = None if moved is None else moved.rows(target, 0, target.matrix.rows)
                if weight is not None:
                    (stored if expert is None else stored[expert]).copy_(
                        weight.T if target.matrix.transposed else weight
                    )
            for number, stays in sorted(masks.items(), key=lambda item: item[0] or 0):
                part = stored if number is None else stored[number]
                yield tensor_bytes(
                    cut(part, stays, remove, done.fills.get(tensor.name, 0.0)).contiguous()
                )


def compare(
    dense: PreTrainedModel,
    written: PreTrainedModel,
    choices: Sequence[Choice],
    moved: MovedWeights | None,
    record: StructureRecord,
) -> None:
    """Compare the models on one prompt, and time them in turn if both are in memory; the numbers
    are put into `record`.

    Args:
        dense: the dense model; it is changed and restored. If it is offloaded, no stack of experts
            may be fitted.
        written: loaded from the written checkpoint.
        choices, moved: of the written checkpoint.

    Raises:
        UserError: the models compute different logits, or other heads in the first attention that
            lost some.
    """
    length = min(_PROMPT, max_context(dense.config) or _PROMPT)
    ids = torch.randint(
        0,
        dense.config.get_text_config().vocab_size,
        (1, length),
        generator=torch.Generator().manual_seed(0),
    )
    heads = next(
        (choice for choice in choices if choice.units.kind == "heads" and len(choice.gone)), None
    )
    with _without_units(dense, choices, moved):
        wanted, wanted_heads = _logits_and_heads(dense, ids, heads)
    logits, found_heads = _logits_and_heads(written, ids, heads)
    difference = float((wanted - logits).norm() / wanted.norm())
    differences = {"logits": difference}
    # A wrong order shows there in any dtype.
    if wanted_heads is not None and found_heads is not None:
        differences["heads that stay"] = _difference_of_heads(wanted_heads, found_heads)
    limit = _LIMITS.get(dense.dtype, 0.1)
    for what, value in differences.items():
        if value <= limit:
            continue
        kinds = [choice.units.kind for choice in choices]
        remedy = _REMEDIES["heads" if "heads" in kinds else kinds[0]]
        if "heads" in kinds and not record.config:  # all shapes are kept
            remedy = _KEPT_SHAPES
        raise UserError(
            "the written model does not compute what the dense model does without its removed "
            f"parts: the {what} differ by {value:.2g} of their norm. {remedy}"
        )
    record.prompt_tokens = length
    record.difference = difference
    if is_offloaded(dense) or is_offloaded(written):
        logger.warning(
            "warning: both models do not fit in memory together, so their speed is not compared."
        )
        return
    seconds: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    with progress_bar(2 * _ROUNDS, "speed", "pass") as bar:
        for number in range(_ROUNDS):
            if number > 1 and time.perf_counter() - start > _SECONDS:
                break
            for model, own in zip((dense, written), seconds, strict=True):
                own.append(_seconds(model, ids))
                bar.update(1)
    for model, cost, own in zip(
        (dense, written), (record.dense, record.pruned), seconds, strict=True
    ):
        with FlopCounterMode(display=False) as counter:
            _logits(model, ids)
        cost.flops_per_token = counter.get_total_flops() / length
        cost.tokens_per_second = length / statistics.median(own)


@contextmanager
def _without_units(
    model: PreTrainedModel, choices: Sequence[Choice], moved: MovedWeights | None
) -> Iterator[None]:
    """Inside this context, nothing reads or reaches the removed units, and fitted weights have
    their new values.
    """
    before: list[tuple[Tensor, Tensor]] = []
    removed: list[nn.Module] = []
    hooks = ExitStack()
    try:
        for choice in choices:
            if isinstance(choice.units, Layers):
                removed = [
                    find_blocks(model, choice.units.name)[1][number] for number in choice.gone
                ]
            for target in fitted(choice):
                new = None if moved is None else moved.rows(target, 0, target.matrix.rows)
                if is_offloaded(model):  # a weight is there during a call alone
                    gone: Any = (
                        choice.removed(choice.units.columns)
                        if isinstance(choice.units, Parts)
                        else []
                    )
                    hooks.enter_context(_with_weight(model, target, new, gone))
                    continue
                weight = weight_of(model, target.layer)
                before.append((weight, weight.clone()))
                if new is not None:
                    weight.copy_(new)
                if isinstance(choice.units, Parts):
                    weight[:, choice.removed(choice.units.columns).to(weight.device)] = 0
        hooks.enter_context(passed_by(model, removed))
        hooks.enter_context(
            closed_routers(
                model, {c.units: c.kept for c in choices if isinstance(c.units, Experts)}
            )
        )
        with hooks:
            yield
    finally:
        for weight, values in before:
            weight.copy_(values)


def _with_weight(
    model: PreTrainedModel, target: Target, new: Tensor | None, gone: Sequence[int] | Tensor
) -> Any:
    """A hook with which a layer of an offloaded model has another weight.

    Args:
        new: the weight, shape (outputs, inputs); None: the dense one.
        gone: inputs whose weights are zero.
    """

    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        stored = target.matrix.stored
        with FilePool() as files:
            dense = as_tensor(
                target.matrix.read(files.reader(stored.shard), 0, target.matrix.rows), stored.dtype
            ).float()
        wanted = (dense if new is None else new).to(torch.float32, copy=True)
        wanted[:, gone] = 0
        change = (wanted - dense).to(output.device)
        return output + (args[0].float() @ change.T).to(output.dtype)

    return model.get_submodule(target.layer.name).register_forward_hook(add)


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits, shape (1, tokens, vocabulary); of a model without a head for tokens, what its
    last block gives.
    """
    inputs = ids.to(input_device(model))
    if headless_class(model.config.to_dict()) is None:
        logits: Tensor = model(inputs, use_cache=False).logits
        return logits.float().cpu()
    hidden: Tensor = model.base_model(inputs, use_cache=False).last_hidden_state
    return hidden.float().cpu()


def _logits_and_heads(
    model: PreTrainedModel, ids: Tensor, choice: Choice | None
) -> tuple[Tensor, Tensor | None]:
    """The logits, and what the kept heads of an attention give, shape (tokens, units, columns)."""
    if choice is None or not isinstance(choice.units, Parts):
        return _logits(model, ids), None
    columns = torch.from_numpy(choice.units.columns)
    kept = columns[torch.from_numpy(choice.kept)]
    inputs: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0].float().cpu().flatten(0, -2))

    with model.get_submodule(choice.units.output.layer.name).register_forward_pre_hook(note):
        logits = _logits(model, ids)
    if inputs[0].shape[-1] == columns.numel():  # all shapes are kept
        return logits, inputs[0][:, kept]
    return logits, inputs[0].reshape(-1, *kept.shape)


def _difference_of_heads(wanted: Tensor, found: Tensor) -> float:
    """The largest of all heads, relative to the head's norm; one that gives next to nothing
    counts by the others.
    """
    norms = wanted.norm(dim=(0, 2))
    floor = 0.01 * norms.square().mean().sqrt() + torch.finfo(norms.dtype).tiny
    return float(((found - wanted).norm(dim=(0, 2)) / norms.maximum(floor)).max())


@torch.no_grad()
def _seconds(model: PreTrainedModel, ids: Tensor) -> float:
    device = input_device(model)
    start = time.perf_counter()
    model(ids.to(device), use_cache=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
