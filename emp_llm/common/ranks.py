"""Ranks: the processes of one command, started by torchrun or accelerate. A single process is
rank 0 of 1.

A script may have a process group of its own before it calls the library. Its ranks are the ranks
then: the group is joined, neither started nor ended, and its errors stay as they are. Functions on
a model in memory make no collective calls (`alone`), so that one process may call them.
"""

import atexit
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import ref

from emp_llm.common.errors import UserError, quotable

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)

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
_MEET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what ranks need, to meet
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


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
        """The device of this rank's model: its accelerator, or the CPU if there is none. In a
        command's job it becomes the current device.
        """
        import torch

        if self.count == 1:
            return _accelerator() or torch.device("cpu")
        device = _device_of_rank()
        if device.type != "cpu" and (_is_own() or not _is_joined()):
            torch.accelerator.set_device_index(device)
        return device

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
            distributed.all_gather_object(values, value, group=_group())
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
            distributed.all_reduce(tensor, group=_group_of(tensor))

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
            distributed.broadcast_object_list(values, src=0, group=_group())
        return values[0]

    def first(self, function: Callable[[], T]) -> T:
        """What a function returns on the first rank, on all ranks; no other rank calls it. A
        collective call.

        Raises:
            RankLost: another rank has ended.
        """
        result: T = self.broadcast(function() if self.main else None)
        return result


def ranks() -> Ranks:
    """The ranks that share the work: those of this job, or this process alone inside `alone`."""
    return Ranks(0, 1) if _Joined.alone else ranks_of_job()


def check_one_process(what: str) -> None:
    """Raise UserError in a job of several processes, for what runs in one."""
    if ranks().count > 1:
        raise UserError(
            f"{what} runs in one process. Start it without torchrun; --device-map spreads a large "
            "model over devices."
        )


def ranks_of_job() -> Ranks:
    """The ranks of this job: those of the process group, if there is one; else those that meet at
    the first collective call, by the variables of torchrun.

    So every rank reports wrong input itself, and loses no connection to a rank that has ended with
    the same error.

    Raises:
        UserError: a variable is wrong.
    """
    if _is_joined():
        distributed = sys.modules["torch.distributed"]
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    found, missing = _by_variables()
    if missing:
        _warn_of_leftovers(missing)
    return found


def start_job() -> Ranks:
    """The ranks of a command's job. If variables are left over from another job, they are removed,
    so that no other package reads them.
    """
    found = ranks_of_job()
    if not all(map(os.environ.get, _MEET)):
        for name in (*_MEET[:2], *_LOCAL):
            os.environ.pop(name, None)
    return found


@contextmanager
def alone() -> Iterator[None]:
    """Inside this context, this process does the whole work and makes no collective call: for
    functions that a script may call in one of its processes, or in each with another model.
    """
    _Joined.alone.append(None)
    try:
        yield
    finally:
        _Joined.alone.pop()


def device_alone() -> str | None:
    """The device map of a model that one process of several works on alone: its own GPU. None for
    a single process, which may use all.
    """
    return None if ranks_of_job().count == 1 else str(_device_of_rank())


