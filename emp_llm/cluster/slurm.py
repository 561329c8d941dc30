"""Studies on Slurm: jobs grouped into arrays, their scripts, sbatch and squeue."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from emp_llm.cluster.plan_file import Job, Needs
from emp_llm.cluster.site import Site
from emp_llm.common.errors import UserError, count_of, printable
from emp_llm.common.paths import data_folder

FOLDER_NAME = "slurm"  # in the study
# Needs are rounded up to these steps, so that jobs with almost equal needs share an array.
_MINUTES = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 960, 1440, 2160, 2880, 4320)
_MEBIBYTE = 2**20
_ANSWER_SECONDS = 300  # for a command of Slurm
# Variables of the login node that tasks get. No other goes to Slurm, because any might hold a secret.
EXPORTED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "MODULEPATH", "PYTHONPATH"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "EMP_LLM_CACHE"),
    "SLURM_CONF",
)
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")


# Arrays.


@dataclass(frozen=True)
class Request:
    """What each task of an array asks for.

    Attributes:
        nodes: their number.
        cpus, gpus, megabytes: of each node; a megabyte is 2**20 bytes, as Slurm has it.
        minutes: time limit.
    """

    nodes: int
    cpus: int
    gpus: int
    megabytes: int
    minutes: int

    def __str__(self) -> str:
        gpus = f"{count_of(self.gpus, 'GPU')}, " if self.gpus else ""
        nodes = f"{self.nodes} nodes with " if self.nodes > 1 else ""
        gigabytes = self.megabytes * _MEBIBYTE / 1e9
        hours = f"{self.minutes // 60}:{self.minutes % 60:02d}"
        return f"{nodes}{gpus}{count_of(self.cpus, 'core')}, {gigabytes:.3g} GB, {hours} h"


@dataclass(frozen=True)
class JobArray:
    """An array of tasks: the jobs of one kind, depth and request.

    Attributes:
        name: unique in the study.
        request: of each task.
        jobs: index of the task -> its job.
        after: arrays that come first, by their names or their numbers in Slurm.
        task_by_task: each task waits only for the task of the same index in the one array that comes first. Otherwise it waits
            for all tasks, and refuses to begin if a job that it needs has failed.
    """

    name: str
    request: Request
    jobs: dict[int, Job]
    after: tuple[str, ...] = ()
    task_by_task: bool = False

    @property
    def indices(self) -> str:
        """The indices for sbatch: "0-3,7"."""
        runs = []
        for _, members in groupby(enumerate(sorted(self.jobs)), lambda place: place[1] - place[0]):
            run = [index for _, index in members]
            runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        return ",".join(runs)


def request_of(needs: Needs, site: Site) -> Request:
    """What a job asks of a site, whose largest node it fits; its needs are rounded up: memory to 1, 1.5, 2, 3, 4, 6 ... GB."""
    power = 2 ** math.floor(math.log2(max(1.0, needs.memory_gb)))
    gigabytes = next(size for size in (power, 1.5 * power, 2 * power) if size >= needs.memory_gb)
    megabytes = math.ceil(gigabytes * 1e9 / _MEBIBYTE)
    if site.largest_node is not None:
        megabytes = min(megabytes, int(site.largest_node.memory_gb * 1e9 / _MEBIBYTE))
    least, most = math.ceil(site.min_hours * 60), max(1, int(site.max_hours * 60))
    wanted = math.ceil(needs.hours * 60 + site.signal_seconds / 60)
    minutes = next((step for step in _MINUTES if step >= wanted), wanted)
    return Request(needs.nodes, site.cpus * needs.processes, needs.gpus, megabytes, min(max(minutes, least), most))


def check_fits(jobs: Sequence[Job], site: Site, path: Path) -> None:
    """Raise UserError if a job needs more than the largest node has of a site, whose file is at `path`."""
    node = site.largest_node
    if node is None:
        return
    held = (node.cpus, node.memory_gb, node.gpus, node.gpu_gb)
    for job in jobs:
        needs = job.needs
        wanted = (site.cpus * needs.processes, needs.memory_gb, needs.gpus, needs.gpu_gb if needs.gpus else 0.0)
        if any(need > most for need, most in zip(wanted, held, strict=True)):
            raise UserError(
                f"{job.id} needs {_size(*wanted)} on a node, and the largest node of {path} has {_size(*held)}. Plan with "
                "needs that fit (a smaller model, fewer processes, --gpu-gb), or correct largest_node."
            )


def _size(cpus: int, memory_gb: float, gpus: int, gpu_gb: float) -> str:
    of_gpus = f" and {count_of(gpus, 'GPU')} of {gpu_gb:.3g} GB" if gpus else ""
    return f"{count_of(cpus, 'core')}, {memory_gb:.3g} GB{of_gpus}"


def grouped_jobs(jobs: Sequence[Job], site: Site, queued: Mapping[str, str], first: int) -> list[JobArray]:
    """The arrays for jobs, in an order in which they can be submitted: one for each kind, depth and request.

    Args:
        jobs: that are neither done nor queued, those that come first before the others.
        queued: id -> task of the jobs that are queued already; others that a job waits for are done.
        first: number of the first array.
    """
    depth: dict[str, int] = {}
    groups: dict[tuple[int, str, Request], list[Job]] = defaultdict(list)
    for job in jobs:
        depth[job.id] = 1 + max((depth[name] for name in job.after if name in depth), default=0)
        groups[depth[job.id], job.kind, request_of(job.needs, site)].append(job)
    arrays: list[JobArray] = []
    places: dict[str, tuple[str, int]] = {}  # id -> its array and index
    for level, kind, request in sorted(groups, key=lambda group: group[0]):
        members = groups[level, kind, request]
        for start in range(0, len(members), site.largest_array):
            part = members[start : start + site.largest_array]
            before = [name for job in part for name in job.after if name in places or name in queued]
            after = {places[name][0] if name in places else queued[name].partition("_")[0] for name in before}
            indexed = {places[name][1]: job for job in part for name in job.after if name in places}
            task_by_task = len(after) == 1 and len(indexed) == len(part) == len(before)
            indexed = indexed if task_by_task else dict(enumerate(part))
            name = f"{first + len(arrays):03d}-{kind}"
            arrays.append(JobArray(name, request, indexed, tuple(sorted(after)), task_by_task))
            places |= {job.id: (name, index) for index, job in indexed.items()}
    return arrays


# Scripts.


def script_text(array: JobArray, site: Site, study: Path) -> str:
    """The batch script of an array: its options and environment, then scripts/slurm/job.sh. `study` is an absolute path."""
    request = array.request
    environment = [f"module load {shlex.join(site.modules)}"] if site.modules else []
    environment.append(f"export OMP_NUM_THREADS={site.cpus}")
    environment += [f"export HF_HOME={shlex.quote(site.cache)}"] if site.cache is not None else []
    environment += [f"export {' '.join(f'{name}=1' for name in _OFFLINE)}"] if site.offline else []
    environment += [f'export TMPDIR="{site.scratch}"', 'mkdir -p "$TMPDIR"'] if site.scratch is not None else []
    own = "emp-llm" if site.container else f"{shlex.quote(sys.executable)} -m emp_llm"
    command = f"{site.container} {own if site.command is None else site.command}".strip()
    places = f"%{site.at_once}" if site.at_once is not None else ""
    chosen = {
        "job-name": array.name,
        "array": f"{array.indices}{places}",
        "chdir": str(study),
        "output": f"{FOLDER_NAME}/{array.name}-%a.log",
        "partition": site.partition if request.gpus or site.cpu_partition is None else site.cpu_partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "nodes": str(request.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(request.cpus),
        "time": f"{request.minutes // 60}:{request.minutes % 60:02d}:00",
        "signal": f"TERM@{site.signal_seconds}",
    }
    options = []
    for name, value in chosen.items():
        if value is not None:
            options.append(f"--{name}={value}" if shlex.quote(value) == value else f'--{name}="{value}"')
    options += [site.gpus.replace("{gpus}", str(request.gpus))] if request.gpus else []
    options += [site.memory.replace("{megabytes}", str(request.megabytes))] if site.memory else []
    options += ["--requeue", "--open-mode=append", "--kill-on-invalid-dep=yes", *site.options]
    lines = [
        "#!/bin/bash -l" if site.modules else "#!/bin/bash",
        f"# Array {array.name}, written by emp-llm submit.",
        *(f"#SBATCH {option}" for option in options),
        "",
        "set -e",
        *environment,
        *site.prolog,
        "set +e",
        f'list="{FOLDER_NAME}/{array.name}.jobs"',
        f"command=({command})",
        f"requeues={site.requeues}",
    ]
    common = (data_folder("slurm") / "job.sh").read_text(encoding="utf-8").partition("#@\n")[2]
    return "\n".join(lines) + f"\n{common}"


def list_text(array: JobArray) -> str:
    """The list of an array: the id of the job of task N on line N + 1; an empty line for an index without a task."""
    return "".join(f"{array.jobs[index].id if index in array.jobs else ''}\n" for index in range(max(array.jobs) + 1))


# Slurm's commands.


def queued_jobs(study: Path) -> dict[str, str]:
    """id -> task of the jobs of a study (an absolute path) that wait or run in Slurm.

    A task is known by its folder, the name of its array, and the list of the array's jobs, which was written before it was
    submitted.

    Raises:
        UserError: something was submitted, and squeue does not answer.
    """
    folder = study / FOLDER_NAME
    lists = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in folder.glob("*.jobs")}
    if not lists:
        return {}
    try:
        answer = _called(["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%j|%Z"], study)
    except UserError as error:
        raise UserError(
            f"{folder}: jobs were submitted before, and nobody knows whether they are still queued: {error} "
            "Nothing is submitted, so that no job runs twice. Try again when squeue answers; to forget what was submitted, "
            f"move {folder} away."
        ) from error
    found = {}
    for line in answer.splitlines():
        task, name, where = (*line.strip().split("|", 2), "", "")[:3]
        number = task.partition("_")[2]
        if where == str(study) and number.isdecimal() and int(number) < len(lists.get(name, [])):
            found[lists[name][int(number)]] = task
    return found


def next_number(study: Path) -> int:
    """The number of the next array of a study."""
    names = (path.name.partition("-")[0] for path in (study / FOLDER_NAME).glob("*-*.*"))
    return 1 + max((int(name) for name in names if name.isdecimal()), default=0)


def check_sbatch(study: Path) -> None:
    """Raise UserError if this machine has no sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"sbatch: not found; submit on a login node of a Slurm cluster. Without Slurm, emp-llm run {study} runs the study "
            "on this machine, and docs/clusters.md shows other schedulers."
        )


