"""Keeps a model sparse: restores the zeros of a pruned checkpoint, once or after every step of an optimizer."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from emp_llm.architecture.architecture import Architecture
from emp_llm.architecture.layers import Layer
from emp_llm.architecture.model_layers import weight_of
from emp_llm.architecture.targets import Target
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.safetensors_header import StoredTensor
from emp_llm.checkpoint.words import read_words, words_in
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import PACK_NAME, REPORT_NAME
from emp_llm.packing.bits import Bytes, booleans, mask_of
from emp_llm.packing.packed_folder import PackedCheckpoint, PackedFolder
from emp_llm.packing.packed_format import PackLayout
from emp_llm.packing.unpacker import masks_of
from emp_llm.pruning.recipe import read_report
from emp_llm.records.source import RecipeRecord
from emp_llm.storage.file_pool import FilePool


class Masks:
    """The weights that a pruned checkpoint has removed from a model: one bit for each weight of its targets, in memory.

    A weight is removed if no bit of it is set in the checkpoint; -0.0 is kept.

    Args:
        model: loaded from the checkpoint, or from a model derived from it; on any device, of any floating-point dtype. LoRA
            adapters must be merged, and weights whole (not quantised, offloaded or sharded over processes).
        folder: the pruned checkpoint, or its packed folder, with weights or a mask alone.
        targets: layers, as for `prune`; None: those of the run that pruned it.
        blocks: name of the list of decoder blocks, as for `prune`; None: that of the run.

    Raises:
        UserError: the folder is no checkpoint or one of another model, its targets are unknown, or a weight of the model is not
            whole.
    """

    def __init__(
        self, model: PreTrainedModel, folder: Path | str, targets: str | list[str] | None = None, blocks: str | None = None
    ) -> None:
        folder = Path(folder)
        _check_merged(model)
        packed = PackedFolder(folder) if (folder / PACK_NAME).is_file() else None
        checkpoint = Checkpoint(folder) if packed is None else PackedCheckpoint(packed)
        recipe = _recipe(folder, targets, blocks)
        chosen = Architecture.of_model(checkpoint, model, recipe.blocks).select(recipe.targets, recipe.ignore)
        self._bits: dict[Layer, Tensor] = {}
        by_tensor: dict[str, list[Target]] = defaultdict(list)
        for target in chosen:
            _check_whole(model, target.layer, (target.matrix.rows, target.matrix.columns))
            by_tensor[target.matrix.stored.name].append(target)
        with FilePool() as files:
            for name, of_tensor in by_tensor.items():
                stored = checkpoint.tensors[name]
                bits = _mask(packed, stored, files)
                kept = booleans(bits, words_in(stored)).reshape(stored.shape)
                for target in of_tensor:
                    own = kept if target.matrix.expert is None else kept[target.matrix.expert]
                    own = own.T if target.matrix.transposed else own
                    self._bits[target.layer] = torch.from_numpy(np.packbits(own, bitorder="little"))

    def apply(self, model: PreTrainedModel) -> None:
        """Set the removed weights of the model to zero, in place. No other weight changes."""
        for weight, removed in self._removed(model):
            weight.masked_fill_(removed, 0)

    def broken(self, model: PreTrainedModel) -> int:
        """The number of removed weights that are not zero in the model."""
        return sum(int(weight.ne(0).logical_and_(removed).sum()) for weight, removed in self._removed(model))

    @property
    def layers(self) -> list[str]:
        """Names of the masked layers."""
        return [layer.name for layer in self._bits]

    def _removed(self, model: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight, removed) of each target: the parameter and a boolean mask, both of shape (outputs, inputs)."""
        for layer, bits in self._bits.items():
            weight = weight_of(model, layer)
            if bits.device != weight.device:
                bits = self._bits[layer] = bits.to(weight.device)
            places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
            removed = (bits[:, None] & places).eq(0).view(-1)[: weight.numel()]
            yield weight, removed.view(weight.shape)


def reapply_mask(
    model: PreTrainedModel, folder: Path | str, targets: str | list[str] | None = None, blocks: str | None = None
) -> int:
    """Set every weight of a model to zero that is zero in the targets of a pruned checkpoint, in place.

    Call it after merging adapters or editing weights. Arguments and errors are those of `Masks`.

    Returns:
        The number of these weights that were not zero before.
    """
    masks = Masks(model, folder, targets, blocks)
    broken = masks.broken(model)
    masks.apply(model)
    return broken


class SparsityCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a model as sparse as a pruned checkpoint while `transformers.Trainer` trains it.

    Each step of the optimizer changes the removed weights too; the callback sets them to zero again, before anything is saved
    or evaluated: `Trainer(..., callbacks=[SparsityCallback("pruned")])`. LoRA freezes the base and needs no callback; call
    `reapply_mask(model.merge_and_unload(), "pruned")` after the training. The masks take one bit of memory for every weight of
    the targets. Arguments and errors are those of `Masks`; errors are raised when the training begins.
    """

    def __init__(self, folder: Path | str, targets: str | list[str] | None = None, blocks: str | None = None) -> None:
        self._folder, self._targets, self._blocks = folder, targets, blocks
        self._masks: Masks | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Read the masks, and make the model sparse before the first step."""
        self._masks = Masks(context["model"], self._folder, self._targets, self._blocks)
        self._masks.apply(context["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Set the removed weights to zero again."""
        if self._masks is not None:
            self._masks.apply(context["model"])


def _recipe(folder: Path, targets: str | list[str] | None, blocks: str | None) -> RecipeRecord:
    """The targets and blocks: those given, or else those of the run."""
    if (folder / REPORT_NAME).is_file():
        recipe = read_report(folder).recipe
    elif targets is None:
        raise UserError(f"{folder}: without {REPORT_NAME} its targets are unknown. Name them, for example targets='mlp'.")
    else:
        recipe = RecipeRecord()
    if targets is not None:
        recipe = msgspec.structs.replace(recipe, targets=targets, ignore=None)
    return recipe if blocks is None else msgspec.structs.replace(recipe, blocks=blocks)


def _mask(packed: PackedFolder | None, stored: StoredTensor, files: FilePool) -> Bytes:
    """The mask of all words of a stored tensor."""
    if packed is not None:
        shard = next(shard for shard in packed.shards.values() if shard.path == stored.shard)
        return np.concatenate(list(masks_of(shard, stored, files, packed.coder)))
    file, blocks = files.reader(stored.shard), PackLayout().blocks(stored)
    return np.concatenate([mask_of(read_words(file, stored, first, count)) for first, count in blocks])


def _check_merged(model: PreTrainedModel) -> None:
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise UserError(
            "The model has adapters that are not merged, and their weights are not sparse. Merge them first: "
            "reapply_mask(model.merge_and_unload(), DIR)"
        )


def _check_whole(model: PreTrainedModel, layer: Layer, shape: tuple[int, int]) -> None:
    """Raise UserError unless a layer's weight is in memory as it was stored."""
    weight = weight_of(model, layer)
    if weight.device.type == "meta" or tuple(weight.shape) != shape or not weight.is_floating_point():
        raise UserError(
            f"{layer.name}: its weight is {weight.dtype} {list(weight.shape)} on {weight.device}; it must be floating point "
            f"{list(shape)} in memory. Load the model without quantisation, offloading and sharding over processes."
        )
