"""The masks of a pruned checkpoint, and their zeros restored in a model."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.packed_format import PackedFolder
from emp_llm.common.declared import check_type, options_of
from emp_llm.common.machine import default_modes
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.masks import Masks, check_merged, check_whole, plain_model, unwrap
from emp_llm.models.modules import rows_in, weight_of
from emp_llm.models.sharded import check_maskable, is_sharded, reshard, stand_in
from emp_llm.models.zeros import find_kept, open_folder
from emp_llm.options.recipe import Targets

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
    checkpoint, packed, scope = open_folder(Path(folder), targets, blocks)
    with unwrap(model):
        architecture = Architecture.of_model(checkpoint, model, scope.blocks)
        chosen = architecture.targets_of(scope)
        return read_masks(checkpoint, chosen, model, packed)


def read_masks(
    checkpoint: Checkpoint,
    targets: list[Target],
    model: PreTrainedModel,
    packed: PackedFolder | None = None,
) -> Masks:
    """The masks of some targets of a checkpoint, for a model in memory; arguments and errors are
    those of `masks_in`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        layer = target.layer
        parameter = model.get_parameter(layer.parameter)
        weight = (
            rows_in(stand_in(parameter), layer)
            if is_sharded(parameter)
            else weight_of(model, layer)
        )
        check_whole(layer.name, weight, (target.matrix.rows, target.matrix.columns))
        shapes[layer.parameter] = tuple(parameter.shape)
    masks = Masks()
    for name, mask in find_kept(checkpoint, targets, shapes, packed).items():
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
