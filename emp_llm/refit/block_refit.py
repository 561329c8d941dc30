"""The refit of one block: level by level, on the inputs that the fitted levels before it give."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import HiddenStates, Step, Walk
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.modules import bias_of
from emp_llm.options.refit import Weighting
from emp_llm.refit.block_weights import BlockWeights
from emp_llm.refit.dense_block import DenseBlock
from emp_llm.refit.fitters import Fitted, Fitter
from emp_llm.refit.level_inputs import LevelInputs, SeenInputs, is_added
from emp_llm.refit.level_moments import LevelMoments, energy_of, token_weights
from emp_llm.refit.levels import Level, MomentSize, levels_of

MOMENT_BYTES = 2 << 30  # of the moments in memory at a time, unless a single input needs more


@dataclass(frozen=True)
class Streams:
    """The batches on their way through the dense and through the pruned model.

    Attributes:
        walk: the pass of the dense model; it holds the batches and the dense hidden states.
        pruned: the hidden states of the pruned model.
        fitted_on: numbers of the batches on which weights are fitted.
        held_out: numbers of the others, which only measure the error.
        restores_blocks: as for `RefitPass`.
    """

    walk: Walk
    pruned: HiddenStates
    fitted_on: Sequence[int]
    held_out: Sequence[int]
    restores_blocks: bool


class BlockRefit:
    """The refit of one block's targets.

    Args:
        step: the block, with its weights loaded.
        targets: of the block.
        weights: their two versions; the fitted weights are put into the pruned one.
        streams: the batches.
        fitter: computes the weights.
        weighting: of the tokens.
    """

    def __init__(
        self, step: Step, targets: list[Target], weights: BlockWeights, streams: Streams, fitter: Fitter, weighting: Weighting
    ) -> None:
        self._step = step
        self._targets = targets
        self._weights = weights
        self._streams = streams
        self._fitter = fitter
        self._weighting = weighting
        self._model = streams.walk.runner.model
        self._masks: dict[str, Tensor] = {}  # if they are known before the fit
        self._biases = {target.name: bias_of(self._model, target.layer) for target in targets}

    def run(self) -> dict[str, Fitted]:
        """Fit all targets; returns the outcomes by name."""
        if not self._fitter.chooses:
            self._masks = {target.name: self._fitter.mask(target) for target in self._targets}
            for target in self._targets:
                self._weights.mask(target, self._masks[target.name])
        streams, model, step = self._streams, self._model, self._step
        first, states = streams.fitted_on[0], streams.walk.hidden
        levels = levels_of(model, step, self._targets, first, states)
        if streams.restores_blocks and levels:
            levels[-1].closing = all(ranks().gather(is_added(model, step, levels[-1], first, states)))
        fitted = self._uncalled(levels)
        with closing(self._dense_pass(levels)) as dense:
            inputs = LevelInputs(model, step, self._weights, streams.pruned, states, dense, self._biases)
            for place, level in enumerate(levels):
                for part in level.parts(MOMENT_BYTES, MomentSize(self._weighting != "equal")):
                    fitted |= self._fit(part, place, inputs, dense)
        return fitted

    def _uncalled(self, levels: list[Level]) -> dict[str, Fitted]:
        """Prune the targets whose layers the block does not call, although it may use their weights; they are not fitted."""
        called = {target.name for level in levels for target in level.targets}
        left = [target for target in self._targets if target.name not in called]
        for target in left if self._fitter.chooses else ():
            self._weights.mask(target, self._fitter.mask(target))
        return {target.name: Fitted(None, 0) for target in left}

    def _dense_pass(self, levels: list[Level]) -> DenseBlock:
        """Pass all batches through the dense block, which advances their hidden states; returns what its targets saw."""
        streams = self._streams
        block = DenseBlock(levels, streams.walk, self._weighting, self._biases)
        with layer_hooks(self._model, block.layers, block.observe):
            for number, batch in enumerate(streams.walk.batches):
                output = self._step.output(number, streams.walk.hidden)
                block.end_of_batch(number, number in streams.fitted_on)
                streams.walk.hidden.put(number, output)
                streams.walk.bar.update(batch.numel())
        return block

    def _fit(self, level: Level, place: int, inputs: LevelInputs, held: DenseBlock) -> dict[str, Fitted]:
        """Fit the targets of a level, the `place`-th of the block, and measure them on the sequences held out."""
        dense = {target.name: self._weights.dense(target).float() for target in level.targets}
        moments = self._moments(level, inputs.of(level, place, self._streams.fitted_on), held, dense)
        own: dict[str, tuple[Fitted, Tensor]] = {}
        pairs = [(targets, target) for targets in level.inputs.values() for target in targets]
        for targets, target in ranks().part(pairs):
            outcome, mask = self._fitter.fit(
                target, dense[target.name], moments.of(targets, target), self._masks.get(target.name)
            )
            own[target.name] = outcome, mask.cpu()
        fitted = {name: entry for share in ranks().gather(own) for name, entry in share.items()}
        for target in level.targets:
            outcome, mask = fitted[target.name]
            self._weights.mask(target, mask)
            if outcome.weight is not None:
                self._weights.put(target, outcome.weight)
        self._measure(level, inputs.of(level, place, self._streams.held_out), held, dense, fitted)
        return {target.name: fitted[target.name][0] for target in level.targets}

    def _moments(self, level: Level, batches: Iterable[SeenInputs], held: DenseBlock, dense: dict[str, Tensor]) -> LevelMoments:
        """The moments of a level, of all ranks; `dense` holds the dense weights, float32."""
        moments = LevelMoments(self._weighting)
        for seen in batches:
            targets = seen.targets
            if seen.wanted is not None:
                moments.add_wanted(targets[0], seen.pruned, seen.wanted, held.share(seen.number, targets[0]))
            elif seen.dense is not None:
                moments.add(targets, seen.pruned, seen.dense, [held.share(seen.number, target) for target in targets])
            else:
                outputs = [self._wanted(seen, target, dense[target.name], held) for target in targets]
                moments.add(targets, seen.pruned, None, [share for _, share in outputs])
                for target, (each, share) in zip(targets, outputs, strict=True):
                    moments.add_energy(targets, target, energy_of(each, share))
        if not level.routed and not level.closing:
            for target in level.targets:
                moments.add_energy(level.targets, target, held.energy[target.name])
        moments.reduce()
        return moments

    def _wanted(self, seen: SeenInputs, target: Target, weight: Tensor, held: DenseBlock) -> tuple[Tensor, Tensor | None]:
        """The outputs that a target shall return for a batch, without the bias, and the weights of the tokens."""
        if seen.wanted is not None:
            return seen.wanted, held.share(seen.number, target)
        outputs = (seen.pruned if seen.dense is None else seen.dense) @ weight.T
        bias = self._biases[target.name]
        return outputs, token_weights(self._weighting, outputs if bias is None else outputs + bias)

    def _measure(
        self,
        level: Level,
        batches: Iterable[SeenInputs],
        held: DenseBlock,
        dense: dict[str, Tensor],
        fitted: dict[str, tuple[Fitted, Tensor]],
    ) -> None:
        """Set the errors on the sequences held out; `fitted` holds outcomes and masks."""
        sums = {target.name: torch.zeros(3, dtype=torch.float64) for target in level.targets}
        for seen in batches:
            for target in seen.targets:
                weight, (outcome, mask) = dense[target.name], fitted[target.name]
                wanted, share = self._wanted(seen, target, weight, held)
                masked = weight * mask.to(weight.device)
                new = masked if outcome.weight is None else outcome.weight.to(weight.device).float()
                errors = [seen.pruned @ masked.T - wanted, seen.pruned @ new.T - wanted, wanted]
                squares = [error.double().square().sum(1) for error in errors]
                sums[target.name] += torch.stack([(s if share is None else s * share).sum() for s in squares]).cpu()
        shares = ranks().gather(sums)
        for target in level.targets:
            before, after, energy = torch.stack([share[target.name] for share in shares]).sum(0).tolist()
            if energy > 0:
                fitted[target.name][0].held_out_before = before / energy
                fitted[target.name][0].held_out_after = after / energy
