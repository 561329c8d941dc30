"""How the command of a job is started: one process, several ranks on a node, or ranks on several nodes."""

import os
import sys
from collections.abc import Mapping, Sequence

from emp_llm.cluster.plan_file import Job
from emp_llm.common.errors import UserError, count_of, quotable

RENDEZVOUS = "EMP_LLM_RENDEZVOUS"
NODE = "EMP_LLM_NODE"
_SLURM_NODE = "SLURM_NODEID"


def launch_words(
    job: Job,
    *,
    gpus: Sequence[int] | None = None,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The words and the environment with which this node starts its processes of a job, in the study's folder.

    Args:
        job: of the plan.
        gpus: numbers of the GPUs that the job may use, counted among those that the environment shows; None: as the environment
            says. A job that needs no GPU sees none.
        threads: number of cores for all processes of this node; None: OMP_NUM_THREADS of the environment, or all cores.
        environment: of this process; None: `os.environ`.

    Raises:
        UserError: a job of several nodes does not say which node this is; fewer GPUs than processes.
    """
    environment = os.environ if environment is None else environment
    node, nodes = node_of(job, environment)
    processes = job.needs.processes * (job.needs.nodes // nodes)  # without a rendezvous, all nodes are this machine
    changed = dict(environment) | _visible_gpus(job, processes, gpus, environment) | _threads(processes, threads, environment)
    command = ["-m", f"emp_llm.{job.kind}", *job.arguments[1:]]
    if processes * nodes == 1:
        return [sys.executable, *command], changed
    changed.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns of every address without a name
    words = [sys.executable, "-m", "emp_llm.cluster.running.torchrun", "--nproc-per-node", str(processes)]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--node-rank", str(node), "--rdzv-id", job.id]
        words += ["--rdzv-backend", "static", "--rdzv-endpoint", environment[RENDEZVOUS]]
    return [*words, *command], changed


def node_of(job: Job, environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """The number of this node, from 0, and the number of nodes on which the job runs: (0, 1) if it runs on this one only.

    Raises:
        UserError: EMP_LLM_RENDEZVOUS is not HOST:PORT; the number of the node is missing, or too large.
    """
    environment = os.environ if environment is None else environment
    nodes, meeting = job.needs.nodes, environment.get(RENDEZVOUS, "")
    if nodes == 1 or not meeting:
        return 0, 1
    host, _, port = meeting.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{RENDEZVOUS} {quotable(meeting)} must be HOST:PORT: the first node, and a free port on it.")
    name = NODE if environment.get(NODE) else _SLURM_NODE
    number = environment.get(name, "")
    if not number:
        raise UserError(
            f"{job.id} runs on {count_of(nodes, 'node')}, and this one does not know which it is. Set {NODE} to its number, "
            f"from 0, or unset {RENDEZVOUS} to run all processes here."
        )
    if not number.isdecimal() or int(number) >= nodes:
        raise UserError(
            f"{name} {quotable(number)} must be a number from 0 to {nodes - 1}: {job.id} runs on {count_of(nodes, 'node')}."
        )
    return int(number), nodes


def exit_code_of(returncode: int) -> int:
    """The exit code of a process that Python started: 143 also for one that SIGTERM has killed.

    `emp_llm.cluster.running.torchrun` ends with 143 on SIGTERM, and else with the exit code of the rank that failed first.
    """
    return 128 - returncode if returncode < 0 else returncode


def _visible_gpus(job: Job, processes: int, gpus: Sequence[int] | None, environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES, where it must be set. Each rank takes the GPU with its local number."""
    if job.needs.gpus == 0:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if job.needs.gpus < job.needs.processes:
        raise UserError(
            f"{job.id} has {count_of(job.needs.processes, 'process', 'processes')} and {count_of(job.needs.gpus, 'GPU')} on a "
            "node. Each process holds the whole model on a GPU of its own; change processes or gpus in the plan."
        )
    if gpus is None:
        return {}
    if len(gpus) < processes > 1:
        raise UserError(f"{job.id} needs a GPU for each of {processes} processes here, and has {len(gpus)}.")
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    names = [name.strip() for name in shown.split(",") if name.strip()]
    if any(number >= len(names) for number in gpus):
        raise UserError(f"CUDA_VISIBLE_DEVICES {quotable(shown)} shows {count_of(len(names), 'GPU')}; {job.id} asks for more.")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in gpus)}


def _threads(processes: int, threads: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """OMP_NUM_THREADS, where it must be set: the cores divided among the processes."""
    if threads is None:
        if processes == 1 or environment.get("OMP_NUM_THREADS"):
            return {}
        threads = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, threads // processes))}
