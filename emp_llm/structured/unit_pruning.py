"""Neurons and filters of a model in memory, pruned by the rule of the weights."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from emp_llm.common.errors import UserError, reason
from emp_llm.structured.coupling import Coupled, Left, groups_of, outputs_differ, tolerance_of
from emp_llm.structured.surgery import changed_units, remove_units, zero_units
from emp_llm.structured.tracing import Trace, trace_model
from emp_llm.structured.unit_groups import Cuts, UnitGroup, cuts_of, unit_count, unit_kind, unit_layers
from emp_llm.structured.unit_report import LayerUnits, UnitReport
from emp_llm.structured.unit_scores import Loss, UnitScores, checked_scores, magnitude_scores, saliency_scores, taylor_scores
from emp_llm.structured.unit_selection import UnitNumbers, UnitScope, select_units, unit_budget

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
    """Prune neurons of linear layers and filters of convolutions, in place. Layers that end the model are never pruned.

    Everything is decided before the first weight changes. Unless `coupled` is "alone", removal is tried first: the
    smaller model must compute, on the example, what the model with zeroed units computes. Units that fail are left alone, and
    the report says why.

    Args:
        model: any module, in memory.
        example: inputs of one call: a tensor, a tuple of arguments or a mapping of keywords.
        score: "magnitude", "taylor" or "saliency" (see `magnitude_scores`, ...); or scores of your own by layer name, of shape
            (units,), for the layers to prune. The score of units that belong together is the sum over their layers.
        data, loss: batches (inputs, targets) and a function of (outputs, targets), for Taylor and saliency.
        beta, order: keep clip(floor(beta * N_eff), 1, N) units, with the effective number of this Hill order; None: 1, 2.
        sparsity: in their place, the share of units to remove.
        group: the units that compete: those of a layer (or of layers that belong together), or "all".
        coupled: layers whose outputs are added are pruned "together"; "skip" leaves them alone; "alone" zeroes the units of
            each layer for itself, which needs no torch-pruning but cannot remove.
        remove: remove the units; else they are set to zero.
        ignore: names of layers to leave alone.

    Raises:
        UserError: options conflict, no units can be pruned, or scores cannot be used. The model is unchanged.
    """
    budget = unit_budget(beta, order, sparsity)
    if coupled not in get_args(Coupled):
        raise UserError(f"coupled {coupled!r} is not one of {', '.join(get_args(Coupled))}.")
    if remove and coupled == "alone":
        raise UserError("coupled='alone' zeroes units; it cannot remove them. Use coupled='together' or 'skip'.")
    ignored = _known(model, ignore)
    trace = trace_model(model, example)
    groups, left = groups_of(model, example, trace, coupled, ignored)
    scores = _scores(model, score, data, loss)
    groups = _scored(groups, scores, left)
    if not groups:
        raise UserError(f"{type(model).__name__} has no units to prune. {_reasons(left)}")
    masks, numbers, saved = select_units({each.name: each.score(scores) for each in groups}, budget, group)
    chosen = [masks[each.name] for each in groups]
    cuts = cuts_of(groups, chosen)
    difference, parameters, flops = _effect(model, example, trace, groups, chosen, coupled)
    layers = _layer_units(model, groups, chosen, numbers)
    of_layers = {name: _mask_of_layer(model, name, cuts) for name in layers}
    (remove_units if remove else zero_units)(model, cuts)
    left = {name: left[name] for name in unit_layers(model) if name in left}
    return UnitReport(layers, left, of_layers, cuts, numbers.get(""), saved, remove, parameters, flops, difference)


def _known(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of layers, as a set; UserError for an unknown one."""
    found, layers = {names} if isinstance(names, str) else set(names), unit_layers(model)
    for name in sorted(found - layers.keys()):
        raise UserError(f"ignore: {type(model).__name__} has no linear layer or convolution {name!r}.")
    return found


def _scores(model: nn.Module, score: str | Mapping[str, Tensor], data: Iterable[Any] | None, loss: Loss | None) -> UnitScores:
    """The scores by layer, computed or given."""
    if isinstance(score, Mapping):
        return checked_scores(model, score)
    if score not in SCORES:
        raise UserError(f"score {score!r} is not one of {', '.join(SCORES)}; or give scores by layer name.")
    if score == "magnitude":
        return magnitude_scores(model)
    if data is None or loss is None:
        missing = "data" if data is None else "loss"
        raise UserError(
            f"score {score} needs {missing}: give batches of (inputs, targets) as data, and loss(outputs, targets)."
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
            raise UserError(f"scores: {without[0]} has none, but its units belong to those of {group.name}. Give both or none.")
    return found


def _reasons(left: Left) -> str:
    """Why layers were left alone, as the rest of a message."""
    if not left:
        return "It has no linear layers and no convolutions."
    reasons = [f"{name}: {why}" for name, why in left.items()]
    return "; ".join(reasons[:4]) + ("; ..." if len(reasons) > 4 else ".")


def _effect(
    model: nn.Module, example: Any, trace: Trace, groups: list[UnitGroup], masks: list[Tensor], coupled: Coupled
) -> tuple[float | None, tuple[int, int | None], tuple[int, int | None]]:
    """(difference of the outputs, parameters, FLOPs) of units removed; the model is unchanged."""
    before = _parameters(model)
    if coupled == "alone":
        return None, (before, None), (trace.flops, None)
    try:
        difference = outputs_differ(model, example, groups, masks)
    except RuntimeError as error:
        raise UserError(f"The model does not run without these units ({reason(error)}). Use coupled='alone'.") from error
    if not difference <= tolerance_of(model):
        raise UserError(f"The outputs with units removed and zeroed differ by {difference:.1e}. Use coupled='alone'.")
    with changed_units(model, cuts_of(groups, masks), remove_units):
        return difference, (before, _parameters(model)), (trace.flops, trace_model(model, example).flops)


def _layer_units(
    model: nn.Module, groups: list[UnitGroup], masks: list[Tensor], numbers: dict[str, UnitNumbers]
) -> dict[str, LayerUnits]:
    """The units of each layer of the groups, in the model's order."""
    found = {}
    for group, mask in zip(groups, masks, strict=True):
        for name in group.layers:
            kind = unit_kind(model.get_submodule(name))
            found[name] = LayerUnits(kind, group.size, int(mask.sum()), group.name, numbers.get(group.name))
    return {name: found[name] for name in unit_layers(model) if name in found}


def _mask_of_layer(model: nn.Module, name: str, cuts: Cuts) -> Tensor:
    """The mask of a layer's outputs: bool, true where kept."""
    mask = torch.ones(unit_count(model.get_submodule(name)), dtype=torch.bool)
    mask[cuts.get(name, {}).get("outputs", [])] = False
    return mask


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())
