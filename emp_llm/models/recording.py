"""What every block is called with, learnt from the model's own forward pass with the blocks left out.

Each block is replaced by a stand-in that notes its arguments and hands its hidden states on as they are. So masks, rotary
embeddings and whatever else a model passes to a block are the model's own, for each block by itself (they differ in
Gemma's local and global layers), and no family has to be known by name.
"""

from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]


class NotAlone(Exception):
    """The model does something between its blocks, so that they cannot be run one at a time; says what."""


class _LastBlock(Exception):
    """The forward pass has reached the last block, and is not needed any further."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block, the hidden states left out.

    Attributes:
        keyword: the name under which the hidden states are given; None: they come first.
        args, kwargs: the others.
    """

    keyword: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, block: nn.Module, hidden: Tensor) -> Any:
        """Call a block with these arguments."""
        if self.keyword is None:
            return block(hidden, *self.args, **self.kwargs)
        return block(*self.args, **self.kwargs, **{self.keyword: hidden})

    def aside(self) -> "Call":
        """The same call with copies of what a block may note its state in, for a pass that shall leave no trace."""
        kwargs = {n: deepcopy(v) if isinstance(v, (MutableMapping, MutableSequence)) else v for n, v in self.kwargs.items()}
        return Call(self.keyword, self.args, kwargs)


class Pool:
    """Tensors that many calls share, kept once: within a batch by identity, from one batch to the next by value."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], Tensor] = {}

    def share(self, calls: list[Call]) -> list[Call]:
        """The calls of one batch, with tensors replaced by equal ones that are kept already."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def kept(value: Any, slot: tuple[int, str]) -> Any:
            if isinstance(value, tuple) and type(value) is tuple:
                return tuple(kept(item, (slot[0], f"{slot[1]}.{i}")) for i, item in enumerate(value))
            if not isinstance(value, Tensor):
                return value  # also lists and dictionaries: blocks may pass state on in them
            if id(value) not in seen:
                last = self._last.get(slot)
                same = last is not None and _same(last, value)
                seen[id(value)] = (value, last if same and last is not None else value)
            shared = self._last[slot] = seen[id(value)][1]
            return shared

        return [
            Call(
                call.keyword,
                kept(call.args, (index, "args")),
                {name: kept(value, (index, name)) for name, value in call.kwargs.items()},
            )
            for index, call in enumerate(calls)
        ]


def record(blocks: nn.ModuleList, run: Callable[[], Any], outputs: int) -> tuple[Tensor, list[Call]]:
    """The hidden states that enter the first block, and the calls of all blocks.

    Args:
        blocks: the model's decoder blocks.
        run: runs the model on one batch.
        outputs: what a block returns: 0, a tensor; n, a tuple of n that begins with the hidden states, as before
            transformers 5, and holds nothing else of use.

    Raises:
        NotAlone: blocks are not called once each in order, or the model changes the hidden states between them.
    """
    return _record(blocks, run, outputs, lambda hidden: hidden, stop=True)


def check_independence(blocks: nn.ModuleList, run: Callable[[], Any], outputs: int, calls: list[Call]) -> None:
    """Record again with other hidden states and to the end; NotAlone where a block is called otherwise then, or again."""
    _, others = _record(blocks, run, outputs, lambda hidden: torch.full_like(hidden, 0.5), stop=False)
    for index, (one, other) in enumerate(zip(calls, others, strict=True)):
        if not _same((one.args, one.kwargs), (other.args, other.kwargs)):
            raise NotAlone(f"what block {index} is called with depends on what the blocks before it compute")


@contextmanager
def standing_in(blocks: nn.ModuleList, forward: Callable[[int], Forward]) -> Iterator[None]:
    """Replace the forward of every block by `forward(index)`, whatever hooks are on it."""
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
    """What the model makes of the hidden states that leave its last block: its own forward, the blocks left out."""

    def forward(index: int) -> Forward:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            hidden = final if index == len(blocks) - 1 else _split(args, kwargs)[0]
            return _as_output(hidden, outputs)

        return stand_in

    with standing_in(blocks, forward):
        return run()


def _record(
    blocks: nn.ModuleList, run: Callable[[], Any], outputs: int, compute: Callable[[Tensor], Tensor], stop: bool
) -> tuple[Tensor, list[Call]]:
    calls: list[Call] = []
    first: list[Tensor] = []
    returned: list[Tensor] = []

    def forward(index: int) -> Forward:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if index != len(calls):
                raise NotAlone(f"block {index} is called when it is the turn of block {len(calls)}")
            hidden, call = _split(args, kwargs)
            if returned and hidden is not returned[-1]:
                raise NotAlone(f"the model changes the hidden states between blocks {index - 1} and {index}")
            if not first:
                first.append(hidden)
            calls.append(call)
            if stop and len(calls) == len(blocks):
                raise _LastBlock
            returned[:] = [compute(hidden)]
            return _as_output(returned[0], outputs)

        return stand_in

    with standing_in(blocks, forward), suppress(_LastBlock):
        run()
    if len(calls) < len(blocks):
        raise NotAlone(f"only {len(calls)} of its {len(blocks)} blocks are called")
    return first[0], calls


def _as_output(hidden: Tensor, outputs: int) -> Any:
    return (hidden, *[None] * (outputs - 1)) if outputs else hidden


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """The hidden states (the first argument, else the one of that name) and the other arguments."""
    if args and isinstance(args[0], Tensor):
        return args[0], Call(None, args[1:], kwargs)
    hidden = kwargs.get("hidden_states")
    if args or not isinstance(hidden, Tensor):
        raise NotAlone("a block's first argument is not a tensor, and none is called hidden_states")
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return hidden, Call("hidden_states", (), others)


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are alike in their tensors and plain values; other objects count as alike."""
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
