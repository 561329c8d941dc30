"""Units that belong together: layers whose outputs are added, and the layers that read them, found by torch-pruning.

A dependency that torch-pruning reports is believed only if it stands the test: the model without a third of the units must
compute what the model with these units zeroed computes.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from emp_llm.calibration.passes import in_evaluation_mode
from emp_llm.common.errors import UserError, reason
from emp_llm.structured.surgery import changed_units, remove_units, zero_units
from emp_llm.structured.tracing import Trace, call_model, tensors_in, with_gradients
from emp_llm.structured.unit_groups import (
    BATCH_NORMS,
    CONVOLUTIONS,
    INSTANCE_NORMS,
    UNIT_LAYERS,
    Axis,
    UnitGroup,
    UnitPlace,
    cuts_of,
    is_depthwise,
    own_group,
    unit_count,
    unit_layers,
)

Coupled = Literal["together", "skip", "alone"]
Left = dict[str, str]  # layer -> why its units are left alone


def groups_of(model: nn.Module, example: Any, trace: Trace, coupled: Coupled, ignore: set[str]) -> tuple[list[UnitGroup], Left]:
    """The groups of units that can be pruned, and the layers left alone.

    Args:
        coupled: "together"; "skip", to leave units alone that are added to those of other layers; or "alone": the units of each
            layer for itself, to be zeroed and not removed.
        ignore: layers to leave alone.

    Raises:
        UserError: torch-pruning is not installed, or cannot follow the model.
    """
    groups: list[UnitGroup] = []
    left: Left = {}
    found = _groups_alone(model, trace) if coupled == "alone" else _candidates(model, example, trace)
    for group, why in found:
        layers = group.layers
        out = sorted(ignore.intersection(layers))
        added = [name for name in layers if not is_depthwise(model.get_submodule(name))]
        if why is None and out:
            why = "left out" if len(layers) == 1 else f"coupled with {out[0]}, which is left out"
        if why is None and coupled == "skip" and len(added) > 1:
            why = f"coupled with {len(layers) - 1} other layers"
        if why is None:
            groups.append(group)
        else:
            left.update(dict.fromkeys(layers, why))
    if coupled == "alone":
        return groups, left
    kept, failed = _tested(*_doubled(model, example), groups)
    for group, why in failed:
        left.update(dict.fromkeys(group.layers, why))
    return kept, left


def outputs_differ(model: nn.Module, example: Any, groups: list[UnitGroup], masks: list[Tensor]) -> float:
    """The largest difference of an output with units removed and zeroed, relative to the largest output.

    The model is unchanged afterwards.
    """
    cuts, outputs = cuts_of(groups, masks), []
    for change in (zero_units, remove_units):
        with changed_units(model, cuts, change), in_evaluation_mode(model):
            outputs.append([each.detach() for each in tensors_in(call_model(model, example))])
    pairs = list(zip(*outputs, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return torch.inf
    largest = max((float(a.abs().max()) for a, _ in pairs if a.numel()), default=0.0)
    difference = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return difference / largest if largest else difference


def tolerance_of(model: nn.Module) -> float:
    """The largest relative difference that rounding explains: the root of the dtype's precision."""
    dtypes = [each.dtype for each in model.parameters() if each.is_floating_point()]
    return math.sqrt(max((float(torch.finfo(dtype).eps) for dtype in dtypes), default=0.0))


def _groups_alone(model: nn.Module, trace: Trace) -> Iterator[tuple[UnitGroup, str | None]]:
    """The units of each layer for itself, with the reason to leave them alone, if there is one."""
    for name, module in unit_layers(model).items():
        size = unit_count(module)
        yield own_group(name, size, trace.batch_norms.get(name)), _why_not(module, name, trace, in_groups=True)


def _candidates(model: nn.Module, example: Any, trace: Trace) -> Iterator[tuple[UnitGroup, str | None]]:
    """The groups of units that torch-pruning finds, each with the reason to leave it alone, if there is one."""
    graph = _dependencies(model, example)
    names = {module: name for name, module in model.named_modules()}
    watch, visited = _Watch(graph), set[str]()
    for name, module in unit_layers(model).items():
        if name in visited:
            continue
        size = unit_count(module)
        if name not in trace.called or module not in graph.module2node:
            yield own_group(name, size, None), _why_not(module, name, trace) or "not called as a module of its own"
            continue
        pruner = graph.get_pruner_of_module(module)
        try:
            watch.begin()
            found = graph.get_pruning_group(module, pruner.prune_out_channels, list(range(size)))
        except _EndlessError:
            yield own_group(name, size, None), "torch-pruning does not come to an end of its dependencies"
            continue
        group, why = _group_of(name, size, found, graph, names)
        visited.update(group.layers)
        reasons = (_why_not(model.get_submodule(place.module), place.module, trace, place.axis) for place in group.places)
        yield group, why or next((each for each in reasons if each is not None), None)


class _EndlessError(Exception):
    """A group has far more dependencies than the model."""


class _Watch:
    """Ends the search for a group that goes around in circles, as in rotary embeddings with shared heads.

    Args:
        graph: of torch-pruning, whose dependencies are counted when they are asked for.
    """

    def __init__(self, graph: Any) -> None:
        every = [dependency for node in graph.module2node.values() for dependency in node.dependencies]
        self._limit, self._asked = 1000 + 4 * len(every), 0
        for dependency in every:
            dependency.is_triggered_by = partial(self._ask, dependency.is_triggered_by)

    def begin(self) -> None:
        """Begin a group."""
        self._asked = 0

    def _ask(self, is_triggered_by: Callable[[Any], bool], trigger: Any) -> bool:
        self._asked += 1
        if self._asked > self._limit:
            raise _EndlessError
        return is_triggered_by(trigger)


