"""Units of a torch model: where each neuron and filter lies, one observed forward pass, and units
zeroed or removed.

Units are the neurons of a linear layer and the filters of a convolution. Cuts are plain
dictionaries, module -> axis -> positions, so that they can be written as JSON and applied to
another copy of the model: `UnitReport.cuts`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from emp_llm.calibration.passes import in_evaluation_mode
from emp_llm.common.errors import UserError

# The layers whose outputs are units: `weight` has one row for each.
UNIT_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

Axis = Literal["outputs", "inputs", "channels"]
Cuts = dict[str, dict[Axis, list[int]]]


@dataclass(frozen=True)
class UnitPlace:
    """A place where a model holds something of each unit of a group.

    Attributes:
        module: name of the module.
        axis: "outputs": rows of a weight and entries of its bias; "inputs": columns of a weight;
            "channels": entries of a normalisation, or of a PReLU.
        positions: int64, the positions on the axis.
        units: int64, the same shape: the unit of the group at each position.
    """

    module: str
    axis: Axis
    positions: Tensor
    units: Tensor


@dataclass(frozen=True)
class UnitGroup:
    """Units that are kept or pruned together: those of one layer, or of layers whose outputs are
    added.

    Attributes:
        name: of its first layer.
        size: number of units.
        places: all places that hold something of a unit.
    """

    name: str
    size: int
    places: tuple[UnitPlace, ...]

    @property
    def layers(self) -> list[str]:
        """The layers whose outputs the units are."""
        return [place.module for place in self.places if place.axis == "outputs"]

    def score(self, scores: dict[str, Tensor]) -> Tensor:
        """The score of each unit: the sum of its scores in the layers; float64, shape (size,)."""
        total = torch.zeros(self.size, dtype=torch.float64)
        for place in self.places:
            if place.axis == "outputs":
                total.index_add_(0, place.units, scores[place.module][place.positions])
        return total


def unit_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model whose outputs are units, in the model's order."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, UNIT_LAYERS)
    }


def unit_count(module: nn.Module) -> int:
    """The number of a layer's units."""
    each: Any = module
    return int(each.weight.shape[0])


def is_depthwise(module: nn.Module) -> bool:
    """Whether a convolution applies one filter to each channel."""
    each: Any = module
    return (
        isinstance(module, CONVOLUTIONS)
        and each.groups == each.in_channels == each.out_channels > 1
    )


def unit_kind(module: nn.Module) -> str:
    """The name of a layer's units."""
    return "neurons" if isinstance(module, nn.Linear) else "filters"


def own_group(name: str, size: int, batch_norm: str | None) -> UnitGroup:
    """The units of a layer alone, with the batch normalisation that reads them."""
    every = torch.arange(size)
    places = [UnitPlace(name, "outputs", every, every)]
    if batch_norm is not None:
        places.append(UnitPlace(batch_norm, "channels", every, every))
    return UnitGroup(name, size, tuple(places))


def cuts_of(groups: Iterable[UnitGroup], masks: Iterable[Tensor]) -> Cuts:
    """What the masks of groups remove: module -> axis -> positions in ascending order.

    Args:
        masks: one for each group: bool, shape (size,), true where a unit is kept.
    """
    cuts: Cuts = {}
    for group, mask in zip(groups, masks, strict=True):
        for place in group.places:
            removed = place.positions[~mask[place.units]].tolist()
            if removed:
                axes = cuts.setdefault(place.module, {})
                axes[place.axis] = sorted({*axes.get(place.axis, []), *removed})
    return cuts


@dataclass(frozen=True)
class Trace:
    """What a forward pass showed.

    Attributes:
        called: the unit layers that were called, in the order of the model.
        batch_norms: layer -> the batch normalisation that reads its output.
        ends: the layers whose outputs reach the model's output through no other unit layer.
        flops: floating-point operations; a multiplication and an addition count as two.
    """

    called: tuple[str, ...]
    batch_norms: dict[str, str]
    ends: frozenset[str]
    flops: int


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with inputs, on the model's device: a tensor, a tuple or list of arguments,
    or a mapping of keywords.
    """
    if isinstance(inputs, Mapping):
        return model(**{name: beside_model(model, value) for name, value in inputs.items()})
    if isinstance(inputs, tuple | list):
        return model(*(beside_model(model, value) for value in inputs))
    return model(beside_model(model, inputs))


def beside_model(model: nn.Module, value: Any) -> Any:
    """A tensor on the device of a model; other values as they are."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return value.to(device) if isinstance(value, Tensor) else value


