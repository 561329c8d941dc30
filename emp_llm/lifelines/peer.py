"""One connection between two processes that watch each other, and the loss of the other."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field

SILENT_SECONDS = "EMP_LLM_SILENT_SECONDS"
AGAIN = "The same command goes on from where it stopped."
LOST_CODE = 75  # exit code of a rank that ends because another is gone: EX_TEMPFAIL of sysexits.h
_SILENCE = 30
_RESET = (ConnectionResetError, BrokenPipeError)


class RankLost(BaseException):
    """Another rank of this job is gone. Commands print the message and exit with its code.

    It ends the process, like KeyboardInterrupt: no part of a run can go on without the others.

    Args:
        message: the cause.
        code: exit code of this process.
    """

    def __init__(self, message: str, code: int = LOST_CODE) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Peer:
    """A connection to another process.

    Attributes:
        name: of the other and its host; empty until it has said who it is.
        ended: it has said that it ends.
    """

    connection: socket.socket
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
            raise self.lost(f"has not been heard from for {silence()} s; it or its network is gone. {AGAIN}") from error
        if not news:
            raise self.lost(f"has ended without a message: it was killed, or it crashed. {AGAIN}")
        *lines, self.unread = (self.unread + news)[-8192:].split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def lost(self, what: str) -> RankLost:
        return RankLost(f"{self.name} {what}")

    def say(self, line: str) -> None:
        with suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())

    def hear(self, line: str) -> None:
        """Take in a line.

        Raises:
            RankLost: it tells of one.
        """
        word, _, rest = line.partition(" ")
        code, _, message = rest.partition(" ")
        if word == "lost":
            raise RankLost(message, int(code))
        if word == "failed":  # wrong input is wrong for all; else the same command may succeed
            raise RankLost(f"{self.name} has ended: {message or 'its log gives the cause.'}", 2 if code == "2" else LOST_CODE)
        self.ended = self.ended or word == "done"


def silence() -> int:
    """Seconds without an answer after which a machine is taken to be gone."""
    return int(os.environ.get(SILENT_SECONDS) or _SILENCE)


def kept_alive(connection: socket.socket) -> socket.socket:
    """Let the kernel ask the other side whether it is there, and close the connection when it does not answer for a while."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds, probes = silence(), 4
    between = max(1, seconds // 6)
    options = {
        "TCP_KEEPIDLE": max(1, seconds - probes * between),
        "TCP_KEEPINTVL": between,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": 1000 * seconds,  # also for news under way
    }
    for name, value in options.items():
        if hasattr(socket, name):  # on Linux; elsewhere the system's own times
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
