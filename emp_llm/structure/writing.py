"""The checkpoint with fewer units: written shard by shard, and compared with the dense model.

The shards, their order and dtypes stay; tensors get smaller, or hold zeros. A shard that an
interrupted run finished is not written again.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import BITS, Checkpoint, StoredTensor, header_text
from emp_llm.checkpoint.files import (
    INDEX_LIMIT,
    FilePool,
    read_json,
    sync_path,
    tensor_bytes,
    write_json,
)
from emp_llm.checkpoint.matrices import as_tensor
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import RefusedError, UserError, reason
from emp_llm.common.paths import INDEX_NAME, STRUCTURE_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.architecture import Architecture, Target, healed_tensors, within_block
from emp_llm.models.loading import headless_class, input_device, is_offloaded
from emp_llm.models.modules import find_blocks, weight_of
from emp_llm.models.placement import max_context
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.verification import Findings
from emp_llm.records.run_report import StructureRecord
from emp_llm.structure.choice import Choice, choose_units, count_removed, unit_scores
from emp_llm.structure.experts import Experts
from emp_llm.structure.parts import Heads
from emp_llm.structure.units import Changes, Cuts, Indices, UnitModel, changed_config
from emp_llm.walk.updated import UpdatedWeights

logger = logging.getLogger(__name__)


_ALIGNMENT = 8  # of the first tensor, as in safetensors
_PROMPT = 512  # tokens
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def cuts_of(model: UnitModel, choices: Sequence[Choice], remove: bool) -> Cuts:
    """What becomes of the stored tensors if only some units stay.

    Args:
        model: dense.
        choices: the kept units.
        remove: the others are removed; else they are set to zero, and experts are closed in their
            router.
    """
    kept = {choice.units: choice.kept for choice in choices}
    return model.units[0].cut(model, kept, remove)


def size_of(model: UnitModel, choices: Sequence[Choice]) -> tuple[int, int]:
    """(parameters, bytes) of the model if only some units stay; without choices, of the dense
    model. Stored tensors that it does not use are not counted.
    """
    unused = set(model.architecture.unused)
    tensors = model.checkpoint.tensors.values()
    used = [tensor for tensor in tensors if tensor.name not in unused]
    return _stored_size(used, cuts_of(model, choices, remove=True))


def _stored_size(tensors: Iterable[StoredTensor], cuts: Cuts) -> tuple[int, int]:
    """(elements, bytes) of what stays of tensors."""
    elements = 0
    size = 0
    for tensor in tensors:
        left = cuts.elements(tensor)
        elements += left
        size += left * BITS[tensor.dtype] // 8
    return elements, size


def active_parameters(model: UnitModel, choices: Sequence[Choice], parameters: int) -> int:
    """How many of a model's parameters a token reaches, if these units of the dense model stay.

    Args:
        model: the dense one.
        choices: the kept units; empty for the dense model.
        parameters: of the model with these units.
    """
    stay = {choice.units: len(choice.kept) for choice in choices}
    return parameters - sum(
        experts.unreached(stay.get(experts, len(experts))) for experts in Experts.among(model.units)
    )


def write_smaller_checkpoint(
    model: UnitModel,
    choices: Sequence[Choice],
    changes: Changes | None,
    updated: UpdatedWeights | None,
    out: OutputFolder,
) -> dict[str, str]:
    """Write shards and side files into an output, which notes the finished shards.

    Args:
        model: the dense one.
        choices: the kept units.
        changes: fields of config.json that change; None: units are set to zero, and all shapes
            stay.
        updated: the weights of a refit.

    Returns:
        BLAKE3 of each shard.
    """
    checkpoint = model.checkpoint
    folder = out.files
    remove = changes is not None
    cuts = cuts_of(model, choices, remove)
    for name, further in cuts.files.items():
        write_json(folder / name, further)
    for relative in checkpoint.side_files():
        source = checkpoint.folder / relative
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if changes is not None and str(relative) == "config.json":
            write_json(path, changed_config(read_json(source), changes))
        elif remove and str(relative) == INDEX_NAME:
            write_json(path, _smaller_index(source, checkpoint, cuts))
        else:
            shutil.copyfile(source, path)
    hashes = out.intact("shards", folder, [shard.name for shard in checkpoint.shards])
    total = sum(shard.stat().st_size for shard in checkpoint.shards)
    with progress_bar(total, "write", "B") as bar:
        for shard in checkpoint.shards:
            if shard.name not in hashes:
                tensors = [
                    tensor
                    for tensor in checkpoint.tensors.values()
                    if tensor.shard == shard and cuts.new_name(tensor.name) is not None
                ]
                tensors.sort(key=lambda tensor: tensor.start)
                content = _content(shard, tensors, cuts, fitted_at(choices), updated)
                hashes[shard.name] = write_shard(shard, tensors, cuts, content, folder / shard.name)
                out.note(shards=hashes)
            bar.update(shard.stat().st_size)
    checkpoint.check_unchanged()
    return hashes


def _smaller_index(source: Path, checkpoint: Checkpoint, cuts: Cuts) -> dict[str, Any]:
    """The index of shards without the removed tensors."""
    index: dict[str, Any] = read_json(source, limit=INDEX_LIMIT)
    metadata = index.get("metadata") or {}
    parameters, size = _stored_size(checkpoint.tensors.values(), cuts)
    known = {"total_size": size, "total_parameters": parameters}
    new = {name: value for name, value in known.items() if name in metadata}
    named = {cuts.new_name(name): shard for name, shard in index["weight_map"].items()}
    weight_map = {name: shard for name, shard in named.items() if name is not None}
    return index | {"weight_map": weight_map, "metadata": metadata | new}


def fitted_at(choices: Sequence[Choice]) -> dict[str, dict[int | None, Target]]:
    """Stored tensor -> number of an expert in it (None: the tensor is one matrix) -> the matrix
    there that a refit moves.
    """
    targets: dict[str, dict[int | None, Target]] = {}
    for choice in choices:
        for target in choice.units.fitted(choice.kept):
            targets.setdefault(target.matrix.stored.name, {})[target.matrix.expert] = target
    return targets


def write_shard(
    shard: Path,
    tensors: Sequence[StoredTensor],
    cuts: Cuts,
    content: Iterator[memoryview],
    path: Path,
) -> str:
    """Write a shard with other names and shapes; returns its BLAKE3. Tensors keep their order in
    the file and its header.
    """
    digest = blake3()
    offset = 0
    entries = {}
    for tensor in tensors:
        shape = cuts.new_shape(tensor)
        end = offset + math.prod(shape) * BITS[tensor.dtype] // 8
        place = {"dtype": tensor.dtype, "shape": list(shape), "data_offsets": [offset, end]}
        entries[tensor.name] = (cuts.new_name(tensor.name), place)
        offset = end
    stored = json.loads(header_text(shard))
    header = {name: entry for name, entry in stored.items() if name == "__metadata__"}
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
    cuts: Cuts,
    fits: Mapping[str, Mapping[int | None, Target]],
    updated: UpdatedWeights | None,
) -> Iterator[memoryview]:
    """The bytes of the tensors of a shard, one matrix at a time. What stays whole is read from
    the file as it is written.
    """
    with safe_open(shard, framework="pt") as file:
        for tensor in tensors:
            stored = file.get_tensor(tensor.name)
            for expert, target in fits.get(tensor.name, {}).items():
                weight = None if updated is None else updated.rows(target, 0, target.matrix.rows)
                if weight is not None:
                    matrix = stored if expert is None else stored[expert]
                    matrix.copy_(weight.T if target.matrix.transposed else weight)
            for matrix in cuts.matrices(tensor.name, stored):
                yield tensor_bytes(matrix.contiguous())


def compare_models(
    dense: PreTrainedModel,
    written: PreTrainedModel,
    choices: Sequence[Choice],
    updated: UpdatedWeights | None,
    record: StructureRecord,
) -> None:
    """Compare the logits of the models on one prompt; their difference is put into `record`.

    Args:
        dense: the dense model; it is changed and restored. If it is offloaded, no stack of experts
            may be fitted.
        written: loaded from the written checkpoint.
        choices, updated: of the written checkpoint.

    Raises:
        RefusedError: the logits differ by more than rounding explains, or so do the heads in the
            first attention that lost some.
    """
    length = min(_PROMPT, max_context(dense.config) or _PROMPT)
    ids = torch.randint(
        0,
        dense.config.get_text_config().vocab_size,
        (1, length),
        generator=torch.Generator().manual_seed(0),
    )
    with _without_units(dense, choices, updated):
        wanted, wanted_units = _outputs(dense, ids, choices)
    logits, written_units = _outputs(written, ids, choices)
    difference = float((wanted - logits).norm() / wanted.norm())
    differences = {"logits": difference}
    if wanted_units is not None and written_units is not None:
        differences["heads that stay"] = _largest_difference(wanted_units, written_units)
    limit = _LIMITS.get(dense.dtype, 0.1)
    if limit < difference and dense.dtype in (torch.float16, torch.bfloat16):
        # A model without many of its units may be so unstable that rounding alone does this.
        with _without_units(dense, choices, updated), _more_rounding(dense):
            rounded = _prompt_logits(dense, ids)
        limit = max(limit, 2 * float((wanted - rounded).norm() / wanted.norm()))
    units = choices[0].units
    for what, value in differences.items():
        if value > limit:
            raise RefusedError(
                "the written model does not compute what the dense model does without its removed "
                f"parts: the {what} differ by {value:.2g} of their norm. "
                f"{(not record.config and units.remedy_of_zeros) or units.remedy}"
            )
    record.difference = difference


@contextmanager
def _without_units(
    model: PreTrainedModel, choices: Sequence[Choice], updated: UpdatedWeights | None
) -> Iterator[None]:
    """Inside this context, nothing reads or reaches the removed units, and fitted weights have
    their new values.
    """
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with ExitStack() as hooks:
            for choice in choices:
                hooks.enter_context(choice.units.without(model, choice.kept))
                for target, unread in choice.units.fitted(choice.kept).items():
                    new = None if updated is None else updated.rows(target, 0, target.matrix.rows)
                    if new is None and not len(unread):
                        continue
                    if is_offloaded(model):  # a weight is there during a call alone
                        hooks.enter_context(_with_weight(model, target, new, unread))
                        continue
                    weight = weight_of(model, target.layer)
                    before.append((weight, weight.clone()))
                    if new is not None:
                        weight.copy_(new)
                    weight[:, unread] = 0
            yield
    finally:
        for weight, values in before:
            weight.copy_(values)


@contextmanager
def _more_rounding(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context, the hidden states behind each decoder block have a relative error of the
    size that their dtype's rounding has.
    """
    random = torch.Generator().manual_seed(0)

    def err(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        signs = torch.randint(0, 2, hidden.shape, generator=random) * 2 - 1
        error = 1 + torch.finfo(hidden.dtype).eps / 2 * signs.to(hidden.device)
        changed = (hidden * error).to(hidden.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with ExitStack() as hooks:
        for block in find_blocks(model)[1]:
            hooks.enter_context(block.register_forward_hook(err))
        yield


def _with_weight(
    model: PreTrainedModel, target: Target, new: Tensor | None, unread: Indices
) -> Any:
    """A hook with which a layer of an offloaded model has another weight.

    Args:
        new: the weight, shape (outputs, inputs); None: the dense one.
        unread: inputs whose weights are zero.
    """

    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        stored = target.matrix.stored
        with FilePool() as files:
            dense = as_tensor(
                target.matrix.read(files.reader(stored.shard), 0, target.matrix.rows), stored.dtype
            ).float()
        wanted = (dense if new is None else new).to(torch.float32, copy=True)
        wanted[:, unread] = 0
        change = (wanted - dense).to(output.device)
        return output + (args[0].float() @ change.T).to(output.dtype)

    return model.get_submodule(target.layer.name).register_forward_hook(add)


@torch.no_grad()
def _prompt_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits, shape (1, tokens, vocabulary); of a model without a head for tokens, what its
    last block gives.
    """
    inputs = ids.to(input_device(model))
    if headless_class(model.config.to_dict()) is None:
        logits: Tensor = model(inputs, use_cache=False).logits
        return logits.float().cpu()
    hidden: Tensor = model.base_model(inputs, use_cache=False).last_hidden_state
    return hidden.float().cpu()


def _outputs(
    model: PreTrainedModel, ids: Tensor, choices: Sequence[Choice]
) -> tuple[Tensor, Tensor | None]:
    """The logits, and what the kept units give of the first layer in which their order shows."""
    for choice in choices:
        heads = choice.units
        if isinstance(heads, Heads) and len(choice.kept) < len(heads):
            return heads.kept_outputs(model, choice.kept, lambda: _prompt_logits(model, ids))
    return _prompt_logits(model, ids), None


def _largest_difference(wanted: Tensor, written: Tensor) -> float:
    """The largest of all units, relative to the norm of the unit's outputs; one that gives next
    to nothing counts by the others.
    """
    norms = wanted.norm(dim=(0, 2))
    floor = 0.01 * norms.square().mean().sqrt() + torch.finfo(norms.dtype).tiny
    return float(((written - wanted).norm(dim=(0, 2)) / norms.maximum(floor)).max())


# Verification of a structured checkpoint: the scores and the choice are computed again, and
# every tensor is compared.


def check_units(
    model: UnitModel,
    pruned: Checkpoint,
    recipe: Recipe,
    record: StructureRecord,
    feature: Callable[[str], Tensor | None] | None,
    findings: Findings,
    trained: bool = False,
) -> None:
    """Compare a structured checkpoint with the dense model.

    Args:
        model: the dense one.
        pruned: the checkpoint.
        recipe, record: of its run.
        feature: of `unit_scores`.
        trained: whether it was trained after it was pruned. Then of its tensors, only the zeros of
            removed units are compared.

    Raises:
        UserError: the file of kept units is missing or unreadable.
    """
    say = findings.differences.append
    path = pruned.folder / STRUCTURE_NAME
    stored = read_tensors(path)
    for units in model.units:
        if (
            not {f"{units.name}.kept", f"{units.name}.scores"} <= stored.keys()
            or units.name not in record.layers
        ):
            raise UserError(f"{path}: it does not name {units.name}. Download it again.")
    stored_scores = [stored[f"{units.name}.scores"].numpy() for units in model.units]
    for units, scores, noted in zip(
        model.units, unit_scores(model.units, recipe.name, feature), stored_scores, strict=True
    ):
        if scores.shape != noted.shape or not np.allclose(scores, noted, rtol=1e-9, atol=0):
            say(f"{units.name}: its scores are not those of {recipe.method}.")
    findings.checked[" or ".join(dict.fromkeys(units.kind for units in model.units))] += sum(
        len(units) for units in model.units
    )

    by_rule = [msgspec.structs.replace(units, kept=units.rule) for units in record.layers.values()]
    chosen, _ = choose_units(model.units, stored_scores, recipe, count_removed(by_rule))
    choices = [
        replace(choice, kept=stored[f"{choice.units.name}.kept"].numpy()) for choice in chosen
    ]
    for wanted, choice in zip(chosen, choices, strict=True):
        if not np.array_equal(wanted.kept, choice.kept):
            say(
                f"{choice.units.name}: the kept units are not those that the recipe chooses by the "
                "scores."
            )
    findings.checked["choices"] += len(choices)
    _check_tensors(model, pruned, recipe, choices, findings, trained)
    _check_side_files(model.checkpoint, pruned, record, findings, trained)


def _check_tensors(
    model: UnitModel,
    pruned: Checkpoint,
    recipe: Recipe,
    choices: list[Choice],
    findings: Findings,
    trained: bool,
) -> None:
    """Compare every tensor with the rows and columns of the dense model. Refitted and healed
    weights may differ.
    """
    say = findings.differences.append
    remove = recipe.structure is None or not recipe.structure.keep_shapes
    cuts = cuts_of(model, choices, remove)
    refitted = set(fitted_at(choices)) if recipe.update is not None else set()
    refitted |= healed_tensors(model.architecture, recipe)
    expected = {name: cuts.new_name(name) for name in model.checkpoint.tensors}
    for shard, tensors in groupby(model.checkpoint.tensors.values(), lambda tensor: tensor.shard):
        with safe_open(shard, framework="pt") as source:
            for tensor in tensors:
                name = expected[tensor.name]
                if name is None:
                    continue
                theirs = pruned.tensors.get(name)
                if trained and (remove or theirs is None):
                    continue
                findings.checked["tensors of the source"] += 1
                if theirs is None or (theirs.dtype != tensor.dtype and not trained):
                    say(f"{name}: it is missing, or has another dtype.")
                    continue
                stored = source.get_tensor(tensor.name)
                matrices = list(cuts.matrices(tensor.name, stored))
                whole = matrices[0].dim() == stored.dim()
                wanted = matrices[0] if whole else torch.stack(matrices)
                with safe_open(theirs.shard, framework="pt") as file:
                    written = file.get_tensor(name)
                if wanted.shape != written.shape:
                    say(
                        f"{name}: it has the shape {list(written.shape)}; {list(wanted.shape)} are "
                        "kept."
                    )
                elif trained or tensor.name in refitted:
                    if not remove and bool((written[wanted == 0] != 0).any()):
                        say(f"{name}: weights of removed units are not zero.")
                elif not torch.equal(
                    *(values.contiguous().view(torch.uint8) for values in (wanted, written))
                ):
                    say(f"{name}: its values are not those of the source.")
    for name in () if trained else pruned.tensors.keys() - set(expected.values()):
        say(f"{name}: the source has no such tensor.")


def check_shapes(architecture: Architecture, findings: Findings) -> None:
    """Compare the stored shapes with config.json, and those of layers that transformers does not
    load with the blocks'.

    Args:
        architecture: of the pruned checkpoint.
    """
    shapes = {name: tensor.shape for name, tensor in architecture.checkpoint.tensors.items()}
    for parameter, name in architecture.stored_names.items():
        by_config = architecture.shapes.get(parameter, shapes[name])
        if shapes[name] != by_config:
            findings.differences.append(
                f"{name}: its shape {list(shapes[name])} is {list(by_config)} by config.json."
            )
    of_blocks = {
        (within_block(name), shape)
        for name, shape in shapes.items()
        if name not in architecture.unused
    }
    for name, end in architecture.further_blocks.items():
        if (end, shapes[name]) not in of_blocks:
            findings.differences.append(
                f"{name}: its shape {list(shapes[name])} is that of no decoder block any more."
            )


def _check_side_files(
    dense: Checkpoint,
    pruned: Checkpoint,
    record: StructureRecord,
    findings: Findings,
    trained: bool,
) -> None:
    """Compare the other files with those of the dense model; of a model that was trained since, the
    changed fields of config.json alone.
    """
    changes = {tuple(name.split(".")): value for name, value in record.config.items()}
    if trained:
        findings.checked["config.json"] += 1
        if changed_config(pruned.config, changes) != pruned.config:
            findings.differences.append("config.json: it has not the sizes that the run records.")
        return
    for relative in dense.side_files():
        ours = pruned.folder / relative
        theirs = dense.folder / relative
        findings.checked["side files"] += 1
        if not ours.is_file():
            findings.differences.append(f"{relative}: it is missing.")
        elif str(relative) == "config.json" and changes:
            if read_json(ours) != changed_config(read_json(theirs), changes):
                findings.differences.append(
                    f"{relative}: it has other changes than those that the run records."
                )
        elif str(relative) != INDEX_NAME and ours.read_bytes() != theirs.read_bytes():
            findings.differences.append(f"{relative}: differs from the source.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that the run wrote beside the checkpoint; UserError if it is missing
    or damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: it decided which units stay, and cannot be read "
            f"({reason(error)}). Download it."
        ) from error
