"""Jobs of several processes and several nodes: how they are started, how they end, and what
happens when a node dies.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emp_llm.calibrate import calibrate
from emp_llm.calibration.activations import Activations
from emp_llm.cluster.jobs import Job, Needs, Processes, launches, node_of
from emp_llm.common.errors import UserError

DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "model"
SENTENCE = (
    "Another rank has not been heard from for 3 s; it or its network is gone. The same "
    "command resumes where it stopped."
)


def job(command: str = "emp-llm calibrate --model m", **needs: Any) -> Job:
    return Job(
        id="norms",
        kind="calibrate",
        command=command,
        output="norms",
        needs=Needs(memory_gb=1, disk_gb=0, hours=1, **needs),
    )


def test_one_process() -> None:
    ((words, environment),) = launches(
        job("emp-llm calibrate --model 'my model'"), environment={"PATH": "/bin"}
    )
    assert words == [sys.executable, "-m", "emp_llm.calibrate", "--model", "my model"]
    assert environment == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": ""}
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
    here = launches(job(processes=2, nodes=3), environment={"OMP_NUM_THREADS": "5"})
    # All nodes are this machine.
    assert [environment["RANK"] for _, environment in here] == list("012345")
    assert here[0][1]["OMP_NUM_THREADS"] == "5"
    with pytest.raises(UserError, match="norms has 3 processes and 2 GPUs on a node"):
        launches(job(processes=3, gpus=2), environment={})


def test_several_nodes() -> None:
    at = {"EMP_LLM_RENDEZVOUS": "localhost:29500", "SLURM_NODEID": "1"}
    ranks = [
        environment
        for _, environment in launches(job(nodes=2, processes=2, gpus=2), environment=at)
    ]
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in ranks] == [
        ("2", "0", "4"),
        ("3", "1", "4"),
    ]
    assert (ranks[0]["MASTER_ADDR"], ranks[0]["MASTER_PORT"]) == ("localhost", "29500")
    assert ranks[0]["GLOO_SOCKET_IFNAME"] == "lo"
    assert node_of(job(nodes=2), at | {"EMP_LLM_NODE": "0"}) == (0, 2)
    assert node_of(job(nodes=1), at) == (0, 1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {},
            "norms runs on 2 nodes, and SLURM_NODEID is ''. Set EMP_LLM_NODE to the number of "
            "this node, from 0 to 1",
        ),
        ({"EMP_LLM_NODE": "2"}, "norms runs on 2 nodes, and EMP_LLM_NODE is 2. Set"),
        ({"SLURM_NODEID": "first"}, "norms runs on 2 nodes, and SLURM_NODEID is first. Set"),
        (
            {"EMP_LLM_RENDEZVOUS": "first"},
            "EMP_LLM_RENDEZVOUS first must be HOST:PORT: the first node, and a free port on it.",
        ),
        ({"EMP_LLM_RENDEZVOUS": "first:70000"}, "EMP_LLM_RENDEZVOUS first:70000 must be HOST:PORT"),
    ],
)
def test_the_number_of_a_node(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        launches(job(nodes=2), environment={"EMP_LLM_RENDEZVOUS": "first:29500"} | environment)
    assert str(error.value).startswith(message)


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
    """A fork that starts a node's part of a job."""

    process: Any
    log: Path

    def ended(self) -> tuple[int, list[str]]:
        """The exit code, and the lines of the log."""
        self.process.join(100)
        return self.process.exitcode, self.log.read_text().splitlines()


def start(
    launched: list[tuple[list[str], dict[str, str]]],
    folder: Path,
    log: Path,
    space: str | None = None,
) -> Launcher:
    """Start the ranks of a node in a folder and a network namespace."""

    def child() -> None:
        if space is not None:
            with open(f"/run/netns/{space}") as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
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


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable. The first has the address 10.199.77.1."""
    spaces = [f"emp-{os.getpid()}-{number}" for number in range(2)]
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip(
            "link",
            "add",
            "cable",
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            spaces[1],
        )
        for number, space in enumerate(spaces, 1):
            ip("-n", space, "addr", "add", f"10.199.77.{number}/24", "dev", "cable")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "cable", "up")
        yield spaces
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


# The second rank waits in its third block, and the first for it.
WAITING = """
import os, time
from pathlib import Path
from emp_llm.calibration import passes
from emp_llm.cli import main
from emp_llm.models.blockwise import Step

def run(step, *given, run=Step.run, **named):
    if step.index == 2 and os.environ["RANK"] == "1":
        Path("waits").touch()
        time.sleep(4)
    return run(step, *given, **named)

Step.run = run
passes._SECONDS, passes._RATIO = 0.0, 0
main()
"""


def start_nodes(
    spaces: list[str], job: Job, folder: Path, script: Path | None = None
) -> list[Launcher]:
    """Start a job on both nodes; the script takes the place of the command."""
    started = []
    for node, space in enumerate(spaces):
        about = {
            "EMP_LLM_RENDEZVOUS": "10.199.77.1:29571",
            "EMP_LLM_NODE": str(node),
            "EMP_LLM_SILENT_SECONDS": "3",
        }
        ((words, environment),) = launches(
            job, environment=dict(os.environ) | about | {"GLOO_SOCKET_IFNAME": "cable"}
        )
        if script is not None:
            words[1:3] = [str(script), "calibrate"]
        log = folder / f"log-{node}-{script is None}"
        started.append(
            start([(words, environment | {"GLOO_SOCKET_IFNAME": "cable"})], folder, log, space)
        )
    return started


def test_a_node_that_dies(network: list[str], text: Path, tmp_path: Path) -> None:
    """Its cable is cut while the other waits for it. The same command resumes, and gives the
    norms of one process.
    """
    options = (
        f"--model {DEMO} --calibration {text} --samples 4 --seqlen 64 --batch-size 1 "
        "--execution blocks"
    )
    there = job(f"emp-llm calibrate {options} --output norms.safetensors", nodes=2)
    (tmp_path / "waiting.py").write_text(WAITING)
    nodes = start_nodes(network, there, tmp_path, tmp_path / "waiting.py")
    wait_for((tmp_path / "waits").exists)
    ip("-n", network[1], "link", "set", "cable", "down")
    cut = time.monotonic()
    codes, logs = zip(*(node.ended() for node in nodes), strict=True)
    assert time.monotonic() - cut < 60
    assert codes == (75, 75), logs
    assert all(SENTENCE in log[-1] for log in logs), logs
    assert not (tmp_path / "norms.safetensors").exists()
    ip("-n", network[1], "link", "set", "cable", "up")
    nodes = start_nodes(network, there, tmp_path)
    codes, logs = zip(*(node.ended() for node in nodes), strict=True)
    assert codes == (0, 0), logs
    assert any("resumed after block 2 of 6" in line for line in logs[0]), logs
    one = tmp_path / "one.safetensors"
    calibrate(
        DEMO,
        output=one,
        calibration=str(text),
        samples=4,
        seqlen=64,
        batch_size=1,
        execution="blocks",
    )
    several = Activations.load(tmp_path / "norms.safetensors")
    assert several.about.ranks == 2
    replace(several, about=msgspec.structs.replace(several.about, ranks=1)).save(
        tmp_path / "norms.safetensors"
    )
    assert (tmp_path / "norms.safetensors").read_bytes() == one.read_bytes()
