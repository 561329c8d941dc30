"""The refit of one block: level by level, on the inputs that the fitted levels before it give."""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emp_llm.architecture.layers import Layer
from emp_llm.architecture.model_layers import bias_of
from emp_llm.architecture.targets import Target
from emp_llm.common.ranks import ranks
from emp_llm.execution.blockwise import Step, Walk
from emp_llm.execution.hidden_states import HiddenStates
from emp_llm.execution.layer_hooks import layer_hooks
from emp_llm.options.refit import Weighting
from emp_llm.refit.block_weights import BlockWeights
from emp_llm.refit.dense_block import DenseBlock
from emp_llm.refit.fitters import Fitted, Fitter
from emp_llm.refit.level_moments import LevelMoments, energy_of, token_weights
from emp_llm.refit.levels import Level, MomentSize, levels_of

MOMENT_BYTES = 2 << 30  # of the moments in memory at a time, unless a single input needs more


_SAME = 0.01  # rounding of bfloat16, relative


class _AllSeen(Exception):
    """All inputs of a level are seen; the rest of the block's pass is not needed."""


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
        streams = self._streams
        levels = levels_of(self._model, self._step, self._targets, streams.fitted_on[0], streams.walk.hidden)
        if streams.restores_blocks and levels:
            levels[-1].closing = all(ranks().gather(self._is_added(levels[-1])))
        fitted = self._uncalled(levels)
        with closing(self._dense_pass(levels)) as dense:
            for number, level in enumerate(levels):
                for part in level.parts(MOMENT_BYTES, MomentSize(self._weighting != "equal")):
                    fitted |= self._fit(part, dense, number)
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

    def _fit(self, level: Level, held: DenseBlock, place: int) -> dict[str, Fitted]:
        moments = LevelMoments(self._weighting)
        dense = {target.name: self._weights.dense(target).float() for target in level.targets}
        for number, leader, pruned, inputs in self._inputs(level, held, place, self._streams.fitted_on):
            targets = level.inputs[leader]
            if level.closing:
                assert inputs is not None
                moments.add_wanted(targets[0], pruned, inputs, held.share(number, targets[0]))
                continue
            if inputs is not None:
                moments.add(targets, pruned, inputs, [held.share(number, target) for target in targets])
                continue
            outputs = [pruned @ dense[target.name].T for target in targets]
            shares = [token_weights(self._weighting, each) for each in outputs]
            moments.add(targets, pruned, None, shares)
            for target, each, share in zip(targets, outputs, shares, strict=True):
                moments.add_energy(targets, target, energy_of(each, share))
        if not level.routed and not level.closing:
            for target in level.targets:
                moments.add_energy(level.targets, target, held.energy[target.name])
        moments.reduce()
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
        outcomes = {name: outcome for name, (outcome, _) in fitted.items()}
        held_out = self._inputs(level, held, place, self._streams.held_out)
        self._measure(level, held, held_out, dense, outcomes, {name: mask for name, (_, mask) in fitted.items()})
        return {target.name: outcomes[target.name] for target in level.targets}

    def _measure(
        self,
        level: Level,
        held: DenseBlock,
        held_out: "Inputs",
        dense: dict[str, Tensor],
        fitted: dict[str, Fitted],
        masks: dict[str, Tensor],
    ) -> None:
        """Set the errors on the sequences held out."""
        sums = {target.name: torch.zeros(3, dtype=torch.float64) for target in level.targets}
        for number, leader, pruned, inputs in held_out:
            for target in level.inputs[leader]:
                weight, outcome = dense[target.name], fitted[target.name]
                if level.closing and inputs is not None:
                    wanted, share = inputs, held.share(number, target)
                else:
                    wanted = (pruned if inputs is None else inputs) @ weight.T
                    bias = self._biases[target.name]
                    share = token_weights(self._weighting, wanted if bias is None else wanted + bias)
                masked = weight * masks[target.name].to(weight.device)
                new = masked if outcome.weight is None else outcome.weight.to(weight.device).float()
                errors = [pruned @ masked.T - wanted, pruned @ new.T - wanted, wanted]
                squares = [error.double().square().sum(1) for error in errors]
                sums[target.name] += torch.stack([(s if share is None else s * share).sum() for s in squares]).cpu()
        shares = ranks().gather(sums)
        for target in level.targets:
            before, after, energy = torch.stack([share[target.name] for share in shares]).sum(0).tolist()
            if energy > 0:
                fitted[target.name].held_out_before = before / energy
                fitted[target.name].held_out_after = after / energy

    def _inputs(self, level: Level, held: DenseBlock, place: int, numbers: Sequence[int]) -> "Inputs":
        """Pass batches through the pruned block as far as a level.

        Args:
            held: the inputs in the dense model; `place` is the number of the level there.
            numbers: of the batches.
        """
        leaders = [targets[0].layer for targets in level.inputs.values()]
        member = {target.name: leader for leader, targets in level.inputs.items() for target in targets}
        seen: dict[str, list[Tensor]] = {}

        def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
            flat = inputs.detach().reshape(-1, inputs.shape[-1])
            seen.setdefault(member[layers[0].name], []).append(flat.to(torch.float32, copy=True))
            if not level.routed and len(seen) == len(leaders):
                raise _AllSeen

        if level.closing:
            yield from self._wanted(level, numbers)
            return
        with layer_hooks(self._model, leaders, observe):
            for number in numbers:
                with self._weights.pruned(), suppress(_AllSeen):
                    self._step.output(number, self._streams.pruned)
                pruned, seen = seen, {}
                for leader, parts in pruned.items():
                    inputs = torch.cat(parts)
                    yield number, leader, inputs, None if level.routed else held.inputs(number, place, inputs.device)

    def _wanted(self, level: Level, numbers: Sequence[int]) -> "Inputs":
        """As `_inputs` for the closing level, with the outputs that its target shall return in place of the dense inputs.

        Added to what the rest of the pruned block returns, they are the outputs of the dense block.
        """
        (leader,) = level.inputs
        target, seen = level.inputs[leader][0], list[tuple[Tensor, Tensor]]()
        bias = self._biases[leader]

        def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
            copies = [each.detach().flatten(0, -2).to(torch.float32, copy=True) for each in (inputs, outputs)]
            seen.append((copies[0], copies[1]))  # the block may write into them

        with layer_hooks(self._model, [target.layer], observe):
            for number in numbers:
                with self._weights.pruned():
                    output = self._step.output(number, self._streams.pruned)
                ((inputs, own),) = seen
                seen.clear()
                dense = self._streams.walk.hidden.get(number, output.device)
                wanted = (dense.float() - output.float()).flatten(0, -2) + own
                yield number, leader, inputs, wanted if bias is None else wanted - bias.float()

    def _is_added(self, level: Level) -> bool:
        """Whether a level is one layer, called once, whose output is added to the block's as it is."""
        if level.routed or len(level.targets) != 1:
            return False
        target, calls = level.targets[0], list[Tensor]()
        number, states = self._streams.fitted_on[0], self._streams.walk.hidden
        before = self._step.output(number, states)
        if target.matrix.rows != before.shape[-1]:
            return False
        generator = torch.Generator().manual_seed(0)
        scale = float(before.float().std())
        change = (scale * torch.randn(before.shape, generator=generator)).to(before.device, before.dtype)

        def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
            calls.append(output)
            return output + change.view(output.shape)

        handle = self._model.get_submodule(target.layer.name).register_forward_hook(add)
        try:
            after = self._step.output(number, states)
        except RuntimeError:  # another shape
            return False
        finally:
            handle.remove()
        difference = after.float() - before.float() - change.float()
        return len(calls) == 1 and float(difference.norm()) <= _SAME * float(change.float().norm())


# (number of the batch, name of the first target, inputs in the pruned model, inputs in the dense model), for each batch.
# The inputs are float32, shape (tokens, inputs). Experts have no inputs in the dense model: other tokens may be routed to them
# there.
Inputs = Iterator[tuple[int, str, Tensor, Tensor | None]]
