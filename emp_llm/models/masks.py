"""Models whose weights are sharded over processes: by fully_shard (FSDP2) or tensor parallelism,
whose parameters are DTensors; by FullyShardedDataParallel (FSDP1); or by DeepSpeed ZeRO-3.

Of a DTensor, each process can mask its own part. Everything else that reads weights needs them
whole.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor
from emp_llm.checkpoint.files import FileReader, write_bytes
from emp_llm.checkpoint.matrices import booleans, read_words, words_in
from emp_llm.checkpoint.packed import PackedCheckpoint, PackedFolder
from emp_llm.common.declared import check_type, options_of
from emp_llm.common.errors import UserError, reason
from emp_llm.common.machine import default_modes
from emp_llm.common.paths import PACK_NAME, REPORT_NAME
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.loading import resident_parameter
from emp_llm.models.modules import rows_in, set_to_zero, weight_of
from emp_llm.options.recipe import Targets
from emp_llm.records.run_report import read_report

_FLAT = (
    "the model is inside of FullyShardedDataParallel, which flattens its weights. Prune it before "
    "it is wrapped; to keep zeros in a training, shard it with fully_shard (fsdp_version: 2 of "
    "accelerate)."
)
_EMPTY = (
    "{}: it is empty here, because DeepSpeed ZeRO-3 shards it over the processes. Prune the "
    "model's folder with emp-llm prune, and load the result; to keep zeros in a training, use "
    "ZeRO-2 or fully_shard."
)
_SHARDED = (
    "{}: it is sharded over processes, as by fully_shard. Call emp-llm before the model is "
    "sharded, or prune its folder with emp-llm prune, and load the result."
)


def is_sharded(weight: Tensor) -> bool:
    """Whether a weight is a DTensor: other processes may hold parts of it."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(weight, kind)


def check_not_sharded(model: nn.Module) -> None:
    """Raise UserError if weights of a model are sharded over processes."""
    check_maskable(model)
    for name, module in model.named_modules():
        if _is_fully_sharded(module):  # after a forward pass its weights are whole for a while
            raise UserError(_SHARDED.format(name or type(model).__name__))
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise UserError(_SHARDED.format(name))


