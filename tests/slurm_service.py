"""A Slurm of its own on loopback for a test: munged, slurmctld, and two slurmd, as Debian packages
them.

Everything lies in a temporary folder: configuration, munge key and socket, state, logs. The
machine's own Slurm, if it has one, is not touched.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
NODES = ("node1", "node2")
_PROGRAMS = (
    "munged",
    "mungekey",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "squeue",
    "scontrol",
    "sinfo",
    "scancel",
)
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Two nodes on one host, with cores and memory that need not exist. Processes are found by /proc, as
# there may be no cgroups. Requeued jobs wait until their credentials expire, by default for two
# minutes, and so does srun after the controller was away.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldDebug=info
SlurmdDebug=info
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
ReturnToService=2
KillWait=2
SlurmctldTimeout=12
MailProg=/bin/true
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=64000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=64000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmMissing(Exception):
    """Slurm is not installed, or its daemons do not come up or do not answer here."""


class Slurm:
    """The daemons, and the commands that ask them.

    Args:
        folder: an empty folder with a short path, as the path of a socket is short.

    Attributes:
        environment: for processes that talk to this Slurm.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = f"{os.environ.get('PATH', '')}:{_SYSTEM}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle; SlurmMissing if they do not get
        so far.
        """
        path = self.environment["PATH"]
        missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
        if missing:
            raise SlurmMissing(
                f"{', '.join(missing)} not installed; the packages are {' '.join(PACKAGES)}"
            )
        user = subprocess.run(
            ["id", "-un"], capture_output=True, text=True, check=True
        ).stdout.strip()
        host = socket.gethostname().partition(".")[0]
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)  # munged refuses a socket that others cannot reach
        with ExitStack() as free:
            sockets = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [each.getsockname()[1] for each in sockets]
        text = _CONFIGURATION.format(
            host=host, folder=self.folder, user=user, ports=ports, nodes=NODES
        )
        (self.folder / "slurm.conf").write_text(text)
        # Snakemake's plugin forgets SLURM_CONF, and its jobs start steps.
        srun = self.folder / "bin" / "srun"
        srun.parent.mkdir()
        conf = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        srun.write_text(f'#!/bin/sh\n{conf} exec {shutil.which("srun", path=path)} "$@"\n')
        srun.chmod(0o755)
        self.environment["PATH"] = f"{srun.parent}:{path}"
        key = self.folder / "munge.key"
        where = self.folder / "munge.socket"
        self.call("mungekey", "--create", f"--keyfile={key}")
        files = (f"--{kind}-file={self.folder}/munged.{kind}" for kind in ("pid", "seed", "log"))
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={where}",
            *files,
        )
        self.wait(where.exists, 10, "munged did not come up")
        self.start_controller()
        for node in NODES:
            self._start(node, "slurmd", "-D", "-N", node)
        self.wait(
            lambda: self.node_states() == dict.fromkeys(NODES, "idle"),
            30,
            "the nodes did not come up",
        )

    def stop(self) -> None:
        """End what still runs: jobs first, then the daemons."""
        with suppress(SlurmMissing):
            if NODES[0] in self._daemons and "slurmctld" not in self._daemons:
                self.start_controller()
            if "slurmctld" in self._daemons:
                self.call("scancel", "--user", str(os.getuid()), check=False)
                self.wait(lambda: not self.queue(), 25, "jobs did not end")
        for name in reversed(self._daemons):
            daemon = self._daemons[name]
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        for folder in Path("/proc").glob("[0-9]*"):  # jobs whose daemon is gone
            with suppress(OSError):
                if f"SLURM_CONF={self.folder}/".encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)

    def call(self, *line: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command of Slurm."""
        how = {"env": self.environment, "stdin": subprocess.DEVNULL, "timeout": 60}
        return subprocess.run(line, capture_output=True, text=True, check=check, **how)

    def node_states(self) -> dict[str, str]:
        """Node -> state, such as "idle", "mixed" or "drained"."""
        found = self.call("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).stdout
        return {
            name: state.rstrip("*") for name, state in (line.split() for line in found.splitlines())
        }

    def queue(self) -> dict[str, str]:
        """Task -> state of all that are queued or run; CalledProcessError if the controller does
        not answer.
        """
        found = self.call("squeue", "--noheader", "--array", "--format=%i %T").stdout
        return dict(line.split() for line in found.splitlines())

    def about(self, task: str) -> dict[str, str]:
        """What the controller knows of one task: "JobState", "Reason", "Restarts", "NodeList"
        ...
        """
        found = self.call("scontrol", "show", "job", task).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", found))

    def drain(self, node: str) -> None:
        """Give a node no more jobs; those that run there go on."""
        self.call("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")

    def resume(self, node: str) -> None:
        """Give a drained node jobs again."""
        self.call("scontrol", "update", f"nodename={node}", "state=resume")

    def kill_controller(self) -> None:
        """End the controller with SIGKILL, when it has saved what it knows by now, as it does
        every few seconds.
        """
        now = time.time()
        files = [self.folder / "state" / name for name in ("job_state", "node_state")]
        self.wait(
            lambda: all(file.exists() and file.stat().st_mtime > now for file in files),
            30,
            "nothing was saved",
        )
        daemon = self._daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def start_controller(self) -> None:
        """Start the controller, from its saved state if there is any, and wait until it answers
        and has found the nodes.
        """
        self._start("slurmctld", "slurmctld", "-D")
        self.wait(
            lambda: self.call("scontrol", "ping", check=False).stdout.count(" is UP"),
            20,
            "slurmctld did not come up",
        )
        if NODES[0] in self._daemons:
            self.wait(
                lambda: "unknown" not in self.node_states().values(),
                30,
                "slurmctld did not find the nodes",
            )

    def wait(self, condition: Callable[[], object], seconds: float, otherwise: str) -> None:
        """Wait until the controller answers and a condition holds.

        Raises:
            SlurmMissing: with the ends of the logs, if a daemon has ended or time is up.
        """
        end = time.monotonic() + seconds
        while True:
            with suppress(subprocess.CalledProcessError):  # the controller does not answer
                if condition():
                    return
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                raise SlurmMissing(f"{f'{ended[0]} ended' if ended else otherwise}:\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        return "\n".join(
            f"{path.name}: {line}"
            for path in sorted(self.folder.glob("*.log"))
            for line in path.read_text().splitlines()[-8:]
        )

    def _start(self, name: str, *line: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                line,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A running Slurm with two nodes; the test is skipped where there is none."""
    service = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        service.start()
    except SlurmMissing as error:
        service.stop()
        pytest.skip(f"no Slurm here: {error}")
    try:
        yield service
    finally:
        service.stop()
