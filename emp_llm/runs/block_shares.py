"""Shares of the blocks by cost: each block loses so much that its last weight costs as much as that
of every other block.

Each block is pruned alone, at a few sparsities, with its masks in memory. The rise of the loss of
held-out text is about exp(a + b s) at a sparsity s. Of blocks with n weights, the cheapest shares
with a given total have the same price b exp(a + b s) / n of a weight everywhere.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.calibration.activations import Activations
from emp_llm.common.tables import percent_cell
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import MOST_BY_COST, ByCost, Magnitude, Recipe, Share, Wanda
from emp_llm.runs.loss_budget import LossCurve

logger = logging.getLogger(__name__)
ALONE = (0.25, 0.5, 0.75)  # sparsities of a block that is pruned alone
_LEAST = 1e-6  # nats: a rise below it is chance
_FLATTEST = 1.0  # slope of the logarithm
_HALVINGS = 200


@dataclass(frozen=True)
class BlockCost:
    """What a block costs alone.

    Attributes:
        block: None: targets outside the blocks.
        weights: number of its target weights.
        rises: of the loss at `ALONE`, in nats per token.
    """

    block: int | None
    weights: int
    rises: tuple[float, ...]


def costs_of_blocks(
    curve: LossCurve, targets: Sequence[Target], norms: Activations | None
) -> list[BlockCost]:
    """Prune each block alone, by Wanda's scores, or by magnitudes without norms."""
    score = Magnitude() if norms is None else Wanda()
    costs = []
    for block in dict.fromkeys(target.layer.block for target in targets):
        members = [target for target in targets if target.layer.block == block]
        rises = []
        for sparsity in ALONE:
            removed = removed_weights(targets, {block: sparsity})
            recipe = Recipe(score=score, counts=Share(shares=ByCost(removed)))
            record, _ = curve.of_masks(recipe, norms)
            rises.append(math.log(record.value / curve.dense.value))
        weights = sum(target.matrix.numel for target in members)
        costs.append(BlockCost(block, weights, tuple(rises)))
        name = "targets outside the blocks" if block is None else f"block {block}"
        change = 100 * math.expm1(min(rises[1], 50.0))
        logger.info("%s: half of it costs %+.2f %% of the perplexity", name, change)
    return costs


def shares_by_cost(costs: Sequence[BlockCost], total: float) -> dict[int | None, float]:
    """The sparsity of each block, with a total sparsity of all weights."""
    slopes, starts = _lines(costs)
    sizes = np.array([cost.weights for cost in costs], dtype=float)
    low = -100.0
    high = 100.0
    shares = np.zeros(len(costs))
    for _ in range(_HALVINGS):  # the logarithm of the price
        price = (low + high) / 2
        shares = np.clip((price + np.log(sizes / slopes) - starts) / slopes, 0, MOST_BY_COST)
        if float((shares * sizes).sum()) < total * float(sizes.sum()):
            low = price
        else:
            high = price
    return {cost.block: float(share) for cost, share in zip(costs, shares, strict=True)}


def _lines(costs: Sequence[BlockCost]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Slope b and start a of the logarithm of each block's rise."""
    rises = np.log(np.maximum([cost.rises for cost in costs], _LEAST))
    slopes, starts = np.polyfit(ALONE, rises.T, 1)
    return np.maximum(slopes, _FLATTEST), starts


def removed_weights(targets: Sequence[Target], shares: dict[int | None, float]) -> dict[str, int]:
    """How many weights each target loses; blocks that are not named lose none."""
    return {
        target.name: math.floor(shares.get(target.layer.block, 0.0) * target.matrix.numel)
        for target in targets
    }


def removed_by_cost(
    sparsity: float, curve: LossCurve, targets: Sequence[Target], norms: Activations | None
) -> dict[str, int]:
    """How many weights each target loses, with a total sparsity of all weights."""
    shares = shares_by_cost(costs_of_blocks(curve, targets, norms), sparsity)
    least, most = (percent_cell(find(shares.values())) for find in (min, max))
    logger.info("blocks lose %s to %s %% of their weights, by their cost.", least, most)
    return removed_weights(targets, shares)
