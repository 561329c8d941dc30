"""Single weights of any network: their scores, the rule that selects them, and what is left of the
arithmetic.

The scores are those of `prune_units.py` for a unit of one weight; Algorithm 1 and the fixed shares
are those of `emp_llm.selection`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from networks import layer_weights
from prune_units import gradient_scores
from torch import Tensor, nn
from torch.nn import functional

from emp_llm.selection.reference import select_rows
from emp_llm.selection.rule import KeepRule, uniform_counts

Scores = dict[str, Tensor]
Budget = Callable[[int], KeepRule]  # from the size of a group
Batches = Iterable[tuple[Tensor, Tensor]]


def magnitudes(model: nn.Module, batches: Batches = ()) -> Scores:
    """|theta| of each weight."""
    return {name: weight.detach().abs() for name, weight in layer_weights(model).items()}


def taylor(model: nn.Module, batches: Batches) -> Scores:
    """|dL/dtheta * theta| of each weight, the mean over the batches: the first-order change of
    the loss if it is removed.
    """
    return _of_gradients(model, batches, lambda weight, gradient: (weight * gradient).abs())


def saliency(model: nn.Module, batches: Batches) -> Scores:
    """|dL/dtheta| of each weight, the mean over the batches."""
    return _of_gradients(model, batches, lambda weight, gradient: gradient.abs())


CRITERIA: dict[str, Callable[[nn.Module, Batches], Scores]] = {
    "magnitude": magnitudes,
    "Taylor": taylor,
    "saliency": saliency,
}


def _of_gradients(
    model: nn.Module, batches: Batches, measure: Callable[[Tensor, Tensor], Tensor]
) -> Scores:
    def of_layer(module: nn.Module, gradient: Tensor, _: Tensor | None) -> Tensor:
        return measure(module.weight.detach(), gradient)  # type: ignore[operator]

    found = gradient_scores(model, batches, functional.cross_entropy, of_layer)
    return {f"{name}.weight": score for name, score in found.items()}


@dataclass(frozen=True)
class Selected:
    """The weights that a rule keeps.

    Attributes:
        masks: by name, bool, the shape of the weight, true where kept.
        n_eff: the effective number, summed over the groups.
        sparsity: the share of the weights that is removed.
    """

    masks: dict[str, Tensor]
    n_eff: float
    sparsity: float


def select_weights(scores: Mapping[str, Tensor], budget: Budget, scope: str) -> Selected:
    """Select weights.

    Args:
        scores: by name, any shape.
        budget: how many to keep of each group.
        scope: "block": the weights of a matrix or convolution are a group; "global": all weights
            are one group.
    """
    sizes = [score.numel() for score in scores.values()]
    rows = [score.reshape(1, -1) for score in scores.values()]
    groups = rows if scope == "block" else [torch.cat(rows, 1)]
    found = [select_rows(group, budget(group.shape[1])) for group in groups]
    flat = torch.split(torch.cat([selection.mask[0] for selection in found]), sizes)
    masks = {
        name: mask.view(score.shape)
        for (name, score), mask in zip(scores.items(), flat, strict=True)
    }
    kept = sum(int(selection.kept.sum()) for selection in found)
    n_eff = sum(float(selection.n_eff.sum()) for selection in found if selection.n_eff is not None)
    return Selected(masks, n_eff, 1 - kept / sum(sizes))


def effective(beta: float) -> Budget:
    """Algorithm 1 with beta."""
    return lambda size: KeepRule(beta=beta)


def fixed_share(sparsity: float) -> Budget:
    """A fixed share of each group is removed."""
    return lambda size: KeepRule(counts=uniform_counts(np.array([size]), sparsity))


@contextmanager
def masked(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """The model with its masked weights set to zero; afterwards it is as before."""
    weights = layer_weights(model)
    before = {name: weights[name].detach().clone() for name in masks}
    with torch.no_grad():
        for name, mask in masks.items():
            weights[name].mul_(mask)
        try:
            yield model
        finally:
            for name, values in before.items():
                weights[name].copy_(values)


def nonzero_flops(model: nn.Module, image: Tensor) -> float:
    """Two operations for each nonzero weight and each of its uses, for one image: what a sparse
    computation needs at least.

    Args:
        image: an input, with the dimension of the batch.
    """
    total = 0.0

    def count(module: nn.Module, _: Any, outputs: Tensor) -> None:
        nonlocal total
        weight: Tensor = module.weight  # type: ignore[assignment]
        total += 2.0 * int(weight.count_nonzero()) * outputs[0, 0].numel()

    hooks = [
        module.register_forward_hook(count)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        model.eval()(image[:1])
    for hook in hooks:
        hook.remove()
    return total
