"""Units zeroed or removed, at all places that hold something of them.

Cuts are plain dictionaries, module -> axis -> positions, so that they can be written as JSON and applied to another copy of the
model: `UnitReport.cuts`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from emp_llm.common.errors import UserError
from emp_llm.structured.unit_groups import BATCH_NORMS, INSTANCE_NORMS, UNIT_LAYERS, is_depthwise

AnyCuts = Mapping[str, Mapping[Any, Sequence[int]]]


def zero_units(model: nn.Module, cuts: AnyCuts) -> None:
    """Set units to zero, in place: rows and biases, scales and shifts of normalisations, and the columns that read them.

    A zeroed unit is exactly zero at its layer's output and after its normalisation, also in training mode, and the layers that
    read it ignore it. So the model computes what `remove_units` would leave. Call it again after each step of an optimizer.

    Args:
        model: the model.
        cuts: module -> axis ("outputs", "inputs", "channels") -> positions.

    Raises:
        UserError: the cuts are of another model. Nothing is changed.
    """
    with torch.no_grad():
        for module, axes in _checked(model, cuts):
            for axis, positions in axes.items():
                _zero(module, axis, positions)


def remove_units(model: nn.Module, cuts: AnyCuts) -> None:
    """Remove units, in place: the layers get smaller, with new parameters. Make an optimizer afterwards, not before.

    A removed model cannot be loaded into a dense one. Build the dense model, remove the same units, and load the state:
    `remove_units(model, cuts); model.load_state_dict(state)`.

    Args:
        model: the model.
        cuts: as for `zero_units`.

    Raises:
        UserError: the cuts are of another model, or leave a layer without units. Nothing is changed.
    """
    checked = list(_checked(model, cuts))
    for name, module, axes in zip(cuts, (module for module, _ in checked), (axes for _, axes in checked), strict=True):
        if any(len(positions) == _size(module, axis) for axis, positions in axes.items()):
            raise UserError(f"cuts: they leave {name} without units; a layer keeps at least one.")
    for module, axes in checked:
        for axis, positions in axes.items():
            kept = torch.ones(_size(module, axis), dtype=torch.bool)
            kept[positions] = False
            _keep(module, axis, kept.nonzero()[:, 0])


@contextmanager
def changed_units(model: nn.Module, cuts: AnyCuts, change: Callable[[nn.Module, AnyCuts], None]) -> Iterator[None]:
    """A model with `zero_units` or `remove_units` applied; afterwards it is as before, with the same parameters."""
    modules = [model.get_submodule(name) for name in cuts]
    before = [dict(module.__dict__) for module in modules]
    try:
        for module in modules:
            module.__dict__["_parameters"] = {name: _copied(each) for name, each in module._parameters.items()}
            module.__dict__["_buffers"] = {name: _copied(each) for name, each in module._buffers.items()}
        change(model, cuts)
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _copied(values: Tensor | None) -> Tensor | None:
    if isinstance(values, nn.Parameter):
        return nn.Parameter(values.detach().clone(), values.requires_grad)
    return None if values is None else values.clone()


def _checked(model: nn.Module, cuts: AnyCuts) -> Iterable[tuple[nn.Module, Mapping[str, Tensor]]]:
    """The modules of cuts, each with its positions by axis; UserError unless all of them exist."""
    found = []
    modules = dict(model.named_modules())
    for name, axes in cuts.items():
        if name not in modules:
            raise UserError(f"cuts: {type(model).__name__} has no module {name}; these cuts are of another model.")
        positions = {axis: torch.as_tensor(each, dtype=torch.int64) for axis, each in axes.items()}
        for axis, each in positions.items():
            size = _size(modules[name], axis)
            if len(each) and not 0 <= int(each.min()) <= int(each.max()) < size:
                raise UserError(f"cuts: {name} has {size} {axis}, not {int(each.max()) + 1}; these cuts are of another model.")
        found.append((modules[name], positions))
    return found


def _size(module: nn.Module, axis: str) -> int:
    """The number of positions on an axis of a module."""
    each: Any = module
    if axis in ("outputs", "inputs") and isinstance(module, UNIT_LAYERS):
        if is_depthwise(module) and axis == "inputs":
            return 0
        return int(each.weight.shape[0 if axis == "outputs" else 1])
    if axis == "channels" and isinstance(module, BATCH_NORMS + INSTANCE_NORMS):
        return int(each.num_features)
    if axis == "channels" and isinstance(module, nn.PReLU):
        return int(each.num_parameters)
    return 0


def _zero(module: Any, axis: str, positions: Tensor) -> None:
    positions = positions.to(next(module.parameters(), torch.empty(0)).device)
    if axis == "inputs":
        module.weight[:, positions] = 0
    elif not isinstance(module, nn.PReLU):  # zero stays zero, whatever its slope
        for parameter in (module.weight, module.bias):
            if parameter is not None:
                parameter[positions] = 0


def _keep(module: Any, axis: str, kept: Tensor) -> None:
    """Keep some positions on an axis of a module, in place."""
    if axis == "inputs":
        _shrink(module, "weight", 1, kept)
        _set_width(module, "in", len(kept))
        return
    for name in ("weight", "bias", "running_mean", "running_var"):
        _shrink(module, name, 0, kept)
    if axis == "outputs":
        _set_width(module, "out", len(kept))
        if hasattr(module, "groups") and module.groups > 1:  # depthwise: one input and one group for each filter
            module.in_channels = module.groups = len(kept)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(kept)
    else:
        module.num_features = len(kept)


def _set_width(module: Any, side: str, width: int) -> None:
    setattr(module, f"{side}_{'features' if isinstance(module, nn.Linear) else 'channels'}", width)


def _shrink(module: Any, name: str, dim: int, kept: Tensor) -> None:
    """Keep some positions of a parameter or buffer, which a new one replaces."""
    old = getattr(module, name, None)
    if old is None:
        return
    values = old.detach().index_select(dim, kept.to(old.device)).clone()
    setattr(module, name, nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values)