def check_maskable(model: nn.Module) -> None:
    """Raise UserError if this process cannot mask its part of a model's weights."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(module, kind) for module in model.modules()):
        raise UserError(_FLAT)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") and parameter.numel() == 0:
            raise UserError(_EMPTY.format(name))


def reshard(model: nn.Module) -> None:
    """Free the whole weights that fully_shard may keep after a forward pass: what is written to
    them is lost.
    """
    for module in model.modules():
        if _is_fully_sharded(module):
            fully_sharded: Any = module
            fully_sharded.reshard()


def own_values(weight: Tensor) -> Tensor:
    """The part of a weight that this process holds, which can be changed in place: all of it,
    unless it is sharded.
    """
    if not is_sharded(weight):
        return weight
    sharded: Any = weight.detach()
    values: Tensor = sharded.to_local()
    return values


def place_of(weight: Tensor) -> tuple[Any, ...]:
    """What decides which part of a sharded weight this process holds."""
    sharded: Any = weight
    mesh = sharded.device_mesh
    return sharded.placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), weight.device


def own_part(whole: Tensor, name: str, weight: Tensor) -> Tensor:
    """The part of a tensor that this process holds of a sharded weight of its shape.

    A mesh divides each dimension as `torch.chunk` does, one dimension of the mesh after the other.
    fully_shard divides what tensor parallelism has divided, and comes last (`_StridedShard`).

    Raises:
        UserError: the weight is sharded in another way.
    """
    placements, sizes, coordinates, _ = place_of(weight)
    steps = list(zip(placements, sizes, coordinates, strict=False))
    part = whole
    for placement, size, number in sorted(steps, key=lambda step: _is_strided(step[0])):
        dimension = getattr(placement, "dim", None)
        if dimension is None:  # each process holds all of it
            continue
        chunks = part.chunk(size, dimension)
        part = chunks[number] if number < len(chunks) else part.narrow(dimension, 0, 0)
    several = sum(_is_strided(placement) for placement in placements) > 1
    if several or part.shape != own_values(weight).shape:
        raise UserError(
            f"{name}: it is sharded by {placements}, and masks cannot be divided like this. Call "
            "emp-llm before the model is sharded."
        )
    return part


def _is_strided(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _is_fully_sharded(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return isinstance(module, kind)


def stand_in(weight: Tensor) -> Tensor:
    """A tensor of a weight's shape, dtype and device whose values are of no meaning; it takes no
    memory, and no process asks another for it.
    """
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


# The zeros of a pruned checkpoint: which of its weights stay.


def read_kept(
    folder: Path, targets: str | list[str] | None = None, blocks: str | None = None
) -> dict[str, NDArray[np.bool_]]:
    """Parameter name -> bool array of its shape, true where a weight stays: the masks of a pruned
    checkpoint, for the class of its config.json. Arguments and errors are those of `masks_in`.
    """
    checkpoint, packed, scope = open_folder(folder, targets, blocks)
    architecture = Architecture.of_checkpoint(checkpoint, scope.blocks, names_suffice=True)
    chosen = architecture.targets_of(scope)
    shapes = {
        target.layer.parameter: architecture.shapes.get(
            target.layer.parameter, target.matrix.stored.shape
        )
        for target in chosen
    }
    return find_kept(checkpoint, chosen, shapes, packed)


def find_kept(
    checkpoint: Checkpoint,
    targets: list[Target],
    shapes: Mapping[str, tuple[int, ...]],
    packed: PackedFolder | None,
) -> dict[str, NDArray[np.bool_]]:
    """Parameter name -> bool array of its shape, true where a weight stays. A weight is removed if
    no bit of it is set.

    Args:
        checkpoint, packed: as of `open_folder`.
        targets: of the checkpoint; shapes: of their parameters, by name.
    """
    by_tensor: dict[str, list[Target]] = defaultdict(list)
    for target in targets:
        by_tensor[target.matrix.stored.name].append(target)
    parameters = {name: np.ones(shape, dtype=np.bool_) for name, shape in shapes.items()}
    for name, of_tensor in by_tensor.items():
        stored = checkpoint.tensors[name]
        kept = _stored_mask(packed, stored).reshape(stored.shape)
        for target in of_tensor:
            matrix = kept if target.matrix.expert is None else kept[target.matrix.expert]
            rows_in(parameters[target.layer.parameter], target.layer)[:] = (
                matrix.T if target.matrix.transposed else matrix
            )
    return parameters


def open_folder(
    folder: Path, targets: str | list[str] | None, blocks: str | None
) -> tuple[Checkpoint, PackedFolder | None, Targets]:
    """A pruned checkpoint, its packed folder if it is one, and its targets."""
    packed = PackedFolder(folder) if (folder / PACK_NAME).is_file() else None
    checkpoint = Checkpoint(folder) if packed is None else PackedCheckpoint(packed)
    return checkpoint, packed, _scope(folder, targets, blocks)


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


# Masks of a model in memory: one bit for each weight of its pruned parameters.


_KEY = "emp_llm"
_FORMAT = "emp-llm masks 1"
_AROUND = ("_checkpoint_wrapped_module", "_orig_mod")  # names of parts inside of wrappers
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class Masks(Mapping[str, Tensor]):
    """The masks of a model's parameters: parameter name -> bool tensor of the parameter's shape,
    true where a weight stays.

    A weight whose bits are all zero counts as removed.

    Args:
        masks: bool tensors by the name of the parameter, or of the layer whose weight it is.

    Raises:
        UserError: an entry is no boolean tensor.
    """

    def __init__(self, masks: Mapping[str, Tensor] | None = None) -> None:
        self._bits: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, tuple[Any, Tensor]] = {}  # of sharded weights: place, bits
        check_type("masks", masks, Mapping, NoneType)
        for name, mask in (masks or {}).items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise UserError(
                    f"the mask of {name} is {given}; a mask is a boolean tensor, true "
                    "where a weight stays."
                )
            self.put(name, mask.detach().cpu().numpy())

    def put(self, name: str, mask: NDArray[Any]) -> None:
        """Set the mask of a parameter: bool, of its shape."""
        self._bits[name] = _packed(mask)
        self._parts.pop(name, None)
        self._shapes[name] = tuple(mask.shape)

    def __getitem__(self, name: str) -> Tensor:
        bits = self._bits[name].cpu().numpy()
        shape = self._shapes[name]
        kept = np.unpackbits(bits, count=int(np.prod(shape)), bitorder="little").view(np.bool_)
        return torch.from_numpy(kept.reshape(shape))

    def __contains__(self, name: object) -> bool:  # Mapping's would unpack the mask
        return name in self._bits

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)

    def apply(self, model: nn.Module) -> None:
        """Set the removed weights of a model to zero, in place. No other weight changes. If the
        model is sharded, each process does so in its own part.

        Raises:
            UserError: the model lacks a parameter, or it has another shape, is quantised or not in
                memory. Nothing is changed.
        """
        for weight, removed in self._removed(model):
            set_to_zero(weight, removed)

    def broken(self, model: nn.Module) -> int:
        """The number of removed weights that are not zero in a model, or in this process's part
        of it. Errors are those of `apply`.
        """
        return sum(
            int(weight.ne(0).logical_and_(removed).sum())
            for weight, removed in self._removed(model)
        )

    def save(self, path: Path | str) -> None:
        """Write the masks to a safetensors file: one bit per weight, the first in the lowest bit
        of the first byte.
        """
        metadata = {_KEY: json.dumps({"format": _FORMAT, "shapes": self._shapes}, sort_keys=True)}
        write_bytes(
            Path(path), save({name: bits.cpu() for name, bits in self._bits.items()}, metadata)
        )

    @classmethod
    def load(
        cls,
        path: Path | str,
        targets: str | list[str] | None = None,
        blocks: str | None = None,
    ) -> "Masks":
        """Read a file of `save`, or the zeros of a pruned checkpoint or its packed folder.

        Args:
            path: of the file or folder.
            targets, blocks: of a folder, as `reapply_mask` takes them.

        Raises:
            UserError: the file is missing or damaged, or holds no masks; the folder is no
                checkpoint, or its targets are unknown.
        """
        check_type("path", path, str, Path)
        path = Path(path)
        masks = cls()
        if path.is_dir():
            for name, kept in read_kept(path, targets, blocks).items():
                masks.put(name, kept)
            return masks
        if not path.is_file():
            raise UserError(f"{path}: no such file of masks, and no pruned folder.")
        try:
            with safe_open(path, framework="pt") as file:
                info: Any = json.loads((file.metadata() or {}).get(_KEY, "{}"))
                if not isinstance(info, dict) or info.get("format") != _FORMAT:
                    raise UserError(f"{path}: not a file of masks; Masks.save writes them.")
                for name in file.keys():  # noqa: SIM118
                    shape = tuple(int(size) for size in info["shapes"][name])
                    bits = file.get_tensor(name)
                    if (
                        bits.dtype != torch.uint8
                        or bits.shape != (-(-int(np.prod(shape)) // 8),)
                        or min(shape, default=0) < 0
                    ):
                        raise ValueError(f"the mask of {name} does not have its shape")
                    masks._bits[name], masks._shapes[name] = bits, shape
        except UserError:
            raise
        except (
            SafetensorError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise UserError(f"{path}: not a readable file of masks ({reason(error)}).") from error
        return masks

    def _removed(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight, removed) of each parameter: its values in this process, and a boolean mask of
        their shape.
        """
        model = plain_model(model)
        check_maskable(model)
        reshard(model)
        # All are checked before any is changed.
        weights = {name: self._weight(model, name) for name in self._bits}
        for name, weight in weights.items():
            yield own_values(weight), self.removed(name, weight)

    def removed(self, name: str, weight: Tensor) -> Tensor:
        """Where a parameter's weights are removed: bool, of the shape and on the device of
        `weight`, or of this process's part of it.
        """
        bits = self._bits_of(name, weight)
        weight = own_values(weight)
        places = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
        return (bits[:, None] & places).eq(0).view(-1)[: weight.numel()].view(weight.shape)

    def _bits_of(self, name: str, weight: Tensor) -> Tensor:
        """The bits of a parameter, or of this process's part of it, on its device."""
        if is_sharded(weight):
            place = place_of(weight)
            if name not in self._parts or self._parts[name][0] != place:
                part = _packed(own_part(self[name], name, weight).numpy())
                self._parts[name] = place, part.to(weight.device)
            return self._parts[name][1]
        bits = self._bits[name]
        if bits.device != weight.device:
            bits = self._bits[name] = bits.to(weight.device)
        return bits

    def _weight(self, model: nn.Module, name: str) -> Tensor:
        weight = resident_parameter(model, name)
        if weight is None:
            weight = resident_parameter(model, f"{name}.weight")
        if weight is None:
            raise UserError(
                f"{type(model).__name__} has no parameter {name}; these masks are of another model."
            )
        check_whole(name, weight, self._shapes[name])
        return weight


