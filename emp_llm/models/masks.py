"""Masks of a model in memory: one bit for each weight of its pruned parameters."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from emp_llm.checkpoint.files import write_bytes
from emp_llm.common.declared import check_type
from emp_llm.common.errors import UserError, reason
from emp_llm.models.modules import set_to_zero
from emp_llm.models.offload import resident_parameter
from emp_llm.models.sharded import (
    check_maskable,
    is_sharded,
    own_part,
    own_values,
    place_of,
    reshard,
)
from emp_llm.models.zeros import read_kept

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
