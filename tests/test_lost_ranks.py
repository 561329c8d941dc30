"""A rank that dies or fails ends the others with its cause, when they next wait for it; one that
is busy or done does not.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import Launched, launch

from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks

HOST = socket.gethostname()
Work = Callable[[int], None]
Met = Callable[[int, Work], Launched]


@pytest.fixture
def met(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Met:
    """Run ranks that have met."""

    def run(count: int, work: Work) -> Launched:
        def meet(rank: int) -> None:
            ranks().gather(rank)
            work(rank)

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
    assert (
        "error: The connection to another rank is lost: it was killed, or it crashed. The same "
        "command resumes"
    ) in done.error
    assert "Traceback" not in done.error


def test_a_silent_rank_is_taken_to_be_gone(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMP_LLM_SILENT_SECONDS", "2")

    def work(rank: int) -> None:
        if rank == 1:
            time.sleep(5)
        ranks().gather(rank)

    done = met(2, work)
    assert done.codes == [75, 75], done.error
    assert (
        "error: Another rank has not been heard from for 2 s; it or its network is gone. The "
        "same command"
    ) in done.errors[0]


def test_another_error_of_a_collective_call_stays(met: Met) -> None:
    class Stubborn:
        def __reduce__(self) -> str:
            raise RuntimeError("no such device")

    done = met(2, lambda rank: ranks().gather(Stubborn()) if rank else ranks().gather(rank))
    assert done.codes == [75, 1]
    assert "RuntimeError: no such device" in done.error


@pytest.mark.parametrize(
    ("error", "codes", "said"),
    [
        (UserError("the file is missing."), [2, 2], "the file is missing.\n"),
        (
            ValueError("of many lines\n" * 10_000),
            [75, 1],
            "ValueError: of many lines of many lines",
        ),
    ],
    ids=["wrong input", "a long message"],
)
def test_the_failure_of_one_rank_is_told_by_all(
    met: Met, error: Exception, codes: list[int], said: str
) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise error
        ranks().gather(rank)

    done = met(2, work)
    assert done.codes == codes
    assert f"error: rank 1 on {HOST} has ended: {said}" in done.errors[0]
    assert len(done.errors[0]) < 1200
    if codes == [2, 2]:
        assert done.errors[1].endswith("rank 1: error: the file is missing.\n")


def test_ranks_may_end_at_different_times(met: Met) -> None:
    def work(rank: int) -> None:
        time.sleep((0.0, 1.5, 0.5)[rank])

    done = met(3, work)
    assert (done.codes, done.error) == ([0, 0, 0], "")


def test_ranks_end_at_sigterm_where_they_can_resume(met: Met, tmp_path: Path) -> None:
    """Also if a scheduler sends it twice."""

    def work(rank: int) -> None:
        for seconds in (0.2, 0.3):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            time.sleep(60)
        finally:
            time.sleep(0.3)
            (tmp_path / f"cleaned-{rank}").touch()

    done = met(2, work)
    assert done.codes == [143, 143]
    assert done.errors[0] == "terminated by SIGTERM.\n"
    # If the first rank ends first, torch says that its store is gone.
    assert "rank 1: terminated by SIGTERM.\n" in done.errors[1]
    assert "Traceback" not in done.errors[1]
    assert len(list(tmp_path.glob("cleaned-?"))) == 2
