"""Healing block by block, for models larger than memory: each pruned block learns the outputs of
the dense block.

    min over the kept weights of a block of
        mean_t ||f_pruned(xhat_t) - f_dense(x_t)||^2 / ||f_dense(x_t)||^2

x are the inputs of the block in the dense model, xhat those in the pruned and healed model. The
next block normalises what it gets, so the error of each token is relative: else a few tokens with
huge hidden states would be learned alone. Memory holds one block with the states of its optimiser,
and the hidden states of both models.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import as_tensor
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.ranks import ranks
from emp_llm.healing.adam import Adam, rate_of, share_of_rate
from emp_llm.healing.planning import SEQUENCES, Log
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import execution_device
from emp_llm.models.masks import Masks
from emp_llm.models.modules import weight_of
from emp_llm.options.shared import Place
from emp_llm.records.run_report import FitRecord, HealingRecord
from emp_llm.walk.checks import held_out
from emp_llm.walk.update import Block, token_weights
from emp_llm.walk.updated import Updated, UpdatedWeights, round_to_stored

_BLOCK = 8.0  # a block that heals alone has the rate of one of so many that heal together


def heal_blocks(
    model: PreTrainedModel,
    targets: Sequence[Target],
    checkpoint: Checkpoint,
    tokens: Tensor,
    updated: UpdatedWeights,
    steps: int,
    *,
    at_once: int = SEQUENCES,
    name_of_blocks: str | None = None,
    hidden_states: Place = "auto",
    seed: int = 0,
    log: Log | None = None,
) -> HealingRecord:
    """Heal all blocks that `updated` does not hold yet, and put their weights there. A collective
    call: each rank passes its sequences through the blocks, and the gradients of a step are added
    up.

    Args:
        model: dense, on any devices, offloaded or not; unchanged afterwards.
        targets: in the language model's decoder blocks.
        checkpoint: pruned; its zeros stay.
        tokens: the text, int64, shape (sequences, length). One sequence of sixteen is held out: it
            only measures the error.
        updated: of finished blocks; of the first rank, the others' stay empty.
        steps: of four sequences, for each block.
        at_once: sequences of a pass.
        name_of_blocks: the list of decoder blocks; None: detected.
        hidden_states: where they are stored between blocks.
        seed: of the order of the sequences.
        log: gets the held-out errors of each block, before and after.

    Raises:
        UserError: there are fewer batches than ranks, or outputs of a block are not finite.
    """
    runner = BlockwiseModel(model, name_of_blocks, hidden_states)
    held = held_out(len(tokens))
    if (len(tokens) - held) // at_once < ranks().count:
        raise UserError(
            f"--heal: {count_of(len(tokens) - held, 'sequence')}, {at_once} at a time, are too few "
            f"for {ranks().count} ranks. Give more --samples."
        )
    fitting = _Groups(tokens[:-held], at_once)
    measuring = _Groups(tokens[-held:], at_once, first=len(fitting.batches))
    model.requires_grad_(False)
    walks = runner.walk([*fitting.batches, *measuring.batches], "heal")
    with (
        checkpoint.open_files() as files,
        walks as walk,
        closing(walk.second()) as pruned,
    ):

        def pruned_weight(target: Target) -> Tensor:
            stored = target.matrix.stored
            words = target.matrix.read(files.reader(stored.shard), 0, target.matrix.rows)
            return as_tensor(words, stored.dtype)

        def removed_of(target: Target) -> Tensor:
            return _removed(pruned_weight(target))

        for step in walk.steps():
            members = [target for target in targets if target.name.startswith(f"{step.name}.")]
            block = Block(model, step, members, walk, pruned)
            resumed = partial(updated.resume, step.index, members, removed_of)
            healed = ranks().first(resumed) if members else {}
            for target in members:
                weight = None if healed is None else healed[target.name].weight
                block.change(target, None, pruned_weight(target) if weight is None else weight)
            step.run()  # the dense outputs are now in walk.hidden
            if healed is None:
                trained = _heal(block, fitting, measuring, steps, seed)
                updated.put(step.index, trained)
                for target in members:  # the next blocks read what a resumed run reads
                    rounded = trained[target.name].weight
                    assert rounded is not None
                    block.change(target, None, rounded)
                if log is not None:
                    record = next(iter(trained.values())).record
                    before = record.held_out_before or 0.0
                    after = record.held_out_after or 0.0
                    log({"block/error before": before, "block/error after": after}, step.index)
            for number in range(len(walk.batches)):
                block.pass_pruned(number)
    before, after = ranks().first(partial(_mean_errors, updated))
    return HealingRecord(
        by="blocks",
        steps=steps,
        tokens=steps * SEQUENCES * tokens.shape[1],
        best=steps if after < before else 0,
        curve=[(0, before), (steps, after)],
    )


def _mean_errors(updated: UpdatedWeights) -> tuple[float, float]:
    """The mean held-out errors of all targets, before and after."""
    fits = updated.records().values()
    before = sum(fit.held_out_before or 0.0 for fit in fits) / len(fits)
    after = sum(fit.held_out_after or 0.0 for fit in fits) / len(fits)
    return before, after


class _Groups:
    """Sequences in groups of four, which make a step, and in batches, which make a pass. The
    batches of a group belong to different ranks, as far as there are ranks.

    Args:
        tokens: int64, shape (sequences, length).
        at_once: sequences of a batch.
        first: number of this rank's first batch in its pass.

    Attributes:
        batches: of this rank.
        tokens: number of tokens of each group, over all ranks.
    """

    def __init__(self, tokens: Tensor, at_once: int, first: int = 0) -> None:
        self.batches: list[Tensor] = []
        self.tokens: list[int] = []
        self._numbers: list[list[int]] = []  # those of each group
        dealt = 0
        for group in torch.split(tokens, SEQUENCES):
            self.tokens.append(group.numel())
            own = list[int]()
            for batch in torch.split(group, at_once):
                if dealt % ranks().count == ranks().index:
                    own.append(first + len(self.batches))
                    self.batches.append(batch)
                dealt += 1
            self._numbers.append(own)

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, group: int) -> list[int]:
        """The numbers of this rank's batches of a group."""
        return self._numbers[group]