@contextmanager
def rank_losses() -> Iterator[None]:
    """Inside this context, a collective call that fails because another rank is gone raises
    RankLost, with the cause. Errors in the process group of a script stay as they are.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not _is_own() or not (_BROKEN.search(text) or _SILENT.search(text)):
            raise
        atexit.unregister(_leave)
        raise _loss(text) from error


def tell_ranks(code: int, message: str) -> None:
    """Leave the cause of this rank's end for the others, unless another rank has left one."""
    # The loss of another rank is not a cause.
    if _is_own() and code != LOST_CODE:
        cause = " ".join(message.split())[:_LETTERS]
        with suppress(RuntimeError):  # the store is gone
            _Joined.store.compare_set(
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
        store = _Joined.store
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
    return _whole(SILENT_SECONDS, _DAY, 1)


def _whole(name: str, default: int, minimum: int = 0) -> int:
    """The whole number that a variable of the environment holds.

    Raises:
        UserError: it holds something else, or less than the minimum.
    """
    text = os.environ.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise UserError(
            f"the environment variable {name} is {quotable(text)!r}; it must be a whole number of "
            f"at least {minimum}. Unset it, or correct it."
        )
    return int(text)


def _by_variables() -> tuple[Ranks, list[str]]:
    """Ranks by torchrun's variables; and the missing ones, if only some are set: then one rank.

    Raises:
        UserError: a variable is wrong.
    """
    index = _whole("RANK", 0)
    count = _whole("WORLD_SIZE", 1, 1)
    if os.environ.get("LOCAL_RANK") != "-1":  # accelerate's word for none
        _whole("LOCAL_RANK", 0)
    if "WORLD_SIZE" in os.environ and index >= count:
        raise UserError(
            f"RANK is {index} and WORLD_SIZE is {count}, but ranks count from 0 to {count - 1}. "
            "Start the processes with torchrun, or unset both variables."
        )
    missing = [name for name in _MEET if not os.environ.get(name)]
    if missing and (index, count) != (0, 1):
        return Ranks(0, 1), missing
    return Ranks(index, count), []


@cache
def _warn(message: str) -> None:
    """Log a warning once in a process."""
    logger.warning("warning: %s", message)


def _warn_of_leftovers(missing: Sequence[str]) -> None:
    found = " and ".join(f"{name}={os.environ[name]}" for name in _MEET[:2] if name in os.environ)
    _warn(
        f"{found} without {' and '.join(missing)}: this process runs alone. Start several with "
        "torchrun, or unset what is left over."
    )


class _Joined:
    """What this process knows of the process group of its job. It keeps no group alive: one that
    outlives its end may abort the process.

    Attributes:
        world: torch's default group, as a weak reference, which the others are of.
        store: in which the ranks met; None: a script started the group.
        objects: the group in which objects travel between the ranks, as a weak reference; the
            default group, if emp-llm started it.
        alone: an entry for each context of `alone`.
    """

    world: Callable[[], Any] = staticmethod(lambda: None)
    store: Any = None
    objects: Callable[[], Any] = staticmethod(lambda: None)
    alone: ClassVar[list[None]] = []


def _is_joined() -> bool:
    return "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()


def _is_own() -> bool:
    """Whether there is a process group, and emp-llm started it."""
    return _is_joined() and _is_known() and _Joined.store is not None


def _is_known() -> bool:
    return sys.modules["torch.distributed"].group.WORLD is _Joined.world()


def _group() -> Any:
    """The process group in which objects travel between the ranks: it joins them first.

    Objects travel by gloo, also between GPUs: it reports a lost rank as an error, where NCCL aborts
    the process. In the group of a script, which may have no gloo, they get a group of their own.

    Raises:
        UserError: torch has no gloo; or a script's other processes do not come.
    """
    from torch import distributed

    if not _is_joined():
        _join()
    if not _is_known():
        if not distributed.is_gloo_available():
            raise UserError(
                "The processes exchange their sums by gloo, and this torch is built without it. "
                "Call emp-llm in one process, before init_process_group."
            )
        patience = timedelta(seconds=_patience())
        try:
            meeting = distributed.new_group(backend="gloo", timeout=_MEETING)  # waits for all ranks
            distributed.destroy_process_group(meeting)
        except RuntimeError as error:
            raise UserError(
                f"Of the {distributed.get_world_size()} processes of this script, one did not call "
                f"the same function of emp-llm within {_MEETING.seconds // 60} minutes. A command "
                "shares its work among all of them: call it in each, or in a script of one "
                "process. Only masks_of, and prune_model without healing, may be called in one "
                "of several."
            ) from error
        _Joined.objects = ref(distributed.new_group(backend="gloo", timeout=patience))
        _Joined.world = ref(distributed.group.WORLD)
        _Joined.store = None
        atexit.register(_leave)
    return _Joined.objects()


def _group_of(tensor: "torch.Tensor") -> Any:
    """The group that carries a tensor: the default group if it has a backend for its device."""
    from torch import distributed

    objects = _group()
    if _is_own() or f"{tensor.device.type}:" in distributed.get_backend_config():
        return None
    return objects  # gloo carries tensors of GPUs too


def _join() -> None:
    """Start the process group of this job's ranks."""
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    # NCCL refuses two ranks on one GPU.
    own_gpus = torch.cuda.device_count() >= _whole("LOCAL_WORLD_SIZE", 1, 1)
    by_nccl = torch.cuda.is_available() and own_gpus and distributed.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if by_nccl else "gloo"
    patience = timedelta(seconds=_patience())
    try:
        store, rank, count = next(rendezvous("env://", timeout=_MEETING))
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=count, timeout=patience
        )
    except distributed.DistError as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise RankLost(f"The ranks did not meet at {address} ({cause}). {RESUMES}") from error
    _Joined.world = _Joined.objects = ref(distributed.group.WORLD)
    _Joined.store = store
    atexit.register(_leave)


def _accelerator() -> "torch.device | None":
    """The kind of accelerator of this machine; None if it has none."""
    import torch

    # The current one is what torch was built for, also on a machine that has none.
    present = torch.accelerator.is_available()
    return torch.accelerator.current_accelerator() if present else None


def _device_of_rank() -> "torch.device":
    """The accelerator of this one of several ranks: by its number on this machine, as accelerate
    chooses it, or the current one; the CPU if there is none.
    """
    import torch

    accelerator = _accelerator()
    if accelerator is None:
        return torch.device("cpu")
    if not os.environ.get("LOCAL_RANK"):
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    index = _whole("LOCAL_RANK", 0) % torch.accelerator.device_count()
    return torch.device(accelerator.type, index)


def _leave() -> None:
    """End the groups that emp-llm started, while the interpreter still runs."""
    objects = _Joined.objects()
    if objects is not None and _is_joined() and _is_known():
        from torch import distributed

        _Joined.store = None
        distributed.destroy_process_group(objects)
