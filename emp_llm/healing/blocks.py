"""Healing block by block, for models larger than memory: each pruned block learns the outputs of
the dense block.

    min over the kept weights of a block of sum_t ||f_pruned(xhat_t) - f_dense(x_t)||^2

x are the inputs of the block in the dense model, xhat those in the pruned and healed model. Memory
holds one block with the states of its optimiser, and the hidden states of both models.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import as_tensor
from emp_llm.healing.checks import SEQUENCES
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.modules import weight_of
from emp_llm.options.calibration import Place
from emp_llm.records.run_report import FitRecord, HealingRecord
from emp_llm.walk.checks import held_out
from emp_llm.walk.moved import Moved, MovedWeights, in_stored_dtype
from emp_llm.walk.update import Block

_RATE = 0.01  # at most; only models of a few narrow blocks would have more
_BLOCK = 4.0  # a block that heals alone has the rate of one of so many that heal together


def heal_blocks(
    model: PreTrainedModel,
    targets: Sequence[Target],
    checkpoint: Checkpoint,
    tokens: Tensor,
    moved: MovedWeights,
    steps: int,
    *,
    name_of_blocks: str | None = None,
    hidden_states: Place = "auto",
    seed: int = 0,
) -> HealingRecord:
    """Heal all blocks that `moved` does not hold yet, and put their weights there.

    Args:
        model: dense, on any devices, offloaded or not; unchanged afterwards.
        targets: in the language model's decoder blocks.
        checkpoint: pruned; its zeros stay.
        tokens: the text, int64, shape (sequences, length). One sequence of sixteen is held out: it
            only measures the error.
        moved: of finished blocks.
        steps: of four sequences, for each block.
        name_of_blocks: the list of decoder blocks; None: detected.
        hidden_states: where they are stored between blocks.
        seed: of the order of the sequences.
    """
    runner = BlockwiseModel(model, name_of_blocks, hidden_states)
    held = held_out(len(tokens))
    batches = torch.split(tokens[:-held], SEQUENCES)
    rest = torch.split(tokens[-held:], SEQUENCES)
    fitting = range(len(batches))
    measuring = range(len(batches), len(batches) + len(rest))
    model.requires_grad_(False)
    walks = runner.walk([*batches, *rest], "heal")
    with checkpoint.open_files() as files, walks as walk, closing(walk.second()) as pruned:
        for step in walk.steps():
            members = [target for target in targets if target.name.startswith(f"{step.name}.")]
            block = Block(model, step, members, walk, pruned)
            for target in members:
                stored = target.matrix.stored
                rows = target.matrix.rows
                weight = moved.rows(target, 0, rows)
                if weight is None:
                    weight = as_tensor(
                        target.matrix.read(files.reader(stored.shard), 0, rows), stored.dtype
                    )
                block.change(target, None, weight)
            step.run()  # the dense outputs are now in walk.hidden
            if members and not moved.has(step.index):
                moved.put(step.index, _heal(block, fitting, measuring, steps, seed))
            for number in (*fitting, *measuring):
                block.pass_pruned(number)
    fits = moved.records().values()
    before = sum(fit.held_out_before or 0.0 for fit in fits) / len(fits)
    after = sum(fit.held_out_after or 0.0 for fit in fits) / len(fits)
    return HealingRecord(
        by="blocks",
        steps=steps,
        tokens=steps * SEQUENCES * tokens.shape[1],
        best=steps if after < before else 0,
        curve=[(0, before), (steps, after)],
    )


def rate_of(config: Any, blocks: float | None = None) -> float:
    """Adam's rate at its highest, as a share of the root mean square of a tensor's kept weights.

        min(0.01, 1 / (blocks * sqrt(2 * width)))

    Adam changes each weight by about its rate, and those of a row in step with their inputs. So a
    rate r changes the outputs of a layer with n inputs by about r * sqrt(n) of their size, and
    those of all L blocks by L times that.

    Args:
        config: of the model.
        blocks: that change at a time; None: all.
    """
    text = config.get_text_config()
    return min(_RATE, 1 / ((blocks or text.num_hidden_layers) * math.sqrt(2 * text.hidden_size)))


def rated(weight: Tensor, rate: float) -> dict[str, Any]:
    """A group of an optimiser: a float32 weight, and a rate relative to its kept weights."""
    kept = max(1, int(weight.count_nonzero()))
    return {"params": [weight], "lr": rate * float(weight.detach().norm()) / math.sqrt(kept)}


def _heal(
    block: Block,
    fitting: Sequence[int],
    measuring: Sequence[int],
    steps: int,
    seed: int,
) -> dict[str, Moved]:
    """Train the weights of a block, and return them by target. They stay as they are if the
    held-out error does not fall.
    """
    parameters = {name: block.model.get_parameter(name) for name in block.values}
    before = {name: values.clone() for name, values in block.values.items()}
    masters = {
        name: values.to(torch.float32, copy=True).requires_grad_(True)
        for name, values in block.values.items()
    }
    rate = rate_of(block.model.config, _BLOCK)
    optimizer = torch.optim.Adam(
        [rated(values, rate) for values in masters.values()], betas=(0.9, 0.95)
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * n / steps))
    )

    first = _mean_error(block, measuring)
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        number = int(torch.randint(len(fitting), (), generator=order))
        with block.pruned_weights():
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            _error(block, number).backward()  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items():
                gradient = parameter.grad  # None for an expert that no token of the batch reaches
                masters[name].grad = (
                    None if gradient is None else gradient.float() * (before[name] != 0)
                )
                parameter.requires_grad_(False)
                parameter.grad = None
        optimizer.step()
        schedule.step()
        for name, values in block.values.items():
            values.copy_(masters[name].detach())
    last = _mean_error(block, measuring)
    if not last < first:
        for name, values in block.values.items():
            values.copy_(before[name])
    record = FitRecord(
        tokens=steps * block.walk.batches[0].numel(),
        held_out_before=first,
        held_out_after=min(first, last),
    )
    with block.pruned_weights():
        weights = {
            target.name: weight_of(block.model, target.layer).float().cpu()
            for target in block.targets
        }
    return {
        target.name: Moved(in_stored_dtype(weights[target.name], target).clone(), record)
        for target in block.targets
    }


def _error(block: Block, number: int) -> Tensor:
    """The squared error of a batch's outputs, as a share of the squares of the dense block's. The
    block has its pruned weights.
    """
    walk = block.walk
    wanted = walk.hidden.get(number, walk.device).float()
    entering = block.pruned.get(number, walk.device).clone()
    output = walk.call(number, block.step.index, block.step.block, entering).float()
    return (output - wanted).square().sum() / wanted.square().sum()


def _mean_error(block: Block, numbers: Sequence[int]) -> float:
    """The mean error over some batches."""
    with block.pruned_weights(), torch.no_grad():
        return sum(float(_error(block, number)) for number in numbers) / len(numbers)