def _group_of(name: str, size: int, found: Any, graph: Any, names: dict[nn.Module, str]) -> tuple[UnitGroup, str | None]:
    """A group of torch-pruning as ours, and the reason to leave it alone."""
    places, why = [], None
    for item in found:
        module = item.dep.target.module
        if module not in names:  # an operation, or a parameter of its own
            if isinstance(module, nn.Parameter):
                why = why or "combined with a parameter that belongs to no layer"
            continue
        axis = _axis(module, graph.is_out_channel_pruning_fn(item.dep.handler))
        if axis is None:
            why = why or f"tied to {type(module).__name__} {names[module]}, which units cannot leave one by one"
            continue
        if any(unit is None for unit in item.root_idxs):
            why = why or "repeated by the model"
            continue
        positions, units = (torch.tensor(each, dtype=torch.int64) for each in (list(item.idxs), item.root_idxs))
        places.append(UnitPlace(names[module], axis, positions, units))
    if not any(place.axis == "outputs" and place.module == name for place in places):
        return own_group(name, size, None), why or "its dependencies are not known"
    return UnitGroup(name, size, tuple(places)), why


def _axis(module: nn.Module, is_output: bool) -> Axis | None:
    """The axis of a module on which units lie; None if they cannot be removed from it one by one."""
    if isinstance(module, BATCH_NORMS + INSTANCE_NORMS + (nn.PReLU,)):
        return "channels"
    if isinstance(module, CONVOLUTIONS) and is_depthwise(module):
        return "outputs"
    if isinstance(module, UNIT_LAYERS):
        return "outputs" if is_output else "inputs"
    return None


def _why_not(module: nn.Module, name: str, trace: Trace, axis: Axis = "outputs", in_groups: bool = False) -> str | None:
    """Why units cannot be pruned at a module; None if they can. `in_groups`: convolutions in groups can."""
    if axis == "outputs" and name in trace.ends:
        return "its outputs are those of the model"
    if axis == "outputs" and name not in trace.called:
        return "not called for the example"
    if not in_groups and isinstance(module, CONVOLUTIONS) and module.groups > 1 and not is_depthwise(module):
        return f"{name} is a convolution in groups"
    if isinstance(module, UNIT_LAYERS) and "weight" not in module._parameters:
        return f"the weight of {name} is computed from other parameters"
    return None


def _dependencies(model: nn.Module, example: Any) -> Any:
    """The dependency graph of torch-pruning."""
    library = torch_pruning()
    try:
        with with_gradients(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return library.DependencyGraph().build_dependency(
                model, example, forward_fn=lambda each, inputs: tensors_in(call_model(each, inputs)), verbose=False
            )
    except Exception as error:
        raise UserError(
            f"{type(model).__name__}: torch-pruning cannot follow it ({reason(error)}). coupled='alone' zeroes the units of "
            "each layer without it."
        ) from error


def torch_pruning() -> ModuleType:
    """The library, imported.

    Raises:
        UserError: it is not installed.
    """
    try:
        import torch_pruning as library
    except ImportError as error:
        raise UserError(
            "To find the units that belong together, torch-pruning is needed: pip install 'emp-llm[structured]'. "
            "coupled='alone' zeroes the units of each layer without it."
        ) from error
    return library  # type: ignore[no-any-return]


def _tested(model: nn.Module, example: Any, groups: list[UnitGroup]) -> tuple[list[UnitGroup], list[tuple[UnitGroup, str]]]:
    """The groups whose removal computes what zeroing computes; and the others, with the reason."""
    found = _sifted(model, example, sorted(groups, key=lambda group: len(group.layers)))  # those of many layers may fail
    reasons = {group.name: why for group, why in found}
    return [group for group in groups if group.name not in reasons], found


def _doubled(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """A copy of a model in float64, where only wrong dependencies differ, and its example; or both as they are, if it fails."""

    def wide(each: Any) -> Any:
        return each.double() if isinstance(each, Tensor) and each.is_floating_point() else each

    try:
        copied = deepcopy(model).double()
        inputs = tree_map(wide, example)
        with in_evaluation_mode(copied), torch.no_grad():
            call_model(copied, inputs)
    except Exception:  # some models name a dtype
        return model, example
    return copied, inputs


def _sifted(model: nn.Module, example: Any, groups: list[UnitGroup]) -> list[tuple[UnitGroup, str]]:
    """The groups that fail the test, found by halving, with the reason."""
    why = _problem(model, example, groups) if groups else None
    if why is None:
        return []
    if len(groups) == 1:
        return [(groups[0], why)]
    half = len(groups) // 2
    return _sifted(model, example, groups[:half]) + _sifted(model, example, groups[half:])


def _problem(model: nn.Module, example: Any, groups: list[UnitGroup]) -> str | None:
    """Why every third unit of groups cannot be removed; None if it can."""
    masks = [torch.arange(group.size) % 3 != 1 for group in groups]
    try:
        difference = outputs_differ(model, example, groups, masks)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        return f"the model does not run without some of its units ({reason(error)})"
    return None if difference <= tolerance_of(model) else "the model places its units by their number, so none can be removed"
