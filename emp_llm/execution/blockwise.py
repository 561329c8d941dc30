"""A causal language model run block by block: each block is loaded once, and all batches pass through it.

    runner = BlockwiseModel(model)
    for logits in runner.forward(batches): ...       # those of model(batch, use_cache=False), bit for bit

The same with access to each block while its weights are loaded:

    with runner.walk(batches) as walk:               # runs the part before the first block
        for step in walk.steps():                    # the block's weights are on its device
            step.run()                               # all batches pass through it
        walk.tail(0)                                 # final norm and head, for one batch
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.architecture.blocks import body_of, find_blocks
from emp_llm.common.errors import UserError, reason
from emp_llm.common.machine import enough_for_weights, enough_memory, ran_out
from emp_llm.common.progress import progress_bar
from emp_llm.execution.block_calls import Call, InseparableBlocks, TensorPool, check_independence, record_calls, run_tail
from emp_llm.execution.hidden_states import HiddenStates, check_place, choose_place
from emp_llm.execution.loading import input_device
from emp_llm.execution.offload import BlockLoader, OutsideModules, execution_device
from emp_llm.execution.text_inputs import NOT_BY_BLOCKS, reads_twice, run_on_text
from emp_llm.options.calibration import Place


class BlockwiseModel:
    """A model that runs one decoder block at a time.

    Args:
        model: in evaluation mode, on any devices, offloaded or not (as `load_model` returns it).
        blocks: name of the list of decoder blocks; None: detected.
        hidden_states: where they are stored between blocks.

    Attributes:
        path, blocks: name and list of the decoder blocks.
        bytes_read: of offloaded weights, so far.

    Raises:
        UserError: no blocks are found, or `hidden_states` is not a place.
    """

    def __init__(self, model: PreTrainedModel, blocks: str | None = None, hidden_states: Place = "auto") -> None:
        check_place(hidden_states)
        if reads_twice(model):
            raise UserError(NOT_BY_BLOCKS.format(type(model).__name__))
        self.model = model
        self.path, self.blocks = find_blocks(model, blocks)
        self.hidden_states = hidden_states
        self.bytes_read = 0
        self._outputs: int | None = None  # the form of a block's output, as for `record_calls`
        self._outside = OutsideModules(model, self.blocks)

    def forward(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The logits of each batch, in order: those of `model(batch, use_cache=False)`.

        Args:
            batches: token ids, int64, shape (sequences, length); lengths may differ.

        Yields:
            Shape (sequences, length, vocabulary), in the model's dtype, on its device.
        """
        with self.walk(batches, "forward") as walk:
            for step in walk.steps():
                step.run()
            for number in range(len(batches)):
                yield walk.tail(number).logits

    def walk(self, batches: Sequence[Tensor], title: str = "blocks") -> "Walk":
        """Run the part before the first block for every batch; returns the pass, for use as a context.

        Raises:
            UserError: there are no batches, or the model's blocks cannot be run one at a time.
        """
        if not batches:
            raise UserError("there are no batches to run; give at least one.")
        self.prepare(batches[0])
        return Walk(self, batches, title)

    def prepare(self, batch: Tensor) -> None:
        """Find out from one batch how the blocks are called. `walk` does this unless it was done before.

        Raises:
            UserError: the blocks cannot be run one at a time, or memory runs out.
        """
        if self._outputs is not None:
            return
        refused: list[Exception] = []
        body = body_of(self.model)
        with enough_memory(self._before_blocks, batch):
            for outputs in range(4):
                try:
                    with torch.no_grad(), self._outside.loaded_on_call():
                        calls = record_calls(self.blocks, lambda: self._call(batch, body), outputs)[1]
                        check_independence(self.blocks, lambda: self._call(batch, body), outputs, calls)
                except (InseparableBlocks, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                    if ran_out(error):
                        raise
                    refused.append(error)
                    continue
                self._outputs = outputs
                return
        cause = next((error for error in refused if isinstance(error, InseparableBlocks)), refused[0])
        if isinstance(cause, RuntimeError):  # the model itself fails, whatever its blocks return
            raise cause
        raise UserError(
            f"{type(self.model).__name__}: its blocks ({self.path}) cannot be run one at a time: {reason(cause)}. Name others "
            "with --blocks PATH, or use --execution model."
        )

    def _before_blocks(self) -> tuple[str, torch.device]:
        return f"{type(self.model).__name__} before its first block", input_device(self.model)

    def _call(self, batch: Tensor, body: nn.Module | None = None) -> Any:
        return run_on_text(self.model, body or self.model, batch)


class Walk:
    """One pass of batches through the model, block by block. `BlockwiseModel.walk` creates it; use it as a context.

    Attributes:
        batches: token ids.
        hidden: the hidden states between two blocks.
        device: of the first block.
        bar: the progress bar.
    """

    def __init__(self, runner: BlockwiseModel, batches: Sequence[Tensor], title: str) -> None:
        self.runner = runner
        self.batches = batches
        self._calls: list[list[Call]] = []
        self.device = execution_device(runner.blocks[0])
        tokens = sum(batch.numel() for batch in batches)
        self.bar = progress_bar(tokens * len(runner.blocks), title, "tok")
        pool = TensorPool()
        try:
            with torch.no_grad(), runner._outside.loaded_on_call():
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
        """Where the hidden states are stored."""
        return self.hidden.place

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        self.hidden.close()
        self.bar.close()
        self._release()

    def steps(self, first: int = 0) -> Iterator["Step"]:
        """The blocks from `first` on, in order. The weights of a block stay loaded until the next block is requested."""
        runner = self.runner
        with BlockLoader(list(runner.blocks)[first:]) as loader:
            before = runner.bytes_read
            for index in range(first, len(runner.blocks)):
                with ExitStack() as stack:
                    with enough_for_weights(f"{runner.path}.{index}", execution_device(runner.blocks[index])):
                        block = stack.enter_context(loader.block(index - first))
                    runner.bytes_read = before + loader.bytes_read
                    yield Step(self, index, block)

    def call(self, number: int, index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        """The output of a block whose weights are loaded, for hidden states of a batch; its arguments stay as they are."""
        step = Step(self, index, block)
        return step._hidden(self._calls[number][index].isolated().on(block, hidden), hidden)

    def tail(self, number: int, body: nn.Module | None = None, final: Tensor | None = None) -> Any:
        """The model's output for a batch that has passed through all blocks.

        It comes from the model's own forward pass without the blocks, so norm, head, scaling and soft-capping are the model's.

        Args:
            number: of the batch.
            body: run only this part of the model.
            final: hidden states that take the place of the batch's; the output then has a gradient for them.
        """
        runner, device, batch = self.runner, execution_device(self.runner.blocks[-1]), self.batches[number]
        where = f"{type(runner.model).__name__} after its last block"
        graph = torch.set_grad_enabled(final is not None)
        with graph, runner._outside.loaded_on_call(), enough_memory(lambda: (where, device), batch):
            # On the device of the last block, as in a pass of the whole model.
            final = self.hidden.get(number, device) if final is None else final
            return run_tail(runner.blocks, lambda: runner._call(batch, body), final, runner._outputs or 0)

    def _record(self, batch: Tensor) -> tuple[Tensor, list[Call]]:
        runner = self.runner
        try:
            return record_calls(runner.blocks, lambda: runner._call(batch), runner._outputs or 0)
        except InseparableBlocks as error:
            raise UserError(f"{type(runner.model).__name__}: {error}; use --execution model.") from error

    def _release(self) -> None:
        self.runner.bytes_read += self.runner._outside.bytes_read
        self.runner._outside.bytes_read = 0
        self.runner._outside.release()


class Step:
    """One block of a pass, with its weights loaded.

    Attributes:
        index, name: of the block (3, "model.layers.3").
        block: the module.
    """

    def __init__(self, walk: Walk, index: int, block: nn.Module) -> None:
        self.index = index
        self.name = f"{walk.runner.path}.{index}"
        self.block = block
        self._walk = walk

    def run(self, advance: bool = True) -> None:
        """Pass all batches through the block.

        Args:
            advance: keep the outputs as the inputs of the next block; else they are discarded.

        Raises:
            UserError: memory runs out, or the block returns no hidden states.
        """
        walk = self._walk
        for number, batch in enumerate(walk.batches):
            output = self.output(number, walk.hidden, isolated=not advance)
            if advance:
                walk.hidden.put(number, output)
                walk.bar.update(batch.numel())

    def output(self, number: int, states: HiddenStates, isolated: bool = True) -> Tensor:
        """The block's output for one batch.

        Args:
            number: of the batch.
            states: hold the hidden states that enter the block.
            isolated: leave these and the other arguments as they are; a block may write into them.

        Raises:
            UserError: as for `run`.
        """
        walk, device = self._walk, execution_device(self.block)
        or_else = ", or use --hidden-states cpu" if walk.place == "device" and device.type != "cpu" else ""
        with torch.no_grad(), enough_memory(lambda: (self.name, device), walk.batches[number], or_else):
            hidden = states.get(number, device)
            call = walk._calls[number][self.index]
            if isolated:
                hidden, call = hidden.clone(), call.isolated()
            return self._hidden(call.on(self.block, hidden), hidden)

    def _hidden(self, output: Any, hidden: Tensor) -> Tensor:
        """The hidden states in what the block returned for `hidden`."""
        if isinstance(output, (tuple, list)) and output:
            runner = self._walk.runner
            runner._outputs = runner._outputs or 1
            if runner._outputs > 1 and any(other is not None for other in output[1:]):
                raise UserError(f"{self.name}: it returns more than hidden states; use --execution model.")
            output = output[0]
        if not isinstance(output, Tensor) or output.shape[-1:] != hidden.shape[-1:]:
            raise UserError(f"{self.name}: it returns no hidden states, so it cannot be run alone; use --execution model.")
        return output