def tensors_in(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output."""
    return [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


@contextmanager
def with_gradients(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients for all parameters; afterwards the modes and the frozen
    parameters are as before.
    """
    frozen = [
        each for each in model.parameters() if not each.requires_grad and each.is_floating_point()
    ]
    with in_evaluation_mode(model), torch.enable_grad():
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def trace_model(model: nn.Module, example: Any) -> Trace:
    """Observe one forward pass.

    Raises:
        UserError: the output holds no tensor that depends on the model's parameters.
    """
    layers = unit_layers(model)
    # Tensors are kept, so that no other one gets the same identity.
    outputs: list[tuple[Tensor, str]] = []
    nodes: dict[Any, str] = {}
    batch_norms: dict[str, str] = {}

    def saw_layer(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((output, name))
            nodes[output.grad_fn] = name

    def saw_norm(name: str, inputs: Any) -> None:
        batch_norms.update(
            {layer: name for tensor, layer in outputs if inputs and inputs[0] is tensor}
        )

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: saw_layer(name, output))
        for name, module in layers.items()
    ]
    hooks += [
        module.register_forward_pre_hook(lambda _, inputs, name=name: saw_norm(name, inputs))
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS)
    ]
    try:
        with with_gradients(model), FlopCounterMode(display=False) as counter:
            results = tensors_in(call_model(model, example))
    finally:
        for hook in hooks:
            hook.remove()
    ends = _first_reached([each.grad_fn for each in results if each.grad_fn is not None], nodes)
    if not ends:
        raise UserError(
            "example: the model's output does not depend on its layers, or is cut off "
            "from them by no_grad."
        )
    called = {name for _, name in outputs}
    return Trace(
        tuple(name for name in layers if name in called),
        batch_norms,
        ends,
        counter.get_total_flops(),
    )


def _first_reached(starts: list[Any], nodes: dict[Any, str]) -> frozenset[str]:
    """The layers first reached from nodes of the autograd graph, going back to the inputs."""
    reached = set()
    visited = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node in visited:
            continue
        visited.add(node)
        if node in nodes:
            reached.add(nodes[node])
        else:
            left.extend(parent for parent, _ in node.next_functions if parent is not None)
    return frozenset(reached)


AnyCuts = Mapping[str, Mapping[Any, Sequence[int]]]


def zero_units(model: nn.Module, cuts: AnyCuts) -> None:
    """Set units to zero, in place: rows and biases, scales and shifts of normalisations, and the
    columns that read them.

    A zeroed unit is exactly zero at its layer's output and after its normalisation, also in
    training mode, and the layers that read it ignore it. So the model computes what `remove_units`
    would leave. Call it again after each step of an optimizer.

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
    """Remove units, in place: the layers get smaller, with new parameters. Make an optimizer
    afterwards, not before.

    A removed model cannot be loaded into a dense one. Build the dense model, remove the same units,
    and load the state: `remove_units(model, cuts); model.load_state_dict(state)`.

    Args:
        model: the model.
        cuts: as for `zero_units`.

    Raises:
        UserError: the cuts are of another model, or leave a layer without units. Nothing is
            changed.
    """
    checked = list(_checked(model, cuts))
    for name, module, axes in zip(
        cuts, (module for module, _ in checked), (axes for _, axes in checked), strict=True
    ):
        if any(len(positions) == _size(module, axis) for axis, positions in axes.items()):
            raise UserError(f"cuts: they leave {name} without units; a layer keeps at least one.")
    for module, axes in checked:
        for axis, positions in axes.items():
            kept = torch.ones(_size(module, axis), dtype=torch.bool)
            kept[positions] = False
            _keep(module, axis, kept.nonzero()[:, 0])


@contextmanager
def changed_units(
    model: nn.Module, cuts: AnyCuts, change: Callable[[nn.Module, AnyCuts], None]
) -> Iterator[None]:
    """A model with `zero_units` or `remove_units` applied; afterwards it is as before, with the
    same parameters.
    """
    modules = [model.get_submodule(name) for name in cuts]
    before = [dict(module.__dict__) for module in modules]
    try:
        for module in modules:
            module.__dict__["_parameters"] = {
                name: _copied(each) for name, each in module._parameters.items()
            }
            module.__dict__["_buffers"] = {
                name: _copied(each) for name, each in module._buffers.items()
            }
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
            raise UserError(
                f"cuts: {type(model).__name__} has no module {name}; these cuts are of "
                "another model."
            )
        positions = {axis: torch.as_tensor(each, dtype=torch.int64) for axis, each in axes.items()}
        for axis, each in positions.items():
            size = _size(modules[name], axis)
            if len(each) and not 0 <= int(each.min()) <= int(each.max()) < size:
                raise UserError(
                    f"cuts: {name} has {size} {axis}, not {int(each.max()) + 1}; these "
                    "cuts are of another model."
                )
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
        # depthwise: one input and one group for each filter.
        if hasattr(module, "groups") and module.groups > 1:
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
    setattr(
        module,
        name,
        nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values,
    )
