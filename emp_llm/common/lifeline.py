"""A connection from every rank to the first, so that a rank that dies, or whose machine or network does, ends the others.

The connections carry nothing but the news of an end. The kernels of the machines keep them alive: a process that is busy, or
stopped for a while, answers; a process that was killed closes its connection at once; a machine that is gone is noticed after
half a minute, also by a rank that waits for the others in a collective call.
"""

import atexit
import json
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emp_llm.common.errors import LOST_CODE, RankLost

SILENT_SECONDS = "EMP_LLM_SILENT_SECONDS"
JOIN_SECONDS = "EMP_LLM_JOIN_SECONDS"
_SILENCE = 30
_PATIENCE = 5.0  # seconds in which a rank may end by itself: the cause has often reached it in another way
_BLOCKED = 10.0  # seconds after which a rank that was told to end is taken to wait in a collective call
_CLEANING = 60.0  # seconds in which a rank that was told to end may delete incomplete files
_AGAIN = "The same command goes on from where it stopped."
_RESET = (ConnectionResetError, BrokenPipeError)


@dataclass
class _Peer:
    """A connection to another rank.

    Attributes:
        name: of the rank and its host; empty until it has said who it is.
        ended: it has said that it ends, or it was never a rank.
    """

    connection: socket.socket
    rank: int = -1
    name: str = ""
    ended: bool = False
    unread: bytes = field(default=b"", repr=False)

    def lines(self) -> list[str]:
        """What the peer has said since the last call.

        Raises:
            RankLost: the connection is gone, and the peer has not said that it ends.
        """
        try:
            news = self.connection.recv(4096)
        except _RESET:
            news = b""
        except OSError as error:
            raise self.lost(f"has not been heard from for {_silence()} s; it or its network is gone. {_AGAIN}") from error
        if not news:
            raise self.lost(f"has ended without a message: it was killed, or it crashed. {_AGAIN}")
        *lines, self.unread = (self.unread + news)[-8192:].split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def lost(self, what: str) -> RankLost:
        return RankLost(f"{self.name} {what}")

    def say(self, line: str) -> None:
        with suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())


