"""Ranks: the processes of one job, started by `torchrun` or `accelerate launch`. A single process is rank 0 of 1."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Ranks wait for each other at the end of their shares, for hours in a long job. If one dies, the launcher ends the others.
_TIMEOUT = timedelta(weeks=52)


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
        """Every rank's value, in rank order, on all ranks. A collective call."""
        if self.count == 1:
            return [value]
        from torch import distributed

        _state()
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """The first rank's value, on all ranks. A collective call."""
        if self.count == 1:
            return value
        from torch import distributed

        _state()
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]


@cache
def ranks() -> Ranks:
    """The ranks of this job.

    A process joins the group, gloo on CPUs and NCCL on GPUs, at its first collective call. So wrong input is reported by every
    rank, and no rank loses its connection to one that has ended already.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Ranks(0, 1)
    return Ranks(int(os.environ.get("RANK") or _state().process_index), count)


@cache
def _state() -> Any:
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_TIMEOUT)
    atexit.register(_leave)
    return state


def _leave() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
