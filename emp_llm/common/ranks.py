"""Ranks: the processes of one job, started by `torchrun` or `accelerate launch`. A single process is rank 0 of 1."""

import atexit
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from emp_llm.lifelines.lifeline import hold_lifeline, lifeline
from emp_llm.lifelines.peer import AGAIN, RankLost

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Ranks wait for each other at the end of their shares, for hours in a long job. If one dies, its lifeline ends the others.
_TIMEOUT = timedelta(weeks=52)
# A lost connection in the words of gloo and NCCL.
_BROKEN = re.compile(r"closed by peer|reset by peer|Broken pipe|remote process exited|ncclRemoteError")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its job.

    Attributes:
        index: of this rank, from 0.
        count: number of ranks.
    """

    index: int
    count: int

    @property
    def main(self) -> bool:
        """Whether this rank writes files and prints messages."""
        return self.index == 0

    @property
    def device(self) -> "torch.device":
        """The device of this rank's model: its accelerator, or the CPU if there is none."""
        import torch

        if self.count == 1:
            return torch.accelerator.current_accelerator() or torch.device("cpu")
        return torch.device(_state().device)

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of the items: every `count`-th."""
        return items[self.index :: self.count]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on all ranks. A collective call.

        Raises:
            RankLost: another rank has ended.
        """
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        with _losses():
            _state()
            distributed.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """The first rank's value, on all ranks. A collective call.

        Raises:
            RankLost: another rank has ended.
        """
        if self.count == 1:
            return value
        from torch import distributed

        values = [value]
        with _losses():
            _state()
            distributed.broadcast_object_list(values, src=0)
        return values[0]


@cache
def ranks() -> Ranks:
    """The ranks of this job.

    They watch each other from the first call. A process joins the group, gloo on CPUs and NCCL on GPUs, at its first collective
    call. So wrong input is reported by every rank, and no rank loses its connection to one that has ended already.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Ranks(0, 1)
    index = int(os.environ.get("RANK") or _state().process_index)
    hold_lifeline(index, count)
    return Ranks(index, count)


@contextmanager
def _losses() -> Iterator[None]:
    """A collective call that breaks because another rank is lost raises RankLost, also if no lifeline says which one."""
    try:
        yield
    except RuntimeError as error:
        line = lifeline()
        loss = line.cause() if line is not None else None
        if loss is None and _BROKEN.search(str(error)):  # it died before its lifeline was connected
            loss = RankLost(f"The connection to another rank is lost: it was killed, or it crashed. {AGAIN}")
        if loss is None:
            raise
        raise loss from error


@cache
def _state() -> Any:
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_TIMEOUT)
    atexit.register(_leave)
    return state


def _leave() -> None:
    from torch import distributed

    line = lifeline()
    if distributed.is_initialized() and (line is None or line.loss is None):  # without the others, NCCL may wait for ever
        distributed.destroy_process_group()
