"""A language model run on text, whole or block by block: each block is loaded once, and all batches
pass through it.

    runner = BlockwiseModel(model)
    for logits in runner.forward(batches): ...       # the bits of model(batch, use_cache=False)

The same with access to each block while its weights are loaded:

    with runner.walk(batches) as walk:               # runs the part before the first block
        for step in walk.steps():                    # the block's weights are on its device
            step.run()                               # all batches pass through it
        walk.tail(0)                                 # final norm and head, for one batch

The arguments of every block's call are recorded from the model's own forward pass, in which a
stand-in takes the place of each block and returns its hidden states unchanged. So masks, rotary
embeddings and any other arguments are the model's own, for each block separately (they differ
between Gemma's local and global layers), and no code depends on the family.

Some blocks return more, which the next block takes as an argument (the tokens that GLM's attention
chose). A mark stands for it in the recorded calls, and it is kept beside the hidden states.
"""

import tempfile
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.checkpoint.files import (
    read_exactly,
    room_for,
    tensor_bytes,
    write_exactly,
)
from emp_llm.common.errors import UserError, reason
from emp_llm.common.machine import available_memory, enough_memory, out_of_memory, ran_out
from emp_llm.common.progress import progress_bar
from emp_llm.models.attention import fast_attention
from emp_llm.models.loading import OutsideModules, execution_device, input_device, load_blocks
from emp_llm.models.modules import body_of, find_blocks, find_towers, is_encoder_decoder
from emp_llm.options.shared import Place

NOT_BY_BLOCKS = (
    "{}: an encoder-decoder model has two lists of blocks and cannot run block by block. Use "
    "--execution model, and --propagate dense."
)


def decoder_ids(model: Any, ids: Tensor) -> Tensor:
    """The decoder's token ids for an encoder's, int64, both of shape (sequences, length).

    They are the same text shifted right by one, as in training the model to repeat its input.

    Raises:
        UserError: the model's config names no token to begin with.
    """
    configs = (model.config, model.config.get_text_config(decoder=True))
    names = ("decoder_start_token_id", "bos_token_id")
    values = [getattr(config, name, None) for name in names for config in configs]
    start = next((value for value in values if value is not None), None)
    if start is None:
        raise UserError(
            f"{type(model).__name__}: its config.json has no decoder_start_token_id; add it."
        )
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def run_on_text(model: nn.Module, body: nn.Module, batch: Tensor) -> Any:
    """The output of a model, or of a part of it, for token ids, int64, shape (sequences, length).

    Raises:
        UserError: the model needs other inputs than text, or names no token to begin the decoder's
            text with.
    """
    ids = batch.to(input_device(model))
    others = {"decoder_input_ids": decoder_ids(model, ids)} if is_encoder_decoder(model) else {}
    try:
        with fast_attention(ids.device, getattr(model, "dtype", torch.float32)):
            return body(input_ids=ids, use_cache=False, **others)
    except (TypeError, ValueError, AttributeError) as error:
        if ran_out(error) or isinstance(error, UserError) or not find_towers(model).others:
            raise
        raise UserError(
            f"{type(model).__name__}: it does not run on text alone ({reason(error)}). Use a "
            "magnitude method."
        ) from error


