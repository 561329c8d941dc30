"""A connection from every rank to the first, so that a rank that dies, or whose machine or network does, ends the others.

The launchers of a job on several nodes hold such connections as well, because a node may die before its ranks have begun.

The connections carry nothing but the news of an end. The kernels of the machines keep them alive: a process that is busy, or
stopped for a while, answers; a process that was killed closes its connection at once; a machine that is gone is noticed after
half a minute, also by a rank that waits for the others in a collective call.
"""

import atexit
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emp_llm.lifelines.peer import Peer, RankLost, kept_alive, silence

logger = logging.getLogger(__name__)
_PATIENCE = 1 / 6  # of the silence: a process may end by itself meanwhile, as the cause has often reached it in another way
_BLOCKED = 1 / 3  # of the silence: a process that was told to end, and does not, is taken to wait in a collective call
_LETTERS = 1000  # of a message
_CLEANING = 60.0  # seconds in which a rank that was told to end may delete incomplete files


@dataclass(frozen=True)
class Seat:
    """Where a process stands among those that watch each other.

    Attributes:
        noun: what they are: "rank" or "node".
        number: of this process, from 0.
        count: of the processes.
        host, port: of the store in which they meet.
        serves: this process is to provide the store.
    """

    noun: str
    number: int
    count: int
    host: str
    port: int
    serves: bool


class Lifeline:
    """The connections of one process, watched by a thread.

    Args:
        seat: of this process.

    Attributes:
        loss: why this process must end; None: no other is lost.
    """

    def __init__(self, seat: Seat) -> None:
        self.loss: RankLost | None = None
        self._seat = seat
        self._peers: list[Peer] = []
        self._interrupted = False
        self._ending = False
        self._left = False
        self._store: Any = None
        import torch.distributed  # noqa: F401  by this thread: an import by two at a time fails

        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self._close)
        threading.Thread(target=self._run, name="lifeline", daemon=True).start()

    def leave(self, code: int | None = None, message: str = "") -> None:
        """Tell the others that this process ends.

        Args:
            code: exit code; None: 1 if an exception ends this process, else 0.
            message: the cause, if it is not 0.
        """
        if self._left:
            return
        self._left = self._ending = True
        code = int(hasattr(sys, "last_value")) if code is None else code
        for peer in self._peers:
            peer.say(f"failed {code} {_short(message)}" if code else "done")

    def end(self) -> None:
        """Called by the handler of SIGTERM: the main thread ends.

        Raises:
            RankLost: the signal was sent by the lifeline.
        """
        self._ending = True
        if self._interrupted and self.loss is not None:
            raise self.loss

    def cause(self, seconds: float = 3.0) -> RankLost | None:
        """The loss that has broken a collective call, if the news arrives within a time."""
        until = time.monotonic() + seconds
        while self.loss is None and time.monotonic() < until:
            time.sleep(0.05)
        self._ending = self._ending or self.loss is not None
        return self.loss

    def _run(self) -> None:
        try:
            if self._seat.number == 0:
                self._watch_all()
            else:
                self._watch_first()
        except RankLost as loss:
            self._end(loss)
        except Exception as error:  # of the store, or of a socket
            if not self._left:
                logger.debug("the %ss cannot watch each other: %s", self._seat.noun, error)

    def _watch_all(self) -> None:
        """The first: every other one connects to it."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        token = secrets.token_hex(16)
        with (
            socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=128) as door,
            selectors.DefaultSelector() as ready,
        ):
            ready.register(door, selectors.EVENT_READ)
            self._open_store().set(self._key(), f"{door.getsockname()[1]} {token} {self._name()}")
            while not self._left and sum(peer.ended for peer in self._peers) < self._seat.count - 1:
                for key, _ in ready.select(1.0):
                    if key.data is None:
                        connection, _ = door.accept()
                        ready.register(connection, selectors.EVENT_READ, Peer(kept_alive(connection)))
                    elif self._heard(key.data, token):
                        ready.unregister(key.fileobj)

    def _heard(self, peer: Peer, token: str) -> bool:
        """Listen to a peer; returns whether there is nothing more to hear. Other programs may connect as well."""
        try:
            lines = peer.lines()
        except RankLost:
            if not peer.name:
                return True
            raise
        for line in lines:
            if peer.name:
                peer.hear(line)
                continue
            given, _, who = line.partition(" ")
            if not secrets.compare_digest(given.encode(), token.encode()):
                peer.connection.close()
                return True
            peer.name = who
            self._peers.append(peer)
        return peer.ended

    def _watch_first(self) -> None:
        """Every other one: it hears of the others through the first."""
        port, token, name = self._open_store().get(self._key()).decode().split(" ", 2)
        connection = socket.create_connection((self._seat.host, int(port)), timeout=60)
        connection.settimeout(None)
        first = Peer(kept_alive(connection), name)
        first.say(f"{token} {self._name()}")
        self._peers.append(first)
        while not self._left and not first.ended:
            for line in first.lines():
                first.hear(line)

    def _open_store(self) -> Any:
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        seat, ever = self._seat, timedelta(weeks=52)
        self._store = TCPStore(
            seat.host, seat.port, is_master=seat.serves, wait_for_workers=False, multi_tenant=True, timeout=ever
        )
        return self._store

    def _key(self) -> str:
        """Where the first leaves its address in the store."""
        names = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        return "/".join(["emp_llm", self._seat.noun, *names])

    def _name(self) -> str:
        return f"{self._seat.noun} {self._seat.number} on {socket.gethostname()}"

    def _end(self, loss: RankLost) -> None:
        """End this process, if it does not end by itself: in good order, or, while it waits in a collective call, at once."""
        if self._left:
            return
        self.loss = loss
        for peer in self._peers if self._seat.number == 0 else []:
            peer.say(f"lost {loss.code} {loss}")
        if self._wait(lambda: self._left, _PATIENCE * silence()):
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the handler of the command line, or of the user
            self._interrupted = not self._ending
            if self._interrupted:
                os.kill(os.getpid(), signal.SIGTERM)
            if self._wait(lambda: self._ending, _BLOCKED * silence()):
                self._wait(lambda: False, _CLEANING)
        mark = f"{self._seat.noun} {self._seat.number}: " if self._seat.number else ""
        os.write(2, f"{mark}error: {loss}\n".encode())
        tell_launcher(str(loss))
        os._exit(loss.code)

    @staticmethod
    def _wait(done: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            time.sleep(0.1)
        return done()

    def _close(self) -> None:
        """In a fork: let go of the connections, so that they end with the rank and not with the fork."""
        self._left = True
        for peer in self._peers:
            peer.connection.close()


class _Held:
    """The lifeline of this process."""

    line: Lifeline | None = None


def hold_lifeline(rank: int, count: int) -> None:
    """Connect this rank with the others. It returns at once; the process ends if another rank is lost."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if _Held.line is None and host and port.isdecimal():
        provided = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun; else by the first rank
        _Held.line = Lifeline(Seat("rank", rank, count, host, int(port), serves=rank == 0 and not provided))


def lifeline() -> Lifeline | None:
    """The connections of this rank; None for a single process."""
    return _Held.line


def tell_launcher(message: str) -> None:
    """Leave an error message for torchrun, which names the cause of the first failure."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(
                json.dumps({"message": _short(message), "timestamp": str(int(time.time()))}), encoding="utf-8"
            )


def _short(message: str) -> str:
    """A message in one line."""
    return " ".join(message.split())[:_LETTERS]
