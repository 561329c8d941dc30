"""Whole neurons and filters of any torch model: scored, selected by the rule of the weights, zeroed
or removed.

    from prune_units import prune_units  # with scripts/paper on sys.path; docs/paper.md has
    examples

The mathematics is that of `emp_llm.selection`. Layers that belong together are found by
torch-pruning. A dependency that it reports is believed only if it stands the test: the model
without a third of the units must compute what the model with these units zeroed computes.

Scores have one type: layer name -> float64 tensor of shape (units,). theta_u are the weights of
unit u: a row of a linear layer, a filter of a convolution.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from units import (
    BATCH_NORMS,
    CONVOLUTIONS,
    INSTANCE_NORMS,
    UNIT_LAYERS,
    Axis,
    Cuts,
    Trace,
    UnitGroup,
    UnitPlace,
    beside_model,
    call_model,
    changed_units,
    cuts_of,
    is_depthwise,
    own_group,
    remove_units,
    tensors_in,
    trace_model,
    unit_count,
    unit_kind,
    unit_layers,
    with_gradients,
    zero_units,
)

from emp_llm.calibration.passes import in_evaluation_mode
from emp_llm.common.errors import UserError, reason
from emp_llm.common.tables import number_cell, percent_cell, table
from emp_llm.selection.reference import Selection, select_rows, sum_rows
from emp_llm.selection.rule import (
    KeepRule,
    NonFiniteError,
    check_beta,
    check_order,
    mass_bound,
    uniform_counts,
)

UnitScores = dict[str, Tensor]
Loss = Callable[[Any, Any], Tensor]
GradientMeasure = Callable[[nn.Module, Tensor, Tensor | None], Tensor]


def magnitude_scores(model: nn.Module) -> UnitScores:
    """||theta_u||_2, the norm of the unit's weights; the bias does not count."""
    return {name: _row_norms(_weight_of(module)) for name, module in unit_layers(model).items()}


def taylor_scores(model: nn.Module, data: Iterable[Any], loss: Loss) -> UnitScores:
    """|sum of (dL/dtheta) * theta over theta_u and the unit's bias|, the mean over the batches.

    It is the first-order change of the loss if the unit is set to zero.

    Args:
        model: any module; it runs in evaluation mode, and neither its mode nor its `.grad` changes.
        data: batches, each a pair (inputs, targets). Inputs are a tensor, a tuple of arguments or a
            mapping of keywords.
        loss: takes (outputs, targets), returns a scalar; for example `nn.CrossEntropyLoss()`.

    Raises:
        UserError: there is no batch, a batch is no pair, or the loss is no scalar that depends on
            the model.
    """

    def change(module: nn.Module, gradient: Tensor, of_bias: Tensor | None) -> Tensor:
        (total,) = sum_rows(
            (gradient.double() * _weight_of(module).double()).flatten(1), lambda s: s
        )
        if of_bias is not None:
            total = total + of_bias.double() * module.bias.detach().double()  # type: ignore[operator]
        return total.abs()

    return gradient_scores(model, data, loss, change)


def saliency_scores(model: nn.Module, data: Iterable[Any], loss: Loss) -> UnitScores:
    """||dL/dtheta_u||_2, the norm of the gradient of the unit's weights, the mean over the
    batches. Arguments as for Taylor.
    """
    return gradient_scores(
        model, data, loss, lambda module, gradient, of_bias: _row_norms(gradient)
    )