class InseparableError(UserError):
    """The blocks of a model cannot be run one at a time.

    Attributes:
        problem: the reason, as a sentence without its full stop.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"{problem}. Name others with --blocks PATH, or leave out what runs block by block: "
            "--execution blocks, --propagate pruned, an update of the weights (sparsegpt, admm, "
            "--refit), scores of layers and experts by a text, or --heal of a model that does not "
            "fit in memory. --method wanda and magnitude run the model as a whole."
        )
        self.problem = problem


class BlockwiseModel:
    """A model that runs one decoder block at a time.

    Args:
        model: a model in evaluation mode, on any devices, offloaded or not, as of `load_model`.
        blocks: name of the list of decoder blocks; None: detected.
        hidden_states: where they are stored between blocks.

    Attributes:
        path, blocks: name and list of the decoder blocks.
        bytes_read: number of bytes of offloaded weights read so far.
        outside: the offloaded modules outside the blocks.
        outputs: the form of a block's output: 0, a tensor; n, a tuple of n, of which the first is
            the hidden states. None before `prepare`.
        handed_on: the places in this tuple of what the next block takes.
        handed_bytes: its size for a token.

    Raises:
        UserError: no blocks are found, or the model is an encoder-decoder.
    """

    def __init__(
        self, model: PreTrainedModel, blocks: str | None = None, hidden_states: Place = "auto"
    ) -> None:
        if is_encoder_decoder(model):
            raise UserError(NOT_BY_BLOCKS.format(type(model).__name__))
        self.model = model
        self.path, self.blocks = find_blocks(model, blocks)
        self.hidden_states = hidden_states
        self.bytes_read = 0
        self.outside = OutsideModules(model, self.blocks)
        self.outputs: int | None = None
        self.handed_on: tuple[int, ...] = ()
        self.handed_bytes = 0.0

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
        """Run the part before the first block for every batch (at least one); returns the pass, for
        use as a context.

        Raises:
            UserError: the model's blocks cannot be run one at a time.
        """
        self.prepare(batches[0])
        return Walk(self, batches, title)

    def prepare(self, batch: Tensor) -> None:
        """Find the form of a block's output, and whether blocks can run alone, from one batch. The
        first `walk` does this.

        Raises:
            UserError: the blocks cannot be run one at a time, or memory runs out.
        """
        if self.outputs is not None:
            return
        returned = self._first_output(batch)
        outputs = len(returned) if isinstance(returned, (tuple, list)) else 0
        _, calls = self.record(batch, outputs)
        _, others = self.record(batch, outputs, probe=True)
        for index, (one, other) in enumerate(zip(calls, others, strict=True)):
            if not _same((one.args, one.kwargs), (other.args, other.kwargs)):
                raise self._inseparable(
                    f"the arguments of block {index} depend on the outputs of the blocks before it"
                )
        handed = [(index, mark) for index, call in enumerate(calls) for mark in call.marks()]
        for index, mark in handed:
            if mark.block != index - 1:
                raise self._inseparable(f"block {index} takes what block {mark.block} returned")
        self.handed_on = tuple(sorted({mark.place for _, mark in handed}))
        tensors = [returned[place] for place in self.handed_on if returned[place] is not None]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise self._inseparable("they hand on more than tensors")
        self.handed_bytes = sum(tensor.nbytes for tensor in tensors) / batch.numel()
        self.outputs = outputs

    def _first_output(self, batch: Tensor) -> Any:
        """What the first block returns."""
        returned: list[Any] = []

        def see(module: nn.Module, args: Any, output: Any) -> None:
            returned.append(output)
            raise _Enough

        handle = self.blocks[0].register_forward_hook(see)
        try:
            self._run_to_blocks(batch)
        finally:
            handle.remove()
        return returned[0] if returned else None

    def record(
        self, batch: Tensor, outputs: int, probe: bool = False
    ) -> tuple[Tensor, list["Call"]]:
        """The hidden states that enter the first block, and the calls of all blocks.

        Args:
            batch: token ids, int64, shape (sequences, length).
            outputs: the form of a block's output.
            probe: the stand-ins return other hidden states, and the pass runs to the model's end;
                else it ends at the last block.

        Raises:
            UserError: the blocks cannot be run one at a time, or memory runs out.
        """
        calls: list[Call] = []
        entered = returned = torch.empty(0)

        def passed(index: int, hidden: Tensor, call: Call) -> Tensor:
            nonlocal entered, returned
            if index != len(calls):
                raise self._inseparable(
                    f"the model calls block {index} in place of block {len(calls)}"
                )
            if index == 0:
                entered = hidden
            elif hidden is not returned:
                raise self._inseparable(
                    f"the model changes the hidden states between blocks {index - 1} and {index}"
                )
            calls.append(call)
            if not probe and len(calls) == len(self.blocks):
                raise _Enough
            returned = torch.full_like(hidden, 0.5) if probe else hidden
            return returned

        try:
            with _stand_ins(self.blocks, outputs, passed):
                self._run_to_blocks(batch)
        except UserError:
            raise
        # The model uses more than the hidden states.
        except (IndexError, TypeError, AttributeError, ValueError) as error:
            raise self._inseparable(reason(error)) from error
        if len(calls) < len(self.blocks):
            raise self._inseparable(
                f"the model calls only {len(calls)} of its {len(self.blocks)} blocks"
            )
        return entered, calls

    def _run_to_blocks(self, batch: Tensor) -> None:
        """Run the model until `_Enough` is raised in one of its blocks."""
        where = f"{type(self.model).__name__} before its first block"
        memory = enough_memory(lambda: (where, input_device(self.model)), batch)
        with torch.no_grad(), self.outside.loaded_on_call(), memory, suppress(_Enough):
            run_on_text(self.model, body_of(self.model), batch)

    def _inseparable(self, cause: str) -> UserError:
        return InseparableError(
            f"{type(self.model).__name__}: its blocks ({self.path}) cannot be "
            f"run one at a time: {cause}"
        )


class Walk:
    """One pass of batches through the model, block by block. `BlockwiseModel.walk` creates it; use
    it as a context.

    Attributes:
        batches: token ids.
        hidden: the hidden states between two blocks.
        device: the device of the first block.
        bar: the progress bar.
    """

    def __init__(self, runner: BlockwiseModel, batches: Sequence[Tensor], title: str) -> None:
        self.runner = runner
        self.batches = batches
        self._calls: list[list[Call]] = []
        self.device = execution_device(runner.blocks[0])
        self._end = execution_device(runner.blocks[-1])
        self._tokens = sum(batch.numel() for batch in batches)
        self.bar = progress_bar(len(runner.blocks), title, " blocks")
        last: dict[tuple[int, str], Tensor] = {}
        try:
            for number, batch in enumerate(batches):
                hidden, calls = runner.record(batch, runner.outputs or 0)
                if number == 0:
                    of_token = hidden.nbytes / max(1, batch.numel()) + runner.handed_bytes
                    needed = int(of_token * self._tokens)
                    self.hidden = HiddenStates(
                        choose_place(runner.hidden_states, needed, self.device)
                    )
                self.hidden.put(number, hidden)
                self._calls.append(_shared(calls, last))
        except BaseException:
            with suppress(AttributeError):  # before the first batch, there are none
                self.hidden.close()
            self.bar.close()
            raise
        finally:
            runner.bytes_read += runner.outside.release()

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        self.hidden.close()
        self.bar.close()
        self.runner.bytes_read += self.runner.outside.release()

    def second(self) -> "HiddenStates":
        """A copy of the hidden states, for a second stream. They share no memory: a block may
        write into those that it gets.
        """
        copy = HiddenStates(self.hidden.place)
        for number in range(len(self.batches)):
            self.hidden.copy(number, copy, number, self.device)
        return copy

    def store(self, width: int) -> "HiddenStates":
        """A place for features of all tokens, of so many numbers each."""
        size = self._tokens * width * self.hidden.get(0, self.device).element_size()
        return HiddenStates(choose_place(self.runner.hidden_states, size, self.device))

    def advance(self, batch: Tensor) -> None:
        """Show that a batch has passed through a block."""
        self.bar.update(batch.numel() / self._tokens)

    def steps(self, first: int = 0) -> Iterator["Step"]:
        """The blocks from `first` on, in order. The weights of a block stay loaded until the
        next block is requested.
        """
        runner = self.runner
        with closing(load_blocks(list(runner.blocks)[first:])) as loader:
            for index in range(first, len(runner.blocks)):
                step = Step(self, index, runner.blocks[index])
                with out_of_memory(step.no_room):
                    runner.bytes_read += next(loader)
                yield step

    def call(
        self, number: int, index: int, block: nn.Module, hidden: Tensor, handed: "Handed"
    ) -> Tensor:
        """The output of a block whose weights are loaded, for hidden states of a batch and what the
        block before handed on; its arguments stay as they are.
        """
        call = self._calls[number][index].isolated()
        return Step(self, index, block).returned(call, hidden, handed)[0]

    def tail(self, number: int, body: nn.Module | None = None, final: Tensor | None = None) -> Any:
        """The model's output for a batch that has passed through all blocks.

        It comes from the model's own forward pass without the blocks, so norm, head, scaling and
        soft-capping are the model's.

        Args:
            number: the number of the batch.
            body: run only this part of the model.
            final: hidden states that take the place of the batch's; the output then has a gradient
                for them.
        """
        runner = self.runner
        device = self._end
        batch = self.batches[number]
        where = f"{type(runner.model).__name__} after its last block"
        graph = torch.set_grad_enabled(final is not None)
        with graph, runner.outside.loaded_on_call(), enough_memory(lambda: (where, device), batch):
            # On the device of the last block, as in a pass of the whole model.
            leaving = self.hidden.get(number, device) if final is None else final
            last = len(runner.blocks) - 1
            with _stand_ins(
                runner.blocks,
                runner.outputs or 0,
                lambda index, hidden, _: leaving if index == last else hidden,
            ):
                return run_on_text(runner.model, body or runner.model, batch)


class Step:
    """One block of a pass, with its weights loaded.

    Attributes:
        index, name: index and name of the block (3, "model.layers.3").
        block: the module.
    """

    def __init__(self, walk: Walk, index: int, block: nn.Module) -> None:
        self.index = index
        self.name = f"{walk.runner.path}.{index}"
        self.block = block
        self._walk = walk

    def no_room(self) -> str:
        """The message when memory runs out while the weights are loaded."""
        return (
            f"{self.name}: out of memory on {execution_device(self.block)}; the weights do not "
            "fit. Keep fewer there (--device-map disk, or a JSON map), or use --dtype bfloat16."
        )

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
                walk.advance(batch)

    def output(self, number: int, states: "HiddenStates", isolated: bool = True) -> Tensor:
        """The block's output for one batch.

        Args:
            number: the number of the batch.
            states: hold the hidden states that enter the block.
            isolated: leave these and the other arguments as they are; a block may write into them.

        Raises:
            UserError: memory runs out, or the block returns no hidden states.
        """
        walk = self._walk
        device = execution_device(self.block)
        or_else = ", or use --hidden-states cpu" if walk.hidden.place == "device" else ""
        with (
            torch.no_grad(),
            enough_memory(lambda: (self.name, device), walk.batches[number], or_else),
        ):
            hidden = states.get(number, device)
            handed = states.handed(number, device)
            call = walk._calls[number][self.index]
            if isolated:
                hidden = hidden.clone()
                handed = {place: tensor.clone() for place, tensor in handed.items()}
                call = call.isolated()
            output, on = self.returned(call, hidden, handed)
            states.hand_on(number, on)
            return output

    def returned(self, call: "Call", hidden: Tensor, handed: "Handed") -> tuple[Tensor, "Handed"]:
        """The hidden states that the block returns for `hidden`, and what it hands on."""
        output = call.on(self.block, hidden, handed)
        several = output if isinstance(output, (tuple, list)) and output else [output]
        first = several[0]
        if not isinstance(first, Tensor) or first.shape[-1:] != hidden.shape[-1:]:
            raise UserError(
                f"{self.name}: it returns no hidden states, so it cannot be run alone; "
                "use --execution model."
            )
        places = self._walk.runner.handed_on
        return first, {place: several[place] for place in places if several[place] is not None}


# What a block hands on to the next one: place in its output -> tensor.
Handed = dict[int, Tensor]


class HiddenStates:
    """Hidden states between two blocks: numbered tensors, one for each batch, and what the block
    before handed on beside them.

    A new tensor replaces the one with its number.

    Args:
        place: "device", "cpu", or "disk": an unnamed file in the folder for temporary files, which
            disappears on `close`.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        # (number, place in the block's output) -> tensor, or where it is in the file
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self._regions: dict[tuple[int, int], tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        self._places: dict[int, list[int]] = {}  # of what was handed on, by number
        self._returned: tuple[int, Handed] = (-1, {})  # by the last pass
        self._file = tempfile.TemporaryFile(prefix="emp-llm-hidden-") if place == "disk" else None  # noqa: SIM115

    def get(self, number: int, device: torch.device) -> Tensor:
        """The tensor with a number, on a device."""
        return self._get((number, 0), device)

    def handed(self, number: int, device: torch.device) -> Handed:
        """What was handed on beside the tensor with a number, on a device."""
        return {place: self._get((number, place), device) for place in self._places.get(number, ())}

    def hand_on(self, number: int, handed: Handed) -> None:
        """Note what the last pass of a batch returned beside its hidden states: `put` stores both
        together. A pass whose outputs are not put changes nothing.
        """
        self._returned = number, handed

    def put(self, number: int, tensor: Tensor) -> None:
        """Store a tensor under a number, and what the pass handed on that returned it.

        Raises:
            UserError: the disk is full.
        """
        self._put((number, 0), tensor)
        of, handed = self._returned
        if of == number:
            self._returned = (-1, {})
            self._places[number] = list(handed)
            for place, other in handed.items():
                self._put((number, place), other)

    def copy(self, number: int, to: "HiddenStates", as_number: int, device: torch.device) -> None:
        """Copy a tensor, and what was handed on beside it, by way of a device."""
        handed = self.handed(number, device)
        to.hand_on(as_number, {place: tensor.clone() for place, tensor in handed.items()})
        to.put(as_number, self.get(number, device).clone())

    def _get(self, key: tuple[int, int], device: torch.device) -> Tensor:
        if self._file is None:
            return self._tensors[key].to(device)
        offset, shape, dtype = self._regions[key]
        tensor = torch.empty(shape, dtype=dtype)
        read_exactly(self._file.fileno(), tensor_bytes(tensor), offset, Path("hidden states"))
        return tensor.to(device)

    def _put(self, key: tuple[int, int], tensor: Tensor) -> None:
        if self._file is None:
            self._tensors[key] = tensor.cpu() if self.place == "cpu" else tensor
            return
        copy = tensor.contiguous().cpu()
        region = self._regions.get(key)
        if region is None or region[1:] != (copy.shape, copy.dtype):
            region = self._regions[key] = (self._end, copy.shape, copy.dtype)
            self._end += copy.nbytes
        with room_for("the hidden states", "use --hidden-states cpu"):
            write_exactly(self._file.fileno(), tensor_bytes(copy), region[0])

    def off_device(self) -> "HiddenStates":
        """The same tensors in memory or on disk, if they lie on a device."""
        if self.place != "device":
            return self
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        others = HiddenStates(choose_place("auto", size, torch.device("cpu")))
        for key in list(self._tensors):
            others._put(key, self._tensors.pop(key))
        others._places = self._places
        return others

    def close(self) -> None:
        """Free the memory or the file."""
        self._tensors.clear()
        if self._file is not None:
            self._file.close()


def choose_place(wanted: Place, needed: int, device: torch.device) -> Place:
    """Where to store hidden states; for "auto", the nearest place in which they take less than half
    of the free memory.

    Args:
        wanted: the user's choice.
        needed: bytes of the hidden states.
        device: the device of the first block.
    """
    if device.type == "cpu" and wanted == "device":
        return "cpu"
    if wanted != "auto":
        return wanted
    if device.type == "cuda" and 2 * needed < torch.cuda.mem_get_info(device)[0]:
        return "device"
    if 2 * needed >= available_memory():
        return "disk"
    return "device" if device.type == "mps" else "cpu"  # one memory


class _Enough(Exception):
    """Ends a forward pass whose rest is not needed."""


@dataclass(frozen=True)
class _Mark:
    """Stands for what a block returns beside the hidden states.

    Attributes:
        block: its index.
        place: in its output.
    """

    block: int
    place: int


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block, without the hidden states.

    Attributes:
        keyword: the name by which the hidden states are passed; None: they are the first positional
            argument.
        args, kwargs: the other arguments, with marks for what another block handed on.
    """

    keyword: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def marks(self) -> list[_Mark]:
        """The marks among the arguments."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, _Mark)]

    def on(self, block: nn.Module, hidden: Tensor, handed: Handed) -> Any:
        """Call a block with these arguments, and what the block before handed on."""

        def filled(value: Any) -> Any:
            return handed.get(value.place) if isinstance(value, _Mark) else value

        args = [filled(value) for value in self.args]
        kwargs = {name: filled(value) for name, value in self.kwargs.items()}
        with fast_attention(hidden.device, hidden.dtype):
            if self.keyword is None:
                return block(hidden, *args, **kwargs)
            return block(*args, **kwargs, **{self.keyword: hidden})

    def isolated(self) -> "Call":
        """The same call with copies of the containers in which a block may keep state, for a
        pass that must not change it.
        """
        kwargs = {
            name: deepcopy(value) if isinstance(value, MutableMapping | MutableSequence) else value
            for name, value in self.kwargs.items()
        }
        return Call(self.keyword, self.args, kwargs)


@contextmanager
def _stand_ins(
    blocks: nn.ModuleList, outputs: int, passed: Callable[[int, Tensor, Call], Tensor]
) -> Iterator[None]:
    """Replace the forward of every block inside this context, whatever hooks the block has.

    Args:
        blocks: the decoder blocks.
        outputs: the form of a block's output, as in `BlockwiseModel`.
        passed: returns a block's hidden states, given its index, the hidden states that enter it,
            and the other arguments.
    """

    def stand_in(index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = passed(index, *_split(args, kwargs))
        marks = [_Mark(index, place) for place in range(1, outputs)]
        return (hidden, *marks) if outputs else hidden

    before = [vars(block).get("forward") for block in blocks]
    try:
        for index, block in enumerate(blocks):
            block.forward = partial(stand_in, index)
        yield
    finally:
        for block, old in zip(blocks, before, strict=True):
            if old is None:
                vars(block).pop("forward", None)
            else:
                block.forward = old


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """The hidden states (the first argument, or the argument of that name) and the other
    arguments.
    """
    if args and isinstance(args[0], Tensor):
        return args[0], Call(None, args[1:], kwargs)
    hidden = kwargs.get("hidden_states")
    if args or not isinstance(hidden, Tensor):
        raise ValueError(
            "a block's first argument is not a tensor, and none is named hidden_states"
        )
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return hidden, Call("hidden_states", (), others)


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments have equal tensors and plain values; other objects count as equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return one is other or (alike and torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _same(value, other[name]) for name, value in one.items()
        )
    return bool(one == other) if isinstance(one, (bool, int, float, str)) else True


def _shared(calls: list[Call], last: dict[tuple[int, str], Tensor]) -> list[Call]:
    """The calls of one batch, in which tensors equal to those of the batch before are the same
    tensors.

    Args:
        calls: the calls of all blocks.
        last: (block, argument) -> its tensor in an earlier batch; this is updated.
    """

    def pooled(value: Any, index: int, argument: str) -> Any:
        if type(value) is tuple:
            return tuple(pooled(item, index, f"{argument}.{i}") for i, item in enumerate(value))
        if not isinstance(value, Tensor):
            return value  # lists and dictionaries too: blocks may pass state in them
        before = last.get((index, argument))
        shared = last[index, argument] = (
            before if before is not None and _same(before, value) else value
        )
        return shared

    return [
        Call(
            call.keyword,
            pooled(call.args, index, "args"),
            {name: pooled(value, index, name) for name, value in call.kwargs.items()},
        )
        for index, call in enumerate(calls)
    ]
