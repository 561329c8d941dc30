"""Scores of units. Each function returns, for every linear layer and convolution of a model, one score per neuron or filter.

The scores have the type that `prune_units` takes: layer name -> float64 tensor of shape (units,). theta_u are the weights of
unit u: a row of a linear layer, a filter of a convolution.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emp_llm.common.errors import UserError
from emp_llm.selection.reference import sum_rows
from emp_llm.structured.tracing import beside_model, call_model, with_gradients
from emp_llm.structured.unit_groups import unit_count, unit_layers

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
        data: batches, each a pair (inputs, targets). Inputs are a tensor, a tuple of arguments or a mapping of keywords.
        loss: takes (outputs, targets), returns a scalar; for example `nn.CrossEntropyLoss()`.

    Raises:
        UserError: there is no batch, a batch is no pair, or the loss is no scalar that depends on the model.
    """

    def change(module: nn.Module, gradient: Tensor, of_bias: Tensor | None) -> Tensor:
        (total,) = sum_rows((gradient.double() * _weight_of(module).double()).flatten(1), lambda s: s)
        if of_bias is not None:
            total = total + of_bias.double() * module.bias.detach().double()  # type: ignore[operator]
        return total.abs()

    return gradient_scores(model, data, loss, change)


def saliency_scores(model: nn.Module, data: Iterable[Any], loss: Loss) -> UnitScores:
    """||dL/dtheta_u||_2, the norm of the gradient of the unit's weights, the mean over the batches. Arguments as for Taylor."""
    return gradient_scores(model, data, loss, lambda module, gradient, of_bias: _row_norms(gradient))


def gradient_scores(model: nn.Module, data: Iterable[Any], loss: Loss, measure: GradientMeasure) -> UnitScores:
    """The mean over the batches of a measure of the gradients of each linear layer and convolution.

    Args:
        model, data, loss: as for `taylor_scores`.
        measure: takes a layer, dL/dweight and dL/dbias (None without a bias), and returns a tensor of any shape, such as one
            score per unit or per weight. Where the loss does not depend on a layer, the gradient of its weight is zero.

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
        parameters = [each for module in layers.values() for each in (module.weight, module.bias) if each is not None]
        for batch in data:
            value = _loss_of(model, batch, loss)
            found = torch.autograd.grad(value, parameters, allow_unused=True)  # type: ignore[arg-type]
            gradients = {id(each): gradient for each, gradient in zip(parameters, found, strict=True)}
            for name, module in layers.items():
                gradient = gradients[id(module.weight)]
                gradient = torch.zeros_like(_weight_of(module)) if gradient is None else gradient
                measured = measure(module, gradient, gradients.get(id(module.bias))).double().cpu()
                totals[name] = totals[name] + measured if name in totals else measured
            batches += 1
    if not batches:
        raise UserError("data: it gives no batches. A generator can be read only once; give a list or a DataLoader.")
    return {name: total / batches for name, total in totals.items()}


def checked_scores(model: nn.Module, scores: Mapping[str, Tensor]) -> UnitScores:
    """Scores of the user's own, in float64 on the CPU.

    Raises:
        UserError: a layer does not exist, or its scores have another shape, are negative or not finite.
    """
    layers, found = unit_layers(model), {}
    for name, given in scores.items():
        if name not in layers:
            raise UserError(f"scores: {type(model).__name__} has no linear layer or convolution {name!r}.")
        units = unit_count(layers[name])
        if not isinstance(given, Tensor) or tuple(given.shape) != (units,):
            shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise UserError(f"scores of {name}: give a tensor of shape ({units},), one score per unit, not {shape}.")
        values = given.detach().double().cpu()
        if not bool(torch.isfinite(values).all()):
            raise UserError(f"scores of {name}: they hold NaN or infinity.")
        if bool((values < 0).any()):
            raise UserError(f"scores of {name}: some are below zero. Take their size, or map them by emp_llm.shift first.")
        found[name] = values
    return found


def _loss_of(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of a model on a batch."""
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        raise UserError(f"data: a batch is a pair (inputs, targets), not {type(batch).__name__}.")

    inputs, targets = batch
    value = loss(call_model(model, inputs), beside_model(model, targets))
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise UserError("loss: it must return a scalar tensor that depends on the model, such as nn.CrossEntropyLoss() does.")
    return value


def _weight_of(module: nn.Module) -> Tensor:
    return module.weight.detach()  # type: ignore[operator]


def _row_norms(weight: Tensor) -> Tensor:
    (squares,) = sum_rows(weight.flatten(1), lambda s: s * s)
    return squares.sqrt().cpu()