def gradient_scores(
    model: nn.Module, data: Iterable[Any], loss: Loss, measure: GradientMeasure
) -> UnitScores:
    """The mean over the batches of a measure of the gradients of each linear layer and convolution.

    Args:
        model, data, loss: as for `taylor_scores`.
        measure: takes a layer, dL/dweight and dL/dbias (None without a bias), and returns a tensor
            of any shape, such as one score per unit or per weight. Where the loss does not depend
            on a layer, the gradient of its weight is zero.

    Returns:
        Layer name -> float64 tensor on the CPU, of the shape that the measure returns.

    Raises:
        UserError: as for `taylor_scores`.
    """
    layers = unit_layers(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no linear layer or convolution.")
    totals: UnitScores = {}
    batches = 0
    with with_gradients(model):
        parameters = [
            each
            for module in layers.values()
            for each in (module.weight, module.bias)
            if each is not None
        ]
        for batch in data:
            value = _loss_of(model, batch, loss)
            found = torch.autograd.grad(value, parameters, allow_unused=True)  # type: ignore[arg-type]
            gradients = {
                id(each): gradient for each, gradient in zip(parameters, found, strict=True)
            }
            for name, module in layers.items():
                gradient = gradients[id(module.weight)]
                gradient = torch.zeros_like(_weight_of(module)) if gradient is None else gradient
                measured = measure(module, gradient, gradients.get(id(module.bias))).double().cpu()
                totals[name] = totals[name] + measured if name in totals else measured
            batches += 1
    if not batches:
        raise UserError(
            "data: it gives no batches. A generator can be read only once; give a list "
            "or a DataLoader."
        )
    return {name: total / batches for name, total in totals.items()}


def checked_scores(model: nn.Module, scores: Mapping[str, Tensor]) -> UnitScores:
    """Scores of the user's own, in float64 on the CPU.

    Raises:
        UserError: a layer does not exist, or its scores have another shape, are negative or not
            finite.
    """
    layers = unit_layers(model)
    found = {}
    for name, given in scores.items():
        if name not in layers:
            raise UserError(
                f"scores: {type(model).__name__} has no linear layer or convolution {name!r}."
            )
        units = unit_count(layers[name])
        if not isinstance(given, Tensor) or tuple(given.shape) != (units,):
            shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise UserError(
                f"scores of {name}: give a tensor of shape ({units},), one score per "
                f"unit, not {shape}."
            )
        values = given.detach().double().cpu()
        if not bool(torch.isfinite(values).all()):
            raise UserError(f"scores of {name}: they hold NaN or infinity.")
        if bool((values < 0).any()):
            raise UserError(
                f"scores of {name}: some are below zero. Take their size, or map them "
                "by emp_llm.shift first."
            )
        found[name] = values
    return found


def _loss_of(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of a model on a batch."""
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        raise UserError(f"data: a batch is a pair (inputs, targets), not {type(batch).__name__}.")

    inputs, targets = batch
    value = loss(call_model(model, inputs), beside_model(model, targets))
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise UserError(
            "loss: it must return a scalar tensor that depends on the model, such as "
            "nn.CrossEntropyLoss() does."
        )
    return value


def _weight_of(module: nn.Module) -> Tensor:
    return module.weight.detach()  # type: ignore[operator]


def _row_norms(weight: Tensor) -> Tensor:
    (squares,) = sum_rows(weight.flatten(1), lambda s: s * s)
    return squares.sqrt().cpu()


UnitScope = Literal["layer", "all"]
Budget = Callable[[int], KeepRule]  # from the size of a group


@dataclass(frozen=True)
class UnitNumbers:
    """The numbers of the units that compete with each other.

    Attributes:
        size: number of units.
        n_eff: their effective number, not floored.
        s_eff: the share of the scores that the floor(n_eff) largest hold.
        s_eff_bound: the least share that theorem 4.2 allows; None for other orders than 2.
    """

    size: int
    n_eff: float
    s_eff: float
    s_eff_bound: float | None


def unit_budget(beta: float | None, order: float | None, sparsity: float | None) -> Budget:
    """The rule for groups of each size: clip(floor(beta * N_eff), 1, N) units stay, or a fixed
    share of them is removed.

    Raises:
        UserError: a value is out of range, or `sparsity` is given with `beta` or `order`.
    """
    if sparsity is not None and (beta is not None or order is not None):
        raise UserError(
            "sparsity fixes the share to remove, beta and order scale the effective "
            "number; give only one kind."
        )
    if sparsity is not None:
        if not 0 <= sparsity < 1:
            raise UserError(f"sparsity must be at least 0 and below 1, got {sparsity:g}.")
        share = sparsity
        return lambda size: KeepRule(counts=uniform_counts(np.array([size]), share))
    beta = 1.0 if beta is None else beta
    order = 2.0 if order is None else order
    try:
        check_beta(beta)
        check_order(order)
    except ValueError as error:
        raise UserError(f"{error}.") from error
    rule = KeepRule(beta=beta, order=order)
    return lambda size: rule


def select_units(
    scores: dict[str, Tensor], budget: Budget, scope: UnitScope = "layer"
) -> tuple[dict[str, Tensor], dict[str, UnitNumbers], list[str]]:
    """Select units.

    Args:
        scores: name -> scores of the units of a group, float64, shape (units,), non-negative.
        budget: how many units to keep, of each group or of all.
        scope: which units compete with each other: those of a group ("layer"), or those of all
            groups.

    Returns:
        Name -> mask, bool, shape (units,), true where kept; name -> numbers of the competing units,
        with the name "" if all compete; and the groups of which all would lose nothing but one
        unit: the largest, which is kept in addition.

    Raises:
        UserError: the scope is unknown, or scores hold NaN or infinity.
    """
    if scope not in get_args(UnitScope):
        raise UserError(f"group {scope!r} is not one of {', '.join(get_args(UnitScope))}.")
    parts = {"": torch.cat(list(scores.values()))} if scope == "all" else scores
    selections = {name: _select(name, part, budget) for name, part in parts.items()}
    numbers = {
        name: _numbers(selection, budget(len(parts[name])).order)
        for name, selection in selections.items()
    }
    if scope == "layer":
        return {name: selection.mask[0] for name, selection in selections.items()}, numbers, []
    pieces = torch.split(selections[""].mask[0], [len(part) for part in scores.values()])
    masks = {name: piece.clone() for name, piece in zip(scores, pieces, strict=True)}
    empty = [name for name, mask in masks.items() if not bool(mask.any())]
    for name in empty:
        masks[name][int(scores[name].argmax())] = True
    return masks, numbers, empty


def _select(name: str, scores: Tensor, budget: Budget) -> Selection:
    try:
        return select_rows(scores.reshape(1, -1), budget(len(scores)))
    except NonFiniteError as error:
        raise UserError(
            f"{name or 'the model'}: {error}. Its weights, or the gradients of the loss, are not "
            "finite."
        ) from error


def _numbers(selection: Selection, order: float) -> UnitNumbers:
    assert selection.n_eff is not None
    assert selection.s_eff is not None
    size = selection.mask.shape[1]
    n_eff = float(selection.n_eff[0])
    bound = float(mass_bound(n_eff, size)) if order == 2.0 else None
    return UnitNumbers(size, n_eff, float(selection.s_eff[0]), bound)


@dataclass(frozen=True)
class LayerUnits:
    """The units of a layer.

    Attributes:
        kind: "neurons" or "filters".
        units, kept: their number before and after.
        group: the first of the layers that are coupled with it; its own name, if it is that or
            alone.
        numbers: effective number and mass of its group; None if the units of all groups compete.
    """

    kind: str
    units: int
    kept: int
    group: str
    numbers: UnitNumbers | None


@dataclass(frozen=True)
class UnitReport:
    """The effect of `prune_units`.

    Attributes:
        layers: name -> the units of each pruned layer.
        left: name -> why the units of a layer were left alone.
        masks: name -> bool, shape (units,), true where a unit was kept, for each pruned layer.
        cuts: module -> axis -> positions removed, for `zero_units` and `remove_units`; it can be
            written as JSON.
        numbers: effective number and mass of all units, if they compete; else None.
        saved: groups that would have lost all units, and kept their largest.
        removed: whether units were removed; else they are zero.
        parameters, flops: (before, after) with the units removed. After is None with
            coupled="alone", which only zeroes. FLOPs are those of one call with the example; a
            multiplication and an addition count as two.
        difference: largest difference between outputs with units removed and zeroed, on the
            example, relative to the largest output; None with coupled="alone".
    """

    layers: dict[str, LayerUnits]
    left: dict[str, str]
    masks: dict[str, Tensor]
    cuts: Cuts
    numbers: UnitNumbers | None
    saved: list[str]
    removed: bool
    parameters: tuple[int, int | None]
    flops: tuple[int, int | None]
    difference: float | None

    @property
    def units(self) -> int:
        """Number of units of all groups; those of coupled layers count once."""
        return sum(layer.units for name, layer in self.layers.items() if layer.group == name)

    @property
    def kept(self) -> int:
        """Number of units kept, of `units`."""
        return sum(layer.kept for name, layer in self.layers.items() if layer.group == name)

    @property
    def sparsity(self) -> float:
        """The share of the units of all groups that was pruned."""
        return (self.units - self.kept) / self.units

    def __str__(self) -> str:
        rows = [["layer", "units", "kept", "removed %", "N_eff", "s_eff %", "coupled with"]]
        for name, layer in self.layers.items():
            numbers = layer.numbers
            n_eff, s_eff = (None, None) if numbers is None else (numbers.n_eff, numbers.s_eff)
            share = percent_cell(1 - layer.kept / layer.units)
            coupled = "" if layer.group == name else layer.group
            rows.append(
                [
                    name,
                    f"{layer.units} {layer.kind}",
                    str(layer.kept),
                    share,
                    number_cell(n_eff),
                    percent_cell(s_eff),
                    coupled,
                ]
            )
        lines = [table(rows), ""]
        if self.numbers is not None:
            lines.append(
                f"All units compete: N_eff {self.numbers.n_eff:.3f} of {self.numbers.size}."
            )
        lines += [
            f"{name} kept its largest unit, which the rule would have removed."
            for name in self.saved
        ]
        for what, (before, after) in (("parameters", self.parameters), ("FLOPs", self.flops)):
            if after is None:
                lines.append(f"{what}: {before:,}, unchanged: units are zero, not removed.")
            else:
                rest = "" if self.removed else " if they were removed"
                lines.append(f"{what}: {before:,} -> {after:,} ({after / before:.1%}){rest}")
        lines += [f"left alone: {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


Coupled = Literal["together", "skip", "alone"]
Left = dict[str, str]  # layer -> why its units are left alone


def groups_of(
    model: nn.Module, example: Any, trace: Trace, coupled: Coupled, ignore: set[str]
) -> tuple[list[UnitGroup], Left]:
    """The groups of units that can be pruned, and the layers left alone.

    Args:
        coupled: "together"; "skip", to leave units alone that are added to those of other layers;
            or "alone": the units of each layer for itself, to be zeroed and not removed.
        ignore: layers to leave alone.

    Raises:
        UserError: torch-pruning is not installed, or cannot follow the model.
    """
    groups: list[UnitGroup] = []
    left: Left = {}
    found = (
        _groups_alone(model, trace) if coupled == "alone" else _candidates(model, example, trace)
    )
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


def outputs_differ(
    model: nn.Module, example: Any, groups: list[UnitGroup], masks: list[Tensor]
) -> float:
    """The largest difference of an output with units removed and zeroed, relative to the largest
    output.

    The model is unchanged afterwards.
    """
    cuts = cuts_of(groups, masks)
    outputs = []
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
        yield (
            own_group(name, size, trace.batch_norms.get(name)),
            _why_not(module, name, trace, in_groups=True),
        )


def _candidates(
    model: nn.Module, example: Any, trace: Trace
) -> Iterator[tuple[UnitGroup, str | None]]:
    """The groups of units that torch-pruning finds, each with the reason to leave it alone, if
    there is one.
    """
    graph = _dependencies(model, example)
    names = {module: name for name, module in model.named_modules()}
    watch = _Watch(graph)
    visited = set[str]()
    for name, module in unit_layers(model).items():
        if name in visited:
            continue
        size = unit_count(module)
        if name not in trace.called or module not in graph.module2node:
            yield (
                own_group(name, size, None),
                _why_not(module, name, trace) or "not called as a module of its own",
            )
            continue
        pruner = graph.get_pruner_of_module(module)
        try:
            watch.begin()
            found = graph.get_pruning_group(module, pruner.prune_out_channels, list(range(size)))
        except _EndlessError:
            yield (
                own_group(name, size, None),
                "torch-pruning does not come to an end of its dependencies",
            )
            continue
        group, why = _group_of(name, size, found, graph, names)
        visited.update(group.layers)
        reasons = (
            _why_not(model.get_submodule(place.module), place.module, trace, place.axis)
            for place in group.places
        )
        yield group, why or next((each for each in reasons if each is not None), None)


class _EndlessError(Exception):
    """A group has far more dependencies than the model."""


class _Watch:
    """Ends the search for a group that goes around in circles, as in rotary embeddings with shared
    heads.

    Args:
        graph: of torch-pruning, whose dependencies are counted when they are asked for.
    """

    def __init__(self, graph: Any) -> None:
        every = [
            dependency for node in graph.module2node.values() for dependency in node.dependencies
        ]
        self._limit = 1000 + 4 * len(every)
        self._asked = 0
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


def _group_of(
    name: str, size: int, found: Any, graph: Any, names: dict[nn.Module, str]
) -> tuple[UnitGroup, str | None]:
    """A group of torch-pruning as ours, and the reason to leave it alone."""
    places = []
    why = None
    for item in found:
        module = item.dep.target.module
        if module not in names:  # an operation, or a parameter of its own
            if isinstance(module, nn.Parameter):
                why = why or "combined with a parameter that belongs to no layer"
            continue
        axis = _axis(module, graph.is_out_channel_pruning_fn(item.dep.handler))
        if axis is None:
            why = why or (
                f"tied to {type(module).__name__} {names[module]}, which units cannot "
                "leave one by one"
            )
            continue
        if any(unit is None for unit in item.root_idxs):
            why = why or "repeated by the model"
            continue
        positions, units = (
            torch.tensor(each, dtype=torch.int64) for each in (list(item.idxs), item.root_idxs)
        )
        places.append(UnitPlace(names[module], axis, positions, units))
    if not any(place.axis == "outputs" and place.module == name for place in places):
        return own_group(name, size, None), why or "its dependencies are not known"
    return UnitGroup(name, size, tuple(places)), why


def _axis(module: nn.Module, is_output: bool) -> Axis | None:
    """The axis of a module on which units lie; None if they cannot be removed from it one by
    one.
    """
    if isinstance(module, BATCH_NORMS + INSTANCE_NORMS + (nn.PReLU,)):
        return "channels"
    if isinstance(module, CONVOLUTIONS) and is_depthwise(module):
        return "outputs"
    if isinstance(module, UNIT_LAYERS):
        return "outputs" if is_output else "inputs"
    return None


def _why_not(
    module: nn.Module, name: str, trace: Trace, axis: Axis = "outputs", in_groups: bool = False
) -> str | None:
    """Why units cannot be pruned at a module; None if they can. `in_groups`: convolutions in
    groups can.
    """
    if axis == "outputs" and name in trace.ends:
        return "its outputs are those of the model"
    if axis == "outputs" and name not in trace.called:
        return "not called for the example"
    if (
        not in_groups
        and isinstance(module, CONVOLUTIONS)
        and module.groups > 1
        and not is_depthwise(module)
    ):
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
                model,
                example,
                forward_fn=lambda each, inputs: tensors_in(call_model(each, inputs)),
                verbose=False,
            )
    except Exception as error:
        raise UserError(
            f"{type(model).__name__}: torch-pruning cannot follow it ({reason(error)}). "
            "coupled='alone' zeroes the units of each layer without it."
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
            "To find the units that belong together, torch-pruning is needed: pip install "
            "torch-pruning. coupled='alone' zeroes the units of each layer without it."
        ) from error
    return library  # type: ignore[no-any-return]


def _tested(
    model: nn.Module, example: Any, groups: list[UnitGroup]
) -> tuple[list[UnitGroup], list[tuple[UnitGroup, str]]]:
    """The groups whose removal computes what zeroing computes; and the others, with the reason."""
    # Those of many layers may fail.
    found = _sifted(model, example, sorted(groups, key=lambda group: len(group.layers)))
    reasons = {group.name: why for group, why in found}
    return [group for group in groups if group.name not in reasons], found


def _doubled(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """A copy of a model in float64, where only wrong dependencies differ, and its example; or
    both as they are, if it fails.
    """

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
    return (
        None
        if difference <= tolerance_of(model)
        else "the model places its units by their number, so none can be removed"
    )


SCORES = ("magnitude", "taylor", "saliency")


def prune_units(
    model: nn.Module,
    example: Any,
    *,
    score: str | Mapping[str, Tensor] = "magnitude",
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    beta: float | None = None,
    order: float | None = None,
    sparsity: float | None = None,
    group: UnitScope = "layer",
    coupled: Coupled = "together",
    remove: bool = False,
    ignore: Iterable[str] = (),
) -> UnitReport:
    """Prune neurons of linear layers and filters of convolutions, in place. Layers that end the
    model are never pruned.

    Everything is decided before the first weight changes. Unless `coupled` is "alone", removal is
    tried first: the smaller model must compute, on the example, what the model with zeroed units
    computes. Units that fail are left alone, and the report says why.

    Args:
        model: any module, in memory.
        example: inputs of one call: a tensor, a tuple of arguments or a mapping of keywords.
        score: "magnitude", "taylor" or "saliency" (see `magnitude_scores`, ...); or scores of your
            own by layer name, of shape (units,), for the layers to prune. The score of units that
            belong together is the sum over their layers.
        data, loss: batches (inputs, targets) and a function of (outputs, targets), for Taylor and
            saliency.
        beta, order: keep clip(floor(beta * N_eff), 1, N) units, with the effective number of this
            Hill order; None: 1, 2.
        sparsity: in their place, the share of units to remove.
        group: the units that compete: those of a layer (or of layers that belong together), or
            "all".
        coupled: layers whose outputs are added are pruned "together"; "skip" leaves them alone;
            "alone" zeroes the units of each layer for itself, which needs no torch-pruning but
            cannot remove.
        remove: remove the units; else they are set to zero.
        ignore: names of layers to leave alone.

    Raises:
        UserError: options conflict, no units can be pruned, or scores cannot be used. The model is
            unchanged.
    """
    budget = unit_budget(beta, order, sparsity)
    if coupled not in get_args(Coupled):
        raise UserError(f"coupled {coupled!r} is not one of {', '.join(get_args(Coupled))}.")
    if remove and coupled == "alone":
        raise UserError(
            "coupled='alone' zeroes units; it cannot remove them. Use coupled='together' or 'skip'."
        )
    ignored = _known(model, ignore)
    trace = trace_model(model, example)
    groups, left = groups_of(model, example, trace, coupled, ignored)
    scores = _scores(model, score, data, loss)
    groups = _scored(groups, scores, left)
    if not groups:
        raise UserError(f"{type(model).__name__} has no units to prune. {_reasons(left)}")
    masks, numbers, saved = select_units(
        {each.name: each.score(scores) for each in groups}, budget, group
    )
    chosen = [masks[each.name] for each in groups]
    cuts = cuts_of(groups, chosen)
    difference, parameters, flops = _effect(model, example, trace, groups, chosen, coupled)
    layers = _layer_units(model, groups, chosen, numbers)
    of_layers = {name: _mask_of_layer(model, name, cuts) for name in layers}
    (remove_units if remove else zero_units)(model, cuts)
    left = {name: left[name] for name in unit_layers(model) if name in left}
    return UnitReport(
        layers, left, of_layers, cuts, numbers.get(""), saved, remove, parameters, flops, difference
    )


def _known(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of layers, as a set; UserError for an unknown one."""
    found = {names} if isinstance(names, str) else set(names)
    layers = unit_layers(model)
    for name in sorted(found - layers.keys()):
        raise UserError(
            f"ignore: {type(model).__name__} has no linear layer or convolution {name!r}."
        )
    return found


def _scores(
    model: nn.Module,
    score: str | Mapping[str, Tensor],
    data: Iterable[Any] | None,
    loss: Loss | None,
) -> UnitScores:
    """The scores by layer, computed or given."""
    if isinstance(score, Mapping):
        return checked_scores(model, score)
    if score not in SCORES:
        raise UserError(
            f"score {score!r} is not one of {', '.join(SCORES)}; or give scores by layer name."
        )
    if score == "magnitude":
        return magnitude_scores(model)
    if data is None or loss is None:
        missing = "data" if data is None else "loss"
        raise UserError(
            f"score {score} needs {missing}: give batches of (inputs, targets) as data, and "
            "loss(outputs, targets)."
        )
    return (taylor_scores if score == "taylor" else saliency_scores)(model, data, loss)


def _scored(groups: list[UnitGroup], scores: UnitScores, left: Left) -> list[UnitGroup]:
    """The groups that have scores; the others are added to the layers left alone."""
    found = []
    for group in groups:
        without = [name for name in group.layers if name not in scores]
        if not without:
            found.append(group)
        elif len(without) == len(group.layers):
            left.update(dict.fromkeys(group.layers, "no scores given"))
        else:
            raise UserError(
                f"scores: {without[0]} has none, but its units belong to those of "
                f"{group.name}. Give both or none."
            )
    return found


def _reasons(left: Left) -> str:
    """Why layers were left alone, as the rest of a message."""
    if not left:
        return "It has no linear layers and no convolutions."
    reasons = [f"{name}: {why}" for name, why in left.items()]
    return "; ".join(reasons[:4]) + ("; ..." if len(reasons) > 4 else ".")


def _effect(
    model: nn.Module,
    example: Any,
    trace: Trace,
    groups: list[UnitGroup],
    masks: list[Tensor],
    coupled: Coupled,
) -> tuple[float | None, tuple[int, int | None], tuple[int, int | None]]:
    """(difference of the outputs, parameters, FLOPs) of units removed; the model is unchanged."""
    before = _parameters(model)
    if coupled == "alone":
        return None, (before, None), (trace.flops, None)
    try:
        difference = outputs_differ(model, example, groups, masks)
    except RuntimeError as error:
        raise UserError(
            f"The model does not run without these units ({reason(error)}). Use coupled='alone'."
        ) from error
    if not difference <= tolerance_of(model):
        raise UserError(
            f"The outputs with units removed and zeroed differ by {difference:.1e}. "
            "Use coupled='alone'."
        )
    with changed_units(model, cuts_of(groups, masks), remove_units):
        return (
            difference,
            (before, _parameters(model)),
            (trace.flops, trace_model(model, example).flops),
        )


def _layer_units(
    model: nn.Module, groups: list[UnitGroup], masks: list[Tensor], numbers: dict[str, UnitNumbers]
) -> dict[str, LayerUnits]:
    """The units of each layer of the groups, in the model's order."""
    found = {}
    for group, mask in zip(groups, masks, strict=True):
        for name in group.layers:
            kind = unit_kind(model.get_submodule(name))
            found[name] = LayerUnits(
                kind, group.size, int(mask.sum()), group.name, numbers.get(group.name)
            )
    return {name: found[name] for name in unit_layers(model) if name in found}


def _mask_of_layer(model: nn.Module, name: str, cuts: Cuts) -> Tensor:
    """The mask of a layer's outputs: bool, true where kept."""
    mask = torch.ones(unit_count(model.get_submodule(name)), dtype=torch.bool)
    mask[cuts.get(name, {}).get("outputs", [])] = False
    return mask


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())