def _packed(mask: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.packbits(mask, bitorder="little"))


def plain_model(model: nn.Module) -> nn.Module:
    """A model without what torch.compile, DataParallel and DistributedDataParallel put around
    it; UserError if it is no module.
    """
    check_type("model", model, nn.Module)
    while True:
        inside = getattr(model, "_orig_mod", model.module if isinstance(model, _PARALLEL) else None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside


@contextmanager
def unwrap(model: nn.Module) -> Iterator[None]:
    """Inside this context, the parts of a model are without what activation checkpointing and
    torch.compile put around them, so that their names are those of its checkpoint.
    """
    wrapped = [
        (module, name, part, part._modules[inside])
        for module in model.modules()
        for name, part in module._modules.items()
        for inside in _AROUND
        if part is not None and inside in part._modules
    ]
    try:
        for module, name, _, inside_part in wrapped:
            module._modules[name] = inside_part
        yield
    finally:
        for module, name, part, _ in wrapped:
            module._modules[name] = part


def check_merged(model: nn.Module) -> None:
    """Raise UserError if a model has adapters beside its weights."""
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise UserError(
            "The model has adapters that are not merged, and their weights are not sparse. Merge "
            "them first: reapply_mask(model.merge_and_unload(), DIR)"
        )


def check_whole(name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    """Raise UserError unless a weight is in memory as it was stored."""
    if (
        weight.device.type == "meta"
        or tuple(weight.shape) != shape
        or not weight.is_floating_point()
    ):
        raise UserError(
            f"{name}: its weight is {weight.dtype} {list(weight.shape)} on {weight.device}; it "
            f"must be floating point {list(shape)} in memory. Load the model without quantisation, "
            "offloading to disk and sharding over processes."
        )


# The masks of a pruned checkpoint, and their zeros restored in a model.


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