class Lifeline:
    """The connections of one rank, watched by a thread.

    Args:
        rank: of this process.
        count: of ranks.

    Attributes:
        loss: why this process must end; None: no rank is lost.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.loss: RankLost | None = None
        self._interrupted = False
        self._ending = False
        self._rank = rank
        self._count = count
        self._limit = float(os.environ[JOIN_SECONDS]) if os.environ.get(JOIN_SECONDS) else None
        self._peers: list[_Peer] = []
        self._left = False
        self._store: Any = None
        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self._close)
        threading.Thread(target=self._run, name="lifeline", daemon=True).start()

    def leave(self, failed: bool | None = None) -> None:
        """Tell the others that this rank ends.

        Args:
            failed: the others cannot go on; None: if an exception ends this process.
        """
        if self._left:
            return
        self._left = self._ending = True
        failed = hasattr(sys, "last_value") if failed is None else failed
        for peer in self._peers:
            peer.say("failed" if failed else "done")

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
            if self._rank == 0:
                self._watch_all()
            else:
                self._watch_first()
        except RankLost as loss:
            self._end(loss)
        except Exception as error:  # of the store, or of a socket: the ranks cannot watch each other
            if self._limit is not None:
                self._end(RankLost(f"this rank cannot reach rank 0 ({error}); the nodes must reach each other on all ports."))

    def _watch_all(self) -> None:
        """The first rank: every other one connects to it."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        token, begun = secrets.token_hex(16), time.monotonic()
        with (
            socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=128) as door,
            selectors.DefaultSelector() as ready,
        ):
            ready.register(door, selectors.EVENT_READ)
            self._open_store().set(_key(), f"{door.getsockname()[1]} {token} {socket.gethostname()}")
            while not self._left and (self._missing() or not all(peer.ended for peer in self._peers)):
                self._check_start(begun)
                for key, _ in ready.select(1.0):
                    if key.data is None:
                        connection, _ = door.accept()
                        ready.register(connection, selectors.EVENT_READ, _Peer(_kept_alive(connection)))
                    elif self._heard(key.data, token):
                        ready.unregister(key.fileobj)

    def _heard(self, peer: _Peer, token: str) -> bool:
        """Listen to a rank; returns whether there is nothing more to hear. Other programs may connect as well."""
        try:
            lines = peer.lines()
        except RankLost:
            if not peer.name:
                return True
            raise
        for line in lines:
            if peer.name:
                _hear(peer, line)
                continue
            given, _, who = line.partition(" ")
            rank, _, host = who.partition(" ")
            if not secrets.compare_digest(given.encode(), token.encode()) or not rank.isdecimal():
                peer.connection.close()
                return True
            peer.rank, peer.name = int(rank), f"rank {rank} on {host}"
            self._peers.append(peer)
        return peer.ended

    def _missing(self) -> list[int]:
        return sorted(set(range(1, self._count)) - {peer.rank for peer in self._peers})

    def _check_start(self, begun: float) -> None:
        missing = self._missing()
        if missing and self._limit is not None and time.monotonic() - begun > self._limit:
            raise RankLost(f"rank {missing[0]} has not started within {self._limit:.0f} s; its log may say why. {_AGAIN}")

    def _watch_first(self) -> None:
        """Every other rank: it hears of the others through the first."""
        port, token, host = self._open_store().get(_key()).decode().split(" ", 2)
        connection = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), timeout=60)
        connection.settimeout(None)
        first = _Peer(_kept_alive(connection), 0, f"rank 0 on {host}")
        first.say(f"{token} {self._rank} {socket.gethostname()}")
        self._peers.append(first)
        while not self._left and not first.ended:
            for line in first.lines():
                _hear(first, line)

    def _open_store(self) -> Any:
        """The store in which the ranks meet. Under torchrun the launcher provides it, else the first rank does."""
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        provided = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=self._rank == 0 and not provided,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(weeks=1) if self._limit is None else timedelta(seconds=self._limit),
        )
        return self._store

    def _end(self, loss: RankLost) -> None:
        """End this process, if it does not end by itself: in good order, or, while it waits in a collective call, at once."""
        if self._left:
            return
        self.loss = loss
        for peer in self._peers if self._rank == 0 else []:
            peer.say(f"lost {loss}")
        if self._wait(lambda: self._left, _PATIENCE):
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the handler of the command line, or of the user
            self._interrupted = not self._ending
            if self._interrupted:
                os.kill(os.getpid(), signal.SIGTERM)
            if self._wait(lambda: self._ending, _BLOCKED):
                self._wait(lambda: False, _CLEANING)
        mark = f"rank {self._rank}: " if self._rank else ""
        os.write(2, f"{mark}error: {loss}\n".encode())
        tell_launcher(str(loss))
        os._exit(LOST_CODE)

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
    if _Held.line is None:
        _Held.line = Lifeline(rank, count)


def lifeline() -> Lifeline | None:
    """The connections of this rank; None for a single process."""
    return _Held.line


def tell_launcher(message: str) -> None:
    """Leave an error message for torchrun, which names the cause of the first failure."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message, "timestamp": str(int(time.time()))}), encoding="utf-8")


def _hear(peer: _Peer, line: str) -> None:
    """News from a peer."""
    word, _, rest = line.partition(" ")
    if word == "lost":
        raise RankLost(rest)
    if word == "failed":
        raise peer.lost("has ended with an error; its message gives the cause.")
    peer.ended = True


def _key() -> str:
    """Where the first rank leaves its address in the store."""
    return "/".join(["emp_llm", *(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))])


def _silence() -> int:
    return int(os.environ.get(SILENT_SECONDS) or _SILENCE)


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Let the kernel ask the other side whether it is there, and close the connection when it does not answer for a while."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence, probes = _silence(), 4
    between = max(1, silence // 6)
    options = {
        "TCP_KEEPIDLE": max(1, silence - probes * between),
        "TCP_KEEPINTVL": between,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": 1000 * silence,  # also for news under way
    }
    for name, value in options.items():
        if hasattr(socket, name):  # on Linux; elsewhere the system's own times
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
