"""Jobs of several processes: how they are started, and how they end."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from emp_llm.cluster.jobs import Job, Needs, Processes, launches
from emp_llm.common.errors import UserError


def job(command: str = "emp-llm calibrate --model m", **needs: Any) -> Job:
    return Job(
        id="norms",
        kind="calibrate",
        command=command,
        output="norms",
        needs=Needs(**needs),
    )


def test_one_process() -> None:
    ((words, environment),) = launches(
        job("emp-llm calibrate --model 'my model'"), environment={"PATH": "/bin"}
    )
    assert words == [sys.executable, "-m", "emp_llm.calibrate", "--model", "my model"]
    assert environment == {"PATH": "/bin"}
    ((_, environment),) = launches(job(gpus=0), environment={})
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}
    ((_, environment),) = launches(
        job(gpus=1), gpus=[1], threads=3, environment={"CUDA_VISIBLE_DEVICES": "4,GPU-7"}
    )
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-7", "OMP_NUM_THREADS": "3"}


def test_several_processes() -> None:
    first, second = launches(job(processes=2, gpus=2), gpus=[0, 3], threads=7, environment={})
    assert first[0] == second[0]
    for number, (_, environment) in enumerate((first, second)):
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("0,3", "3")
        assert [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [
            str(number),
            str(number),
            "2",
        ]
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == (
            "127.0.0.1",
            first[1]["MASTER_PORT"],
        )
    scheduled = launches(job(processes=2), environment={"OMP_NUM_THREADS": "5"})
    assert scheduled[0][1]["OMP_NUM_THREADS"] == "5"
    with pytest.raises(UserError, match="norms has 3 processes and 2 GPUs"):
        launches(job(processes=3, gpus=2), environment={})


RANK = """
import os, signal, sys, time
from pathlib import Path
from emp_llm.cli import _with_exit_codes
from emp_llm.common.errors import UserError

def work(rank):
    if sys.argv[1] == "wait":
        Path(f"new-{rank}").write_text(str(os.getpid()))
        Path(f"new-{rank}").rename(f"rank-{rank}")
        try:
            time.sleep(60)
        finally:
            time.sleep(0.3)
            Path(f"cleaned-{rank}").touch()
    if rank == 1 and sys.argv[1] == "input":
        raise UserError("the file is missing.")
    if rank == 1 and sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0 if sys.argv[1] == "end" else 60)

_with_exit_codes(work)
"""


@dataclass(frozen=True)
class Launcher:
    """A fork that starts the processes of a job."""

    process: Any
    log: Path

    def ended(self) -> tuple[int, list[str]]:
        """The exit code, and the lines of the log."""
        self.process.join(100)
        return self.process.exitcode, self.log.read_text().splitlines()


def start(launched: list[tuple[list[str], dict[str, str]]], folder: Path, log: Path) -> Launcher:
    """Start ranks in a folder."""

    def child() -> None:
        processes = Processes(folder, launched, log)
        signal.signal(signal.SIGTERM, lambda *_: processes.stop())
        code = processes.wait()
        log.write_text(f"{log.read_text()}{processes.cause}\n") if processes.cause else None
        os._exit(code)

    log.touch()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return Launcher(process, log)


@pytest.fixture
def launched(tmp_path: Path) -> Callable[[str], Launcher]:
    """Start two ranks, which import no torch."""
    (tmp_path / "rank.py").write_text(RANK)
    ranks = [environment for _, environment in launches(job(processes=2))]
    return lambda how: start(
        [([sys.executable, "rank.py", how], each) for each in ranks], tmp_path, tmp_path / "log"
    )


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("end", 0, None),
        ("input", 2, "rank 1: error: the file is missing."),
        (
            "kill",
            137,
            "ended by SIGKILL; the machine may have too little memory. The same command "
            "resumes where it stopped.",
        ),
    ],
)
def test_how_ranks_end(
    launched: Callable[[str], Launcher], how: str, code: int, said: str | None
) -> None:
    found, lines = launched(how).ended()
    assert found == code, lines
    assert lines == [] if said is None else any(said in line for line in lines)
    assert not any("Traceback" in line or "torch" in line for line in lines)


@pytest.mark.parametrize("to_all", [False, True])
def test_sigterm_reaches_the_ranks(
    launched: Callable[[str], Launcher], tmp_path: Path, to_all: bool
) -> None:
    """Twice, and also if the scheduler sends it to all processes of a job: the ranks then get it
    again.
    """
    launcher = launched("wait")
    wait_for(lambda: len(list(tmp_path.glob("rank-?"))) == 2)
    ranks = [int(path.read_text()) for path in tmp_path.glob("rank-?")] if to_all else []
    for _ in range(2):
        for pid in (*ranks, launcher.process.pid):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
    code, lines = launcher.ended()
    assert code == 143, lines
    said = "terminated by SIGTERM."
    assert sorted(lines) == [f"rank 1: {said}", said]
    assert len(list(tmp_path.glob("cleaned-?"))) == 2


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)
