"""Models whose weights are sharded over processes: by fully_shard (FSDP2) or tensor parallelism,
whose parameters are DTensors; by FullyShardedDataParallel (FSDP1); or by DeepSpeed ZeRO-3.

Of a DTensor, each process can mask its own part. Everything else that reads weights needs them
whole.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from emp_llm.common.errors import UserError

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