def sbatch_words(array: JobArray, numbers: Mapping[str, str]) -> list[str]:
    """The command that submits an array, given the numbers of arrays by name.

    --export stands here and not in the script, where a variable of the environment (SBATCH_EXPORT) would replace it.
    """
    options = [f"--export={','.join(EXPORTED)}"]
    if array.after:
        kind = "aftercorr" if array.task_by_task else "afterany"
        options.append(f"--dependency={kind}:{':'.join(numbers.get(name, name) for name in array.after)}")
    return ["sbatch", "--parsable", *options, f"{FOLDER_NAME}/{array.name}.sh"]


def submit_script(words: Sequence[str], study: Path) -> str:
    """Submit a script; returns the number of the array. UserError if sbatch refuses, in its own words."""
    said = _called(words, study)
    answer = re.fullmatch(r"(\d+)(;\S+)?\s*", said)
    if answer is None:
        raise UserError(f"sbatch said: {printable(said.strip(), 500) or 'nothing'}.")
    return answer[1]


def _called(words: Sequence[str], folder: Path) -> str:
    """What a command of Slurm prints; UserError if it fails, with what it said in one line."""
    name = words[0]
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_ANSWER_SECONDS,
        )
    except OSError as error:
        raise UserError(f"{name}: cannot be started ({error.strerror}).") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name}: no answer in {_ANSWER_SECONDS} seconds.") from error
    if done.returncode:
        lines = [line.removeprefix(f"{name}: ").removeprefix("error: ") for line in (done.stderr + done.stdout).splitlines()]
        said = "; ".join(line.strip().rstrip(".") for line in lines if line.strip())
        raise UserError(f"{name} said: {printable(said, 500) or f'nothing, with exit code {done.returncode}'}.")
    return done.stdout