def _removed(weight: Tensor) -> Tensor:
    """Where no bit of a weight is set; -0.0 is a value like any other."""
    return (weight == 0) & ~weight.signbit()


def _heal(
    block: Block, fitting: _Groups, measuring: _Groups, steps: int, seed: int
) -> dict[str, Updated]:
    """Train the weights of a block, and return them by target. They stay as they are if the
    held-out error does not fall.

    Raises:
        UserError: outputs of the block are not finite.
    """
    parameters = {name: block.model.get_parameter(name) for name in block.values}
    before = {name: values.clone() for name, values in block.values.items()}
    masters = {
        name: nn.Parameter(values.to(torch.float32, copy=True))
        for name, values in block.values.items()
    }
    masks = Masks({name: ~_removed(values) for name, values in before.items()})
    adam = Adam(masters, masks, rate_of(block.model.config, _BLOCK))
    first = _mean_error(block, measuring)
    if not math.isfinite(first):
        raise UserError(
            f"healing: outputs of {block.step.name} are not finite, so nothing can be learned from "
            "them. Values may exceed the dtype; give --dtype float32."
        )
    order = torch.Generator().manual_seed(seed)
    for step in range(steps):
        group = int(torch.randint(len(fitting), (), generator=order))
        adam.share = share_of_rate(step, steps)
        adam.begin()
        with block.pruned_weights():
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            for number in fitting.numbers(group):
                error = _error(block, number) / fitting.tokens[group]
                error.backward()  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    masters[name].grad = parameter.grad.float()
                parameter.requires_grad_(False)
                parameter.grad = None
        adam.end()
        for name, values in block.values.items():
            values.copy_(masters[name].detach())
    adam.finish()
    last = _mean_error(block, measuring)
    if not last < first:
        for name, values in block.values.items():
            values.copy_(before[name])
    record = FitRecord(
        tokens=steps * SEQUENCES * block.walk.batches[0].shape[1],
        held_out_before=first,
        held_out_after=min(first, last),
    )
    with block.pruned_weights():
        weights = {
            target.name: weight_of(block.model, target.layer).float().cpu()
            for target in block.targets
        }
    return {
        target.name: Updated(round_to_stored(weights[target.name], target).clone(), record)
        for target in block.targets
    }


def _error(block: Block, number: int) -> Tensor:
    """The sum over the tokens of a batch of the squared error of the outputs, as a share of the
    dense outputs' squares. The block has its pruned weights.
    """
    walk = block.walk
    device = execution_device(block.step.block)
    wanted = walk.hidden.get(number, device).float()
    entering = block.pruned.get(number, device).clone()
    handed = block.pruned.handed(number, device)
    output = walk.call(number, block.step.index, block.step.block, entering, handed).float()
    squares = (output - wanted).square().sum(-1).flatten()
    return torch.dot(squares, token_weights(wanted.flatten(0, -2)))


def _mean_error(block: Block, groups: _Groups) -> float:
    """The mean of the errors over the tokens of some groups, on all ranks."""
    with block.pruned_weights(), torch.no_grad():
        own = sum(
            float(_error(block, number))
            for group in range(len(groups))
            for number in groups.numbers(group)
        )
    return float(sum(ranks().gather(own))) / sum(groups.tokens)
