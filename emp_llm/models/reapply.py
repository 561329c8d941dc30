"""Keep it sparse: the zeros of a pruned checkpoint put into a model again, once or after every step of an optimizer."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from emp_llm.models.bits import Bytes, booleans, mask_of
from emp_llm.models.checkpoint import PACK_NAME, Checkpoint
from emp_llm.models.errors import UserError
from emp_llm.models.files import OpenFiles
from emp_llm.models.headers import StoredTensor
from emp_llm.models.layers import Layer, weight_of
from emp_llm.models.packed import Manner, PackedCheckpoint, PackedFolder, read_words, words_in
from emp_llm.models.recipe import REPORT_NAME, read_report
from emp_llm.models.targets import Architecture, Target
from emp_llm.models.unpacking import masks_of


class Masks:
    """Which weights of a model a pruned checkpoint has removed: a bit for each weight of its targets, in memory.

    A weight is removed where no bit of it is set in the checkpoint.

    Args:
        model: the model that was loaded from the checkpoint, or from what was made of it; on any device, of any dtype. LoRA
            adapters have to be merged, weights have to be whole (not quantised, offloaded or sharded over processes).
        folder: the pruned checkpoint, or what `pack` made of it, with weights or a mask alone.
        targets: which layers, as for `prune`; None: those of the run that pruned it.

    Raises:
        UserError: the folder is no checkpoint or of another model, it does not say what its targets are, or a weight of the
            model cannot be reached.
    """

    def __init__(self, model: PreTrainedModel, folder: Path | str, targets: str | list[str] | None = None) -> None:
        folder = Path(folder)
        _check_whole(model)
        packed = PackedFolder(folder) if (folder / PACK_NAME).is_file() else None
        checkpoint = Checkpoint(folder) if packed is None else PackedCheckpoint(packed)
        chosen = Architecture(checkpoint, model).select(*_targets(folder, targets))
        self._bits: dict[Layer, Tensor] = {}
        by_tensor: dict[str, list[Target]] = defaultdict(list)
        for target in chosen:
            _check_weight(model, target.layer, (target.matrix.rows, target.matrix.columns))
            by_tensor[target.matrix.stored.name].append(target)
        with OpenFiles() as files:
            for name, of_tensor in by_tensor.items():
                stored = checkpoint.tensors[name]
                bits = _mask(packed, stored, files)
                kept = booleans(bits, words_in(stored)).reshape(stored.shape)
                for target in of_tensor:
                    own = kept if target.matrix.expert is None else kept[target.matrix.expert]
                    own = own.T if target.matrix.transposed else own
                    self._bits[target.layer] = torch.from_numpy(np.packbits(own, bitorder="little"))

    def apply(self, model: PreTrainedModel) -> None:
        """Set the removed weights of the model to zero, in place; no others are touched."""
        for weight, removed in self._removed(model):
            weight.masked_fill_(removed, 0)

    def broken(self, model: PreTrainedModel) -> int:
        """How many removed weights are not zero in the model."""
        return sum(int(weight.ne(0).logical_and_(removed).sum()) for weight, removed in self._removed(model))

    @property
    def layers(self) -> list[str]:
        """Names of the layers that the masks are of."""
        return [layer.name for layer in self._bits]

    def _removed(self, model: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight, which of it is removed), both of shape (outputs, inputs), of each target."""
        for layer, bits in self._bits.items():
            weight = weight_of(model, layer)
            if bits.device != weight.device:
                bits = self._bits[layer] = bits.to(weight.device)
            places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
            removed = (bits[:, None] & places).eq(0).view(-1)[: weight.numel()]
            yield weight, removed.view(weight.shape)


def reapply_mask(model: PreTrainedModel, folder: Path | str, targets: str | list[str] | None = None) -> int:
    """Set to zero in a model what is zero in the targets of a pruned checkpoint: after merging adapters, or editing weights.

    Arguments and errors are those of `Masks`.

    Returns:
        How many weights were not zero before.
    """
    masks = Masks(model, folder, targets)
    broken = masks.broken(model)
    masks.apply(model)
    return broken


class SparsityCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a model as sparse as a pruned checkpoint while `transformers.Trainer` trains it: after each step of the optimizer,
    which moves zeros as it does all weights, they are zeros again, before anything is saved or evaluated.

    `Trainer(..., callbacks=[SparsityCallback("pruned")])`. For LoRA there is nothing to keep during the training, as the base
    is frozen: call `reapply_mask(model.merge_and_unload(), "pruned")` afterwards. It costs a bit of memory for every weight of
    the targets. Arguments and errors are those of `Masks`; errors are raised when the training begins.
    """

    def __init__(self, folder: Path | str, targets: str | list[str] | None = None) -> None:
        self._folder, self._targets = folder, targets
        self._masks: Masks | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """Read the masks, and begin from a sparse model."""
        self._masks = Masks(about["model"], self._folder, self._targets)
        self._masks.apply(about["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        """The weights have moved."""
        if self._masks is not None:
            self._masks.apply(about["model"])


def _targets(folder: Path, targets: str | list[str] | None) -> tuple[str | list[str], str | list[str] | None]:
    if targets is not None:
        return targets, None
    recipe = read_report(folder).get("recipe")
    if not isinstance(recipe, dict) or not isinstance(recipe.get("targets"), (str, list)):
        raise UserError(f"{folder}: its {REPORT_NAME} does not say what was pruned; say targets='mlp', or what it was.")
    return recipe["targets"], recipe.get("ignore")


def _mask(packed: PackedFolder | None, stored: StoredTensor, files: OpenFiles) -> Bytes:
    """The mask of all words of a stored tensor."""
    if packed is not None:
        shard = next(shard for shard in packed.shards.values() if shard.path == stored.shard)
        return np.concatenate(list(masks_of(shard, stored, files, packed.coder)))
    file, blocks = files.reading(stored.shard), Manner().blocks(stored)
    return np.concatenate([mask_of(read_words(file, stored, first, count)) for first, count in blocks])


def _check_whole(model: PreTrainedModel) -> None:
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise UserError(
            "The model has adapters that are not merged, and what they add is not sparse. Merge them first: "
            "reapply_mask(model.merge_and_unload(), DIR)"
        )


def _check_weight(model: PreTrainedModel, layer: Layer, shape: tuple[int, int]) -> None:
    """Raise UserError where a layer's weight is not there as it was stored."""
    weight = weight_of(model, layer)
    if weight.device.type == "meta" or tuple(weight.shape) != shape or not weight.is_floating_point():
        raise UserError(
            f"{layer.name}: its weight is {weight.dtype} {list(weight.shape)} on {weight.device}, and a whole {list(shape)} of "
            "floating-point numbers is needed. Load the model without quantisation, offloading and sharding over processes."
        )
