"""Ranks: the processes of one command, started by torchrun or accelerate. A single process is
rank 0 of 1.
"""

import atexit
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

RESUMES = "The same command resumes where it stopped."
LOST_CODE = 75  # exit code of a rank that ends because another is gone: EX_TEMPFAIL of sysexits.h
SILENT_SECONDS = "EMP_LLM_SILENT_SECONDS"
_DAY = 24 * 3600  # in a long job, ranks wait for each other for hours
_MEETING = timedelta(minutes=10)
# A lost connection, and a silent one, in the words of gloo and NCCL.
_BROKEN = re.compile(
    r"closed by peer|reset by peer|Broken pipe|remote process exited|ncclRemoteError"
)
_SILENT = re.compile(r"Timed out waiting|[Tt]imeout")
_END = "emp_llm/end"  # where the first rank that fails leaves its message for the others
_LETTERS = 1000  # of that message


class RankLost(BaseException):
    """Another rank of this job is gone. Commands print the message and exit with its code.

    It ends the process, like KeyboardInterrupt: no part of a run can continue without the others.

    Args:
        message: the cause.
        code: exit code of this process.
    """

    def __init__(self, message: str, code: int = LOST_CODE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its job.

    Attributes:
        index: the number of this rank, from 0.
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
            # The current one is what torch was built for, also on a machine that has none.
            present = torch.accelerator.is_available()
            accelerator = torch.accelerator.current_accelerator() if present else None
            return accelerator or torch.device("cpu")
        return torch.device(_state().device)

    def assigned(self, items: Sequence[T]) -> Sequence[T]:
        """The items that this rank works on: every `count`-th."""
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
        with rank_losses():
            _state()
            distributed.all_gather_object(values, value)
        return values

    def add_up(self, tensor: "torch.Tensor") -> None:
        """Replace a tensor by the sum of all ranks' tensors, in place. A collective call.

        Raises:
            RankLost: another rank has ended.
        """
        if self.count == 1:
            return
        from torch import distributed

        with rank_losses():
            _state()
            distributed.all_reduce(tensor)

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on all ranks. A collective call.

        Raises:
            RankLost: another rank has ended.
        """
        if self.count == 1:
            return value
        from torch import distributed

        values = [value]
        with rank_losses():
            _state()
            distributed.broadcast_object_list(values, src=0)
        return values[0]

    def first(self, function: Callable[[], T]) -> T:
        """What a function returns on the first rank, on all ranks; no other rank calls it. A
        collective call.

        Raises:
            RankLost: another rank has ended.
        """
        result: T = self.broadcast(function() if self.main else None)
        return result


@cache
def ranks() -> Ranks:
    """The ranks of this job.

    A process joins the others at its first collective call. So every rank reports wrong input
    itself, and loses no connection to a rank that has ended with the same error.
    """
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def rank_losses() -> Iterator[None]:
    """Inside this context, a collective call that fails because another rank is gone raises
    RankLost, with the cause.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not _is_joined() or not (_BROKEN.search(text) or _SILENT.search(text)):
            raise
        atexit.unregister(_leave)
        raise _loss(text) from error


def tell_ranks(code: int, message: str) -> None:
    """Leave the cause of this rank's end for the others, unless another rank has left one."""
    # The loss of another rank is not a cause.
    if _is_joined() and code != LOST_CODE:
        cause = " ".join(message.split())[:_LETTERS]
        with suppress(RuntimeError):  # the store is gone
            _join().compare_set(
                _END,
                "",
                f"{code} rank {ranks().index} on {socket.gethostname()} has ended: {cause}",
            )


def _loss(text: str) -> RankLost:
    """The error of a lost rank: from the text of the collective call's error, and from the cause
    that the rank has left.
    """
    if not _BROKEN.search(text):
        return RankLost(
            f"Another rank has not been heard from for {_patience()} s; it or its "
            f"network is gone. {RESUMES}"
        )
    with suppress(RuntimeError):
        store = _join()
        store.set_timeout(timedelta(seconds=5))
        if store.check([_END]):
            code, _, message = store.get(_END).decode(errors="replace").partition(" ")
            # Wrong input is wrong for all.
            return RankLost(message, 2 if code == "2" else LOST_CODE)
    return RankLost(
        f"The connection to another rank is lost: it was killed, or it crashed. {RESUMES}"
    )


def _patience() -> int:
    """Seconds that a rank waits for another in a collective call."""
    return int(os.environ.get(SILENT_SECONDS) or _DAY)


def _is_joined() -> bool:
    return "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()


@cache
def _join() -> Any:
    """Join the other ranks, and return the store in which they met.

    Objects travel by gloo, also between GPUs: it reports a lost rank as an error, where NCCL aborts
    the process.
    """
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, count = next(rendezvous("env://", timeout=_MEETING))
        patience = timedelta(seconds=_patience())
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=count, timeout=patience
        )
    except distributed.DistError as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise RankLost(f"The ranks did not meet at {address} ({cause}). {RESUMES}") from error
    atexit.register(_leave)
    return store


@cache
def _state() -> Any:
    """accelerate's view of the ranks, which knows the device of each; lm-eval uses it too."""
    import torch
    from accelerate import PartialState

    _join()
    return PartialState(cpu=not torch.accelerator.is_available())


def _leave() -> None:
    if _is_joined():
        from torch import distributed

        distributed.destroy_process_group()
