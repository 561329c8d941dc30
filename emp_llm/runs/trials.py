"""Masks that are tried on the dense model of a run: the weights are pruned in memory, measured,
and restored.

Shares of the blocks by cost use them: each block loses so much that its last weight costs as much
as that of every other block. Each block is pruned alone, at a few sparsities. The rise of the loss
of held-out text is about exp(a + b s) at a sparsity s. Of blocks with n weights, the cheapest
shares with a given total have the same price b exp(a + b s) / n of a weight everywhere.
"""

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from emp_llm.calibration.activations import Activations
from emp_llm.common.machine import Stopwatch
from emp_llm.common.tables import percent_cell
from emp_llm.evaluation.comparison import losses_of, paired_error_of_losses
from emp_llm.evaluation.evaluate import perplexity
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import MOST_BY_COST, ByCost, Magnitude, Recipe, Share, Wanda
from emp_llm.options.shared import MaskDevice
from emp_llm.pruning.counts import Numbers, counts_of
from emp_llm.pruning.masks import Outcomes, Pruner
from emp_llm.pruning.scores import Scores
from emp_llm.pruning.updates import prune_loaded
from emp_llm.pruning.writing import write_checkpoint
from emp_llm.records.evaluation import PerplexityRecord
from emp_llm.records.run_report import LossPoint
from emp_llm.runs.run import Run, dense_model
from emp_llm.walk.updated import UpdatedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
ALONE = (0.25, 0.5, 0.75)  # sparsities of a block that is pruned alone
_LEAST = 1e-6  # nats: a rise below it is chance
_FLATTEST = 1.0  # slope of the logarithm
_HALVINGS = 200
_RUINED = 700.0  # nats: the rise of a model whose loss is not finite


@contextmanager
def try_masks(
    run: Run,
    pruner: Pruner,
    scratch: Path,
    stopwatch: Stopwatch,
    updated: UpdatedWeights | None = None,
) -> Iterator[tuple[Path, Outcomes]]:
    """Inside this context, the model in a folder is pruned: the dense one in memory, whose weights
    are restored, or that of a temporary checkpoint.

    Args:
        scratch: folder of the temporary checkpoint.
        stopwatch: times the pruning.
        updated: new values of the weights that stay.

    Returns:
        The folder, and the outcomes.
    """
    if run.in_memory:
        with ExitStack() as masked:
            with stopwatch("prune"):
                outcomes = masked.enter_context(prune_loaded(dense_model(run), pruner, updated))
            yield run.source.folder, outcomes
        return
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        with stopwatch("prune"):
            outcomes = write_checkpoint(pruner, scratch, updated=updated).outcomes
        yield scratch, outcomes
    finally:
        run.models.free()  # the next one has the same path
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class LossCurve:
    """The perplexity of held-out text against the share of the weights that masks remove.

    Attributes:
        run: its dense model, targets and models.
        tokens: the held-out text, int64, shape (sequences, length).
        mask_device: of `Pruner`.
        work: folder for the checkpoint of a point, where the weights are offloaded.
        numbers: of the magnitudes, shared by recipes whose counts they set.
    """

    run: Run
    tokens: Tensor
    mask_device: MaskDevice
    work: Path
    numbers: Numbers = field(default_factory=dict)

    @cached_property
    def dense(self) -> PerplexityRecord:
        """The dense model's perplexity."""
        return self.measure(dense_model(self.run))

    def measure(self, model: "PreTrainedModel") -> PerplexityRecord:
        """A model's perplexity."""
        return perplexity(model, self.tokens.flatten(), self.tokens.shape[1], batch_size=1)

    def point(self, record: PerplexityRecord, sparsity: float, whole: bool) -> LossPoint:
        """A point from what its model measured."""
        rise = math.log(record.value / self.dense.value)
        error = paired_error_of_losses(losses_of(record), losses_of(self.dense)) or 0.0
        if not math.isfinite(rise + error):  # a ruined model
            rise = _RUINED
            error = 0.0
        point = LossPoint(sparsity=sparsity, rise=rise, error=error, whole_run=whole)
        change = 100 * math.expm1(min(rise, 50.0))
        # The result shows all points.
        logger.debug(
            "%s%.1f %% removed: perplexity %+.2f %%", "pruned, " * whole, 100 * sparsity, change
        )
        return point

    def of_masks(
        self, recipe: Recipe, norms: Activations | None
    ) -> tuple[PerplexityRecord, Outcomes]:
        """The perplexity of the model with a recipe's masks, and the outcomes of the masks.

        Args:
            norms: of the calibration; None if the scores need none.
        """
        run = self.run
        scores = Scores(run.checkpoint, run.targets, recipe)
        if norms is not None and recipe.needs_activations:
            scores = scores.with_activations(norms)
        pruner = Pruner(scores, counts_of(scores, self.numbers), self.mask_device)
        _ = self.dense
        untimed = Stopwatch(peaks=False)
        with try_masks(run, pruner, self.work / "checkpoint", untimed) as (folder, outcomes):
            record = self.measure(run.models.get(folder))
        return record, outcomes


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


def remove_by_cost(
    sparsity: float, curve: LossCurve, targets: Sequence[Target], norms: Activations | None
) -> dict[str, int]:
    """How many weights each target loses, with a total sparsity of all weights."""
    shares = shares_by_cost(costs_of_blocks(curve, targets, norms), sparsity)
    least, most = (percent_cell(find(shares.values())) for find in (min, max))
    logger.info("blocks lose %s to %s %% of their weights, by their cost.", least, most)
    return removed_weights(targets, shares)
