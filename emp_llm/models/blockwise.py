"""A causal language model run block by block: each is brought to its device once, and all batches pass through it.

    runner = BlockwiseModel(model)
    for logits in runner.forward(batches): ...       # those of model(batch, use_cache=False), bit for bit

Underneath, for whoever wants to look at blocks or change them while they are at hand:

    with runner.walk(batches) as walk:               # up to the first block; its inputs are kept
        for step in walk.steps():                    # the block's weights are there
            step.run()                               # all batches pass through it
        walk.tail(0)                                 # final norm and head, for one batch
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from emp_llm.models.blocks import body_of, find_blocks
from emp_llm.models.errors import UserError, reason
from emp_llm.models.hidden import HiddenStates, Place, check_place, choose_place
from emp_llm.models.loading import input_device
from emp_llm.models.memory import enough_for_weights, enough_memory, ran_out
from emp_llm.models.ranks import ranks
from emp_llm.models.recording import Call, NotAlone, Pool, check_independence, record, run_tail
from emp_llm.models.residency import Outside, Residents, execution_device


class BlockwiseModel:
    """A model that is run one decoder block at a time.

    Args:
        model: in evaluation mode, on any devices, offloaded or not (as `load_model` gives it).
        blocks: name of the list of decoder blocks; None: found by structure.
        hidden_states: where they are kept between blocks.

    Raises:
        UserError: no blocks are found, or `hidden_states` is no place.
    """

    def __init__(self, model: PreTrainedModel, blocks: str | None = None, hidden_states: Place = "auto") -> None:
        check_place(hidden_states)
        self.model = model
        self.path, self.blocks = find_blocks(model, blocks)
        self.hidden_states = hidden_states
        self.bytes_read = 0  # of offloaded weights
        self._outputs: int | None = None  # what a block returns, as `record` counts it
        self._outside = Outside(model, self.blocks)

    def forward(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The logits of each batch, in order: those of `model(batch, use_cache=False)`.

        Args:
            batches: token ids, int64, shape (sequences, length), lengths may differ.

        Yields:
            Shape (sequences, length, vocabulary), in the model's dtype, on its device.
        """
        with self.walk(batches, "forward") as walk:
            for step in walk.steps():
                step.run()
            for number in range(len(batches)):
                yield walk.tail(number).logits

    def walk(self, batches: Sequence[Tensor], title: str = "blocks") -> "Walk":
        """Run the part before the first block for every batch.

        Raises:
            UserError: there are no batches, or the model's blocks cannot be run one at a time.
        """
        if not batches:
            raise UserError("there are no tokens to run.")
        self.prepare(batches[0])
        return Walk(self, batches, title)

    def prepare(self, batch: Tensor) -> None:
        """Find out, on one batch, how blocks are called, and that they can be run one at a time; `walk` does it too.

        Raises:
            UserError: they cannot, or memory runs out.
        """
        if self._outputs is not None:
            return
        refused: list[Exception] = []
        body = body_of(self.model)
        with enough_memory(self._before_blocks, batch):
            for outputs in range(4):
                try:
                    with torch.no_grad(), self._outside.coming():
                        calls = record(self.blocks, lambda: self._call(batch, body), outputs)[1]
                        check_independence(self.blocks, lambda: self._call(batch, body), outputs, calls)
                except (NotAlone, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                    if ran_out(error):
                        raise
                    refused.append(error)
                    continue
                self._outputs = outputs
                return
        why = next((error for error in refused if isinstance(error, NotAlone)), refused[0])
        raise UserError(
            f"{type(self.model).__name__}: its blocks ({self.path}) cannot be run one at a time: {reason(why)}. Name others "
            "with --blocks PATH, or use --execution model."
        )

    def _before_blocks(self) -> tuple[str, torch.device]:
        return f"{type(self.model).__name__} before its first block", input_device(self.model)

    def _call(self, batch: Tensor, body: nn.Module | None = None) -> Any:
        return (body or self.model)(input_ids=batch.to(input_device(self.model)), use_cache=False)


class Walk:
    """One way through the model for some batches; made by `BlockwiseModel.walk`, to be used as a context.

    Attributes:
        place: where the hidden states are kept.
        device: where the first block runs.
    """

    def __init__(self, runner: BlockwiseModel, batches: Sequence[Tensor], title: str) -> None:
        self.runner = runner
        self.batches = batches
        self._calls: list[list[Call]] = []
        self.device = execution_device(runner.blocks[0])
        tokens = sum(batch.numel() for batch in batches)
        self.bar = tqdm(
            total=tokens * len(runner.blocks), desc=title, unit="tok", unit_scale=True, disable=None if ranks().main else True
        )
        pool = Pool()
        try:
            with torch.no_grad(), runner._outside.coming():
                for number, batch in enumerate(batches):
                    with enough_memory(runner._before_blocks, batch):
                        hidden, calls = self._record(batch)
                    if number == 0:
                        needed = hidden.nbytes * tokens // max(1, batch.numel())
                        self.hidden = HiddenStates(choose_place(runner.hidden_states, needed, self.device))
                    self.hidden.put(number, hidden)
                    self._calls.append(pool.share(calls))
        finally:
            self._release()

    @property
    def place(self) -> Place:
        return self.hidden.place

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        self.hidden.close()
        self.bar.close()
        self._release()

    def steps(self, first: int = 0) -> Iterator["Step"]:
        """The blocks from `first` on, in order, each with its weights on its device while it is at hand."""
        runner = self.runner
        with Residents(list(runner.blocks)[first:]) as residents:
            before = runner.bytes_read
            for index in range(first, len(runner.blocks)):
                with ExitStack() as stack:
                    with enough_for_weights(f"{runner.path}.{index}", execution_device(runner.blocks[index])):
                        block = stack.enter_context(residents.block(index - first))
                    runner.bytes_read = before + residents.bytes_read
                    yield Step(self, index, block)

    def tail(self, number: int, body: nn.Module | None = None) -> Any:
        """The model's output for a batch, once it has passed through all blocks; `body`: run only this part of the model.

        The model's own forward makes it, the blocks left out: norm, head, scaling and soft-capping are its own.
        """
        runner, device, batch = self.runner, execution_device(self.runner.blocks[-1]), self.batches[number]
        behind = f"{type(runner.model).__name__} behind its last block"
        with torch.no_grad(), runner._outside.coming(), enough_memory(lambda: (behind, device), batch):
            # Where the whole model would have it: on the device of the last block.
            final = self.hidden.get(number, device)
            return run_tail(runner.blocks, lambda: runner._call(batch, body), final, runner._outputs or 0)

    def _record(self, batch: Tensor) -> tuple[Tensor, list[Call]]:
        runner = self.runner
        try:
            return record(runner.blocks, lambda: runner._call(batch), runner._outputs or 0)
        except NotAlone as error:
            raise UserError(f"{type(runner.model).__name__}: {error}; use --execution model.") from error

    def _release(self) -> None:
        self.runner.bytes_read += self.runner._outside.bytes_read
        self.runner._outside.bytes_read = 0
        self.runner._outside.release()


class Step:
    """A block at hand.

    Attributes:
        index, name: of the block ("model.layers.3").
        block: the module, its weights on its device.
    """

    def __init__(self, walk: Walk, index: int, block: nn.Module) -> None:
        self.index = index
        self.name = f"{walk.runner.path}.{index}"
        self.block = block
        self._walk = walk

    def run(self, advance: bool = True) -> None:
        """Pass all batches through the block.

        Args:
            advance: what comes out is what goes into the next block; else it is thrown away.

        Raises:
            UserError: memory runs out, or the block returns no hidden states.
        """
        walk, device = self._walk, execution_device(self.block)
        or_else = ", or give --hidden-states cpu" if walk.place == "device" and device.type != "cpu" else ""
        for number, batch in enumerate(walk.batches):
            with torch.no_grad(), enough_memory(lambda: (self.name, device), batch, or_else):
                hidden = walk.hidden.get(number, device)
                call = walk._calls[number][self.index]
                if not advance:  # a block may write into its input and its arguments, and these come again
                    hidden, call = hidden.clone(), call.aside()
                output = self._hidden(call.on(self.block, hidden), hidden)
                if advance:
                    walk.hidden.put(number, output)
                    walk.bar.update(batch.numel())

    def _hidden(self, output: Any, hidden: Tensor) -> Tensor:
        """The hidden states in what the block returned for `hidden`."""
        if isinstance(output, (tuple, list)) and output:
            runner = self._walk.runner
            runner._outputs = runner._outputs or 1
            if runner._outputs > 1 and any(other is not None for other in output[1:]):
                raise UserError(f"{self.name}: it hands more than hidden states on; use --execution model.")
            output = output[0]
        if not isinstance(output, Tensor) or output.shape[-1:] != hidden.shape[-1:]:
            raise UserError(f"{self.name}: it returns no hidden states, so it cannot be run by itself; use --execution model.")
        return output
