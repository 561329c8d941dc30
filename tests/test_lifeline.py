"""Ranks watch each other: one that dies ends the others with its name; one that is busy, stopped or done does not."""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import Launched, launch

from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.lifelines.lifeline import Lifeline, lifeline

HOST = socket.gethostname()
Work = Callable[[int], None]
Met = Callable[[int, Work], Launched]


@pytest.fixture
def met(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Met:
    """Run ranks that have met, and that take two seconds of silence for a death."""
    monkeypatch.setenv("EMP_LLM_SILENT_SECONDS", "2")

    def run(count: int, work: Work) -> Launched:
        def meet(rank: int) -> None:
            ranks().gather(rank)
            time.sleep(0.3)  # the threads connect meanwhile
            work(rank)
            line = lifeline()
            assert line is not None
            assert line.loss is None

        return launch(count, tmp_path, tmp_path_factory.mktemp("logs"), work=meet)

    return run


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_is_killed_ends_the_others(met: Met, dead: int) -> None:
    def work(rank: int) -> None:
        if rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks().gather(rank)

    done = met(3, work)
    assert done.codes == [-9 if rank == dead else 75 for rank in range(3)], done.error
    said = f"error: rank {dead} on {HOST} has ended without a message: it was killed, or it crashed. The same command goes on "
    assert [error.count(said) for error in done.errors] == [rank != dead for rank in range(3)]


def test_a_rank_that_works_alone_hears_of_a_death(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMP_LLM_SILENT_SECONDS")  # a death needs no silence, and the others have time to clean up

    def work(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)

    begun = time.monotonic()
    done = met(2, work)
    assert done.codes == [75, -9], done.error
    assert "rank 1 on" in done.errors[0]
    assert done.outputs == ["cleaned up\n", ""]
    assert time.monotonic() - begun < 20


def test_a_rank_that_dies_before_the_lifelines_are_connected_ends_the_others(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lifeline, "_watch_first", lambda _: time.sleep(60))

    def work(rank: int) -> None:
        ranks().gather(rank)
        if rank == 1:
            os._exit(7)
        ranks().gather(rank)

    done = launch(2, tmp_path, tmp_path_factory.mktemp("logs"), work=work)
    assert done.codes == [75, 7]
    assert "error: The connection to another rank is lost: it was killed, or it crashed. The same command" in done.error
    assert "Traceback" not in done.error


def test_another_error_of_a_collective_call_stays(met: Met) -> None:
    class Stubborn:
        def __reduce__(self) -> str:
            raise RuntimeError("no such device")

    done = met(2, lambda rank: ranks().gather(Stubborn()) if rank else ranks().gather(rank))
    assert done.codes == [75, 1]
    assert "RuntimeError: no such device" in done.error


def test_wrong_input_of_one_rank_is_told_by_all(met: Met) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise UserError("the file is missing.")
        ranks().gather(rank)

    done = met(2, work)
    assert done.codes == [2, 2]
    assert done.errors[0].endswith(f"error: rank 1 on {HOST} has ended: the file is missing.\n")
    assert done.errors[1].endswith("rank 1: error: the file is missing.\n")


def test_a_long_message_of_a_failure_is_told_short(met: Met) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("of many lines\n" * 10_000)
        ranks().gather(rank)

    done = met(2, work)
    assert done.codes == [75, 1]
    assert f"error: rank 1 on {HOST} has ended: ValueError: of many lines of many lines" in done.errors[0]
    assert len(done.errors[0]) < 1200


def test_ranks_may_end_at_different_times(met: Met) -> None:
    def work(rank: int) -> None:
        time.sleep((0.0, 2.5, 1.0)[rank])

    done = met(3, work)
    assert (done.codes, done.error) == ([0, 0, 0], "")


def test_a_busy_rank_and_a_stopped_one_are_alive(met: Met) -> None:
    """One holds Python's lock for longer than the silence, the other does not run at all."""

    def work(rank: int) -> None:
        pids = ranks().gather(os.getpid())
        if rank == 0:
            os.kill(pids[2], signal.SIGSTOP)
            ctypes.PyDLL(None).sleep(5)
            os.kill(pids[2], signal.SIGCONT)
        assert ranks().gather(rank) == [0, 1, 2]

    done = met(3, work)
    assert (done.codes, done.error) == ([0, 0, 0], "")


def test_a_stranger_is_not_heard(met: Met) -> None:
    """Another program that connects, says something and leaves."""

    def work(rank: int) -> None:
        from torch.distributed import TCPStore

        store = TCPStore("localhost", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
        port = int(store.get("emp_llm/rank//").split()[0])
        for words in (b"GET / HTTP/1.1\n", b"failed 2 x\n", b"0000 rank 1 on x\nfailed 1 x\n", b"\xff" * 20_000, b""):
            with socket.create_connection(("localhost", port)) as stranger:
                stranger.sendall(words)
        time.sleep(0.5)
        assert ranks().gather(rank) == [0, 1]

    done = met(2, work)
    assert (done.codes, done.error) == ([0, 0], "")
