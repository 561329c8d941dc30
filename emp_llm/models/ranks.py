"""Ranks: the processes of one job, as `torchrun` or `accelerate launch` starts them. One process is one rank of one."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Ranks wait for each other at the end of their shares, which on a long job can be hours apart. A rank that dies ends the
# others through its launcher.
_PATIENCE = timedelta(weeks=52)


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its job.

    Attributes:
        index, count: this is rank `index` of `count`.
        device: where this rank's model goes.
    """

    index: int
    count: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.index == 0

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of some items: every `count`-th."""
        return items[self.index :: self.count]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in their order, on all of them. A collective call."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """The first rank's value, on all of them. A collective call."""
        if self.count == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]


@cache
def ranks() -> Ranks:
    """The ranks of this job; the first call of each joins them (gloo on CPUs, NCCL on GPUs)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(0, 1, torch.accelerator.current_accelerator() or torch.device("cpu"))
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=_PATIENCE)
    atexit.register(_leave)
    return Ranks(state.process_index, state.num_processes, torch.device(state.device))


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
