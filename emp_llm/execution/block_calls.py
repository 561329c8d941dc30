"""The arguments of every block's call, recorded from the model's own forward pass with the blocks left out.

Each block is replaced by a stand-in that records its arguments and returns its hidden states unchanged. So masks, rotary
embeddings and any other arguments are the model's own, for each block separately (they differ between Gemma's local and global
layers), and no code depends on the family.
"""

from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]


class InseparableBlocks(Exception):
    """The blocks of a model cannot be run one at a time; the message gives the reason."""


class _LastBlock(Exception):
    """The forward pass has reached the last block; the rest of it is not needed."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block, without the hidden states.

    Attributes:
        keyword: the name by which the hidden states are passed; None: they are the first positional argument.
        args, kwargs: the other arguments.
    """

    keyword: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, block: nn.Module, hidden: Tensor) -> Any:
        """Call a block with these arguments."""
        if self.keyword is None:
            return block(hidden, *self.args, **self.kwargs)
        return block(*self.args, **self.kwargs, **{self.keyword: hidden})

    def isolated(self) -> "Call":
        """The same call with copies of the containers in which a block may keep state, for a pass that must not change it."""
        kwargs = {n: deepcopy(v) if isinstance(v, (MutableMapping, MutableSequence)) else v for n, v in self.kwargs.items()}
        return Call(self.keyword, self.args, kwargs)


class TensorPool:
    """Stores a tensor that many calls share only once: found by identity within a batch, by value between batches."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], Tensor] = {}

    def share(self, calls: list[Call]) -> list[Call]:
        """The calls of one batch, with tensors replaced by equal ones of the pool."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def pooled(value: Any, slot: tuple[int, str]) -> Any:
            if isinstance(value, tuple) and type(value) is tuple:
                return tuple(pooled(item, (slot[0], f"{slot[1]}.{i}")) for i, item in enumerate(value))
            if not isinstance(value, Tensor):
                return value  # lists and dictionaries too: blocks may pass state in them
            if id(value) not in seen:
                last = self._last.get(slot)
                equal = last is not None and _same(last, value)
                seen[id(value)] = (value, last if equal and last is not None else value)
            shared = self._last[slot] = seen[id(value)][1]
            return shared

        return [
            Call(
                call.keyword,
                pooled(call.args, (index, "args")),
                {name: pooled(value, (index, name)) for name, value in call.kwargs.items()},
            )
            for index, call in enumerate(calls)
        ]


def record_calls(blocks: nn.ModuleList, run: Callable[[], Any], outputs: int) -> tuple[Tensor, list[Call]]:
    """The hidden states that enter the first block, and the calls of all blocks.

    Args:
        blocks: the model's decoder blocks.
        run: runs the model on one batch.
        outputs: the form of a block's output: 0, a tensor; n, a tuple of n whose first element is the hidden states and whose
            other elements are None, as before transformers 5.

    Raises:
        InseparableBlocks: the blocks are not called once each in order, or the model changes the hidden states between them.
    """
    return _record(blocks, run, outputs, lambda hidden: hidden, stop=True)


def check_independence(blocks: nn.ModuleList, run: Callable[[], Any], outputs: int, calls: list[Call]) -> None:
    """Run the model once more, with other hidden states and to its end, and compare the calls.

    Raises:
        InseparableBlocks: a block's other arguments depend on the hidden states, or a block is called again later.
    """
    _, others = _record(blocks, run, outputs, lambda hidden: torch.full_like(hidden, 0.5), stop=False)
    for index, (one, other) in enumerate(zip(calls, others, strict=True)):
        if not _same((one.args, one.kwargs), (other.args, other.kwargs)):
            raise InseparableBlocks(f"the arguments of block {index} depend on the outputs of the blocks before it")


@contextmanager
def replaced_forwards(blocks: nn.ModuleList, forward: Callable[[int], Forward]) -> Iterator[None]:
    """Replace the forward of every block by `forward(index)` inside this context, whatever hooks the block has."""
    before = [vars(block).get("forward") for block in blocks]
    try:
        for index, block in enumerate(blocks):
            block.forward = forward(index)
        yield
    finally:
        for block, old in zip(blocks, before, strict=True):
            if old is None:
                vars(block).pop("forward", None)
            else:
                block.forward = old


def run_tail(blocks: nn.ModuleList, run: Callable[[], Any], final: Tensor, outputs: int) -> Any:
    """The model's output for the hidden states `final` of its last block: its own forward pass without the blocks."""

    def forward(index: int) -> Forward:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            hidden = final if index == len(blocks) - 1 else _split(args, kwargs)[0]
            return _as_output(hidden, outputs)

        return stand_in

    with replaced_forwards(blocks, forward):
        return run()


def _record(
    blocks: nn.ModuleList, run: Callable[[], Any], outputs: int, compute: Callable[[Tensor], Tensor], stop: bool
) -> tuple[Tensor, list[Call]]:
    """As `record_calls`; `compute` returns a block's output for its hidden states; `stop`: end the pass at the last block."""
    calls: list[Call] = []
    first: list[Tensor] = []
    returned: list[Tensor] = []

    def forward(index: int) -> Forward:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if index != len(calls):
                raise InseparableBlocks(f"the model calls block {index} in place of block {len(calls)}")
            hidden, call = _split(args, kwargs)
            if returned and hidden is not returned[-1]:
                raise InseparableBlocks(f"the model changes the hidden states between blocks {index - 1} and {index}")
            if not first:
                first.append(hidden)
            calls.append(call)
            if stop and len(calls) == len(blocks):
                raise _LastBlock
            returned[:] = [compute(hidden)]
            return _as_output(returned[0], outputs)

        return stand_in

    with replaced_forwards(blocks, forward), suppress(_LastBlock):
        run()
    if len(calls) < len(blocks):
        raise InseparableBlocks(f"the model calls only {len(calls)} of its {len(blocks)} blocks")
    return first[0], calls


def _as_output(hidden: Tensor, outputs: int) -> Any:
    return (hidden, *[None] * (outputs - 1)) if outputs else hidden


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """The hidden states (the first argument, or the argument of that name) and the other arguments."""
    if args and isinstance(args[0], Tensor):
        return args[0], Call(None, args[1:], kwargs)
    hidden = kwargs.get("hidden_states")
    if args or not isinstance(hidden, Tensor):
        raise InseparableBlocks("a block's first argument is not a tensor, and none is named hidden_states")
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return hidden, Call("hidden_states", (), others)


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments have equal tensors and plain values; other objects count as equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one is other:
            return True
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return alike and bool(torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    return bool(one == other) if isinstance(one, (bool, int, float, str)) else True
