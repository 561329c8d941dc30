"""The refit of a model: the calibration text passes through the dense and the pruned model side by side, block by block.

Each target is fitted so that, on the inputs which its pruned and fitted predecessors give it, it returns what the dense layer
returns on its dense inputs: min over What with the mask of sum_t w_t ||What xhat_t - W x_t||^2.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.calibration.whole_pass import own_batches
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.refit import Weighting
from emp_llm.refit.block_refit import MOMENT_BYTES, BlockRefit, Streams
from emp_llm.refit.block_weights import BlockWeights
from emp_llm.refit.fitted_weights import FittedWeights
from emp_llm.refit.fitters import Fitted, Fitter

_HELD_OUT = 16  # one sequence of this many


@dataclass(frozen=True)
class RefitPass:
    """The refit of a model's targets.

    Attributes:
        targets: in decoder blocks.
        tokens: the calibration text, int64, shape (samples, length). One sequence of sixteen is held out: no weight is fitted
            on it, and it measures the error.
        options: of the forward passes.
        fitter: computes the weights.
        weighting: of the tokens.
        blocks: name of the list of decoder blocks; None: detected.
        restores_blocks: the last layer of a block is fitted so that the block, not the layer, returns what it returns in the
            dense model, where its output is added to that of the block.
    """

    targets: list[Target]
    tokens: Tensor
    options: CalibrationOptions
    fitter: Fitter
    weighting: Weighting = "equal"
    blocks: str | None = None
    restores_blocks: bool = False

    def run(self, model: PreTrainedModel, store: FittedWeights) -> None:
        """Fit all blocks that the store does not hold yet, and put them there. The model is unchanged afterwards.

        Args:
            model: dense, on any devices, offloaded or not.
            store: of the first rank; the other ranks' stores stay empty.

        Raises:
            UserError: the model cannot run block by block, memory runs out, or a moment is not finite.
        """
        runner = BlockwiseModel(model, self.blocks, self.options.hidden_states)
        kept = self.tokens.shape[0] - held_out(self.tokens.shape[0])
        fit = own_batches(self.tokens[:kept], self.options.batch_size)
        rest = list(ranks().part(torch.split(self.tokens[kept:], self.options.batch_size))) if kept < len(self.tokens) else []
        runner.prepare(fit[0])
        with runner.walk([*fit, *rest], "refit") as walk, closing(HiddenStates(walk.place)) as pruned:
            numbers = range(len(walk.batches))
            for number in numbers:
                pruned.put(number, walk.hidden.get(number, walk.device))
            streams = Streams(walk, pruned, numbers[: len(fit)], numbers[len(fit) :], self.restores_blocks)
            for step in walk.steps():
                own = [target for target in self.targets if target.name.startswith(f"{step.name}.")]
                weights = BlockWeights(model, own)
                if ranks().share(store.has(step.index)):
                    fitted = ranks().share(store.block(step.index) if ranks().main else None)
                    self._install(own, weights, fitted)
                    step.run()
                elif own:
                    fitted = BlockRefit(step, own, weights, streams, self.fitter, self.weighting).run()
                    if ranks().main:
                        store.put(step.index, fitted)
                else:
                    step.run()
                for number in numbers:
                    with weights.pruned():
                        pruned.put(number, step.output(number, pruned))

    def _install(self, own: list[Target], weights: BlockWeights, fitted: dict[str, Fitted]) -> None:
        """Put the fitted weights of an earlier run into the pruned version of a block."""
        for target in own:
            weight = fitted[target.name].weight
            if weight is not None:
                weights.put(target, weight)
                continue
            weights.mask(target, self.fitter.mask(target))


def _widest(target: Target) -> int:
    """The larger side of a matrix: moments with the outputs of a block have its shape in place of (inputs, inputs)."""
    return max(target.matrix.rows, target.matrix.columns)


def held_out(samples: int) -> int:
    """How many of the calibration sequences only measure the error of a refit."""
    return 0 if samples < 2 else max(1, samples // _HELD_OUT)


def fit_bytes(targets: list[Target], weighting: Weighting, workspace: Callable[[int, int], int]) -> int:
    """An upper bound on the memory of a fit beside the model, the hidden states and a block's inputs, in bytes.

    It holds the second moments of one level and the work memory of one solution; and of each weight of a block's targets its
    pruned version, its fitted version, its mask, and its dense value in float32.

    Args:
        targets, weighting: of the fit.
        workspace: the work memory of a solution, in bytes, for a number of outputs and inputs.
    """
    by_block: dict[int | None, list[Target]] = {}
    for target in targets:
        by_block.setdefault(target.layer.block, []).append(target)
    most = 0
    for members in by_block.values():
        single = max(4 * target.matrix.columns * (target.matrix.columns + _widest(target)) for target in members)
        several = weighting != "equal" or any(target.layer.routed for target in members)
        together = sum(8 * target.matrix.columns**2 for target in members) if several else single
        work = max(workspace(target.matrix.rows, target.matrix.columns) for target in members)
        weights = sum(target.matrix.numel * (2 * target.matrix.itemsize + 1 + 4) for target in members)
        most = max(most, max(single, min(MOMENT_BYTES, together)) + work + weights)
    return most
