"""Keeps a model sparse: restores the zeros of a pruned checkpoint, once or after every step of
an optimizer.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from emp_llm.checkpoint.bits import booleans
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import FileReader
from emp_llm.checkpoint.headers import StoredTensor
from emp_llm.checkpoint.matrices import read_words, words_in
from emp_llm.checkpoint.packed_format import PackedCheckpoint, PackedFolder
from emp_llm.common.declared import check_type, options_of
from emp_llm.common.errors import UserError
from emp_llm.common.machine import default_modes
from emp_llm.common.paths import PACK_NAME, REPORT_NAME
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.masks import Masks, check_merged, check_whole, plain_model, unwrapped
from emp_llm.models.modules import rows_in, weight_of
from emp_llm.models.sharded import check_maskable, is_sharded, reshard, stand_in
from emp_llm.options.recipe import Targets
from emp_llm.records.run_report import read_report

Source = Path | str | Mapping[str, Tensor]


def masks_in(
    folder: Path | str,
    model: PreTrainedModel,
    targets: str | list[str] | None = None,
    blocks: str | None = None,
) -> Masks:
    """The masks of a pruned checkpoint, for a model in memory. A weight is removed if no bit of it
    is set; -0.0 is kept.

    Args:
        folder: the pruned checkpoint, or its packed folder, with weights or a mask alone.
        model: loaded from the checkpoint, or from a model derived from it; on any device, of any
            floating-point dtype. LoRA adapters must be merged, and weights in memory (not quantised
            or offloaded to disk). They may be sharded by fully_shard or tensor parallelism.
        targets: name suffixes, a regular expression, or "mlp" or "all-linear"; None: the layers of
            the run that pruned it.
        blocks: name of the list of decoder blocks; None: that of the run.

    Raises:
        UserError: the folder is no checkpoint or one of another model, its targets are unknown, or
            a weight of the model is not whole.
    """
    check_type("model", model, PreTrainedModel)
    folder = Path(folder)
    packed = PackedFolder(folder) if (folder / PACK_NAME).is_file() else None
    checkpoint = Checkpoint(folder) if packed is None else PackedCheckpoint(packed)
    scope = _scope(folder, targets, blocks)
    with unwrapped(model):
        architecture = Architecture.of_model(checkpoint, model, scope.blocks)
        chosen = architecture.targets_of(scope)
        return stored_masks(checkpoint, chosen, model, packed)


def stored_masks(
    checkpoint: Checkpoint,
    targets: list[Target],
    model: PreTrainedModel,
    packed: PackedFolder | None = None,
) -> Masks:
    """The masks of some targets of a checkpoint, for a model in memory; arguments and errors are
    those of `masks_in`.
    """
    by_tensor: dict[str, list[Target]] = defaultdict(list)
    parameters: dict[str, NDArray[np.bool_]] = {}
    for target in targets:
        layer = target.layer
        parameter = model.get_parameter(layer.parameter)
        weight = (
            rows_in(stand_in(parameter), layer)
            if is_sharded(parameter)
            else weight_of(model, layer)
        )
        check_whole(layer.name, weight, (target.matrix.rows, target.matrix.columns))
        by_tensor[target.matrix.stored.name].append(target)
        if layer.parameter not in parameters:
            parameters[layer.parameter] = np.ones(parameter.shape, dtype=np.bool_)
    for name, of_tensor in by_tensor.items():
        stored = checkpoint.tensors[name]
        kept = _stored_mask(packed, stored).reshape(stored.shape)
        for target in of_tensor:
            matrix = kept if target.matrix.expert is None else kept[target.matrix.expert]
            rows_in(parameters[target.layer.parameter], target.layer)[:] = (
                matrix.T if target.matrix.transposed else matrix
            )
    masks = Masks()
    for name, mask in parameters.items():
        masks.put(name, mask)
    return masks


def find_masks(
    masks: Source,
    model: PreTrainedModel,
    targets: str | list[str] | None = None,
    blocks: str | None = None,
) -> Masks:
    """Masks as a user gives them: a pruned or packed folder, a file of `Masks.save`, or masks in
    memory.
    """
    for name, value in {"targets": targets, "blocks": blocks}.items():
        if value is not None:
            options_of(Targets)[name].checked(value)
    check_type("masks", masks, Path, str, Mapping)
    model = plain_model(model)
    check_maskable(model)
    check_merged(model)
    reshard(model)
    if not isinstance(masks, Path | str):
        return masks if isinstance(masks, Masks) else Masks(masks)
    if Path(masks).is_file():
        return Masks.load(masks)
    return masks_in(masks, model, targets, blocks)


@default_modes()
def reapply_mask(
    model: PreTrainedModel,
    masks: Source,
    targets: str | list[str] | None = None,
    blocks: str | None = None,
) -> int:
    """Set every weight of a model to zero, in place, that masks remove or that is zero in the
    targets of a pruned checkpoint.

    Call it after merging adapters or editing weights.

    Args:
        model: on any device, of any floating-point dtype; adapters merged, and weights in memory,
            as `masks_in` says. If they are sharded by fully_shard or tensor parallelism, each
            process does this to its own part, and must call it.
        masks: a pruned checkpoint or its packed folder; `Masks`, or a file of them; or bool tensors
            by parameter name, true where a weight stays.
        targets: with a folder, the layers (see `masks_in`); None: those of the run that pruned it.
        blocks: with a folder, the name of the list of decoder blocks; None: that of the run.

    Returns:
        The number of these weights that were not zero before, in this process.

    Raises:
        UserError: the masks cannot be read or are of another model, or a weight is not whole.
            Nothing is changed.
    """
    of_model = find_masks(masks, model, targets, blocks)
    broken = of_model.broken(model)
    of_model.apply(model)
    return broken


class SparsityCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a model as sparse as a pruned checkpoint, or as masks, while `transformers.Trainer`
    trains it.

    Each step of the optimizer changes the removed weights too; the callback sets them to zero
    again, before anything is saved or evaluated:
    `Trainer(..., callbacks=[SparsityCallback("pruned")])`. LoRA freezes the base and needs no
    callback; call `reapply_mask(model.merge_and_unload(), "pruned")` after the training. It works
    under DistributedDataParallel and FSDP2 too, where each process masks its own part. The masks
    take one bit of memory for every weight of the targets. Arguments and errors are those of
    `reapply_mask`; errors are raised when the training begins.
    """

    def __init__(
        self, masks: Source, targets: str | list[str] | None = None, blocks: str | None = None
    ) -> None:
        self._source = masks
        self._targets = targets
        self._blocks = blocks
        self._masks: Masks | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Read the masks, and make the model sparse before the first step."""
        self._masks = find_masks(self._source, context["model"], self._targets, self._blocks)
        self._masks.apply(context["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Set the removed weights to zero again."""
        if self._masks is not None:
            self._masks.apply(context["model"])


def _scope(folder: Path, targets: str | list[str] | None, blocks: str | None) -> Targets:
    """The targets and blocks: those given, or else those of the run."""
    if (folder / REPORT_NAME).is_file():
        scope = read_report(folder).recipe.targets
    elif targets is None:
        raise UserError(
            f"{folder}: without {REPORT_NAME} its targets are unknown. Name them, for "
            "example targets='mlp'."
        )
    else:
        scope = Targets()
    if targets is not None:
        scope = replace(scope, layers=targets, ignore=None)
    return scope if blocks is None else replace(scope, blocks=blocks)


def _stored_mask(packed: PackedFolder | None, stored: StoredTensor) -> NDArray[np.bool_]:
    """The mask of all words of a stored tensor, in one dimension."""
    if packed is not None:
        shard = next(shard for shard in packed.shards.values() if shard.path == stored.shard)
        return booleans(shard.mask(stored), words_in(stored))
    with FileReader(stored.shard) as file:
        kept: NDArray[np.bool_] = read_words(file, stored, 0, words_in(stored)) != 0
    return kept
