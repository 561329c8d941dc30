"""Studies on Slurm: jobs grouped into arrays, their scripts, sbatch and squeue, and the notes of what was submitted."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import msgspec

from emp_llm.cluster.plan_file import Job, Needs
from emp_llm.cluster.site import Site
from emp_llm.common.errors import UserError, count_of, printable
from emp_llm.common.paths import data_folder
from emp_llm.records.base import FileRecord, record_of

FOLDER_NAME = "slurm"  # in the study
NOTES_NAME = "submitted.jsonl"
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
        threads: of each process.
    """

    nodes: int
    cpus: int
    gpus: int
    megabytes: int
    minutes: int
    threads: int

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
        waits: arrays that must have ended before, by their names, or their numbers in Slurm; a task then refuses to begin if a
            job that it waits for has failed.
        follows: each task waits for the task of the same index in this array, and for nothing else.
    """

    name: str
    request: Request
    jobs: dict[int, Job]
    waits: tuple[str, ...] = ()
    follows: str | None = None

    @property
    def indices(self) -> str:
        """The indices for sbatch: "0-3,7"."""
        runs: list[list[int]] = []
        for index in sorted(self.jobs):
            if runs and runs[-1][1] == index - 1:
                runs[-1][1] = index
            else:
                runs.append([index, index])
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

    def dependency(self, numbers: Mapping[str, str]) -> str:
        """The option of sbatch, with the numbers of arrays in place of their names; empty if the tasks wait for nothing."""
        if self.follows is not None:
            return f"aftercorr:{numbers[self.follows]}"
        return f"afterany:{':'.join(numbers.get(name, name) for name in self.waits)}" if self.waits else ""


def request_of(needs: Needs, site: Site) -> Request:
    """What a job asks of a site; its needs are rounded up."""
    gigabytes = 1.0
    while gigabytes < needs.memory_gb:  # 1, 1.5, 2, 3, 4, 6, 8, 12, 16 ...
        gigabytes = round(gigabytes * (1.5 if math.log2(gigabytes).is_integer() else 4 / 3), 6)
    megabytes, node = math.ceil(gigabytes * 1e9 / _MEBIBYTE), site.largest_node
    if node is not None and needs.memory_gb <= node.memory_gb:
        megabytes = min(megabytes, int(node.memory_gb * 1e9 / _MEBIBYTE))
    least, most = math.ceil(site.min_hours * 60), max(1, int(site.max_hours * 60))
    wanted = math.ceil(needs.hours * 60 + site.signal_seconds / 60)
    minutes = next((step for step in _MINUTES if step >= wanted), wanted)
    cpus = site.cpus * needs.processes
    return Request(needs.nodes, cpus, needs.gpus, megabytes, min(max(minutes, least), most), site.cpus)


def check_fits(jobs: Sequence[Job], site: Site, path: Path) -> None:
    """Raise UserError if a job needs more than the largest node has of a site, whose file is at `path`."""
    node = site.largest_node
    if node is None:
        return
    large: dict[str, list[str]] = {}
    for job in jobs:
        needs, cores = job.needs, site.cpus * job.needs.processes
        lacking = {
            count_of(needs.gpus, "GPU"): needs.gpus > node.gpus,
            f"{needs.gpu_gb:.3g} GB of GPU memory": needs.gpus > 0 and needs.gpu_gb > node.gpu_gb,
            f"{needs.memory_gb:.3g} GB of memory": needs.memory_gb > node.memory_gb,
            f"{cores} cores ({site.cpus} for each of {needs.processes} processes)": cores > node.cpus,
        }
        if any(lacking.values()):
            large[job.id] = [words for words, lacks in lacking.items() if lacks]
    if not large:
        return
    first, others = next(iter(large)), len(large) - 1
    has = f"{node.cpus} cores, {node.memory_gb:g} GB" + (f" and {node.gpus} GPUs of {node.gpu_gb:g} GB" if node.gpus else "")
    more = f" {others:,} other jobs are too large as well." if others > 1 else ""
    more = " Another job is too large as well." if others == 1 else more
    raise UserError(
        f"{first} needs {', '.join(large[first])} on a node, and the largest node of {path} has {has}.{more} Plan with needs "
        "that fit (a smaller model, fewer processes, --gpu-gb), or correct largest_node."
    )


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
            waits = {places[name][0] if name in places else queued[name].partition("_")[0] for name in before}
            indexed = {places[name][1]: job for job in part for name in job.after if name in places}
            array = JobArray(f"{first + len(arrays):03d}-{kind}", request, dict(enumerate(part)), tuple(sorted(waits)))
            if len(waits) == 1 and len(indexed) == len(part) == len(before):  # each waits for another task of one array
                array = replace(array, jobs=indexed, waits=(), follows=waits.pop())
            arrays.append(array)
            places |= {job.id: (array.name, index) for index, job in array.jobs.items()}
    return arrays


# Scripts.


def script_text(array: JobArray, site: Site, study: Path) -> str:
    """The batch script of an array, from the template scripts/slurm/job.sh, for the absolute path of a study."""
    request = array.request
    threads = f"export OMP_NUM_THREADS={request.threads}"
    cache = f"export HF_HOME={shlex.quote(site.cache)}" if site.cache is not None else None
    offline = f"export {' '.join(f'{name}=1' for name in _OFFLINE)}" if site.offline else None
    scratch = [f'export TMPDIR="{site.scratch}"', 'mkdir -p "$TMPDIR"'] if site.scratch is not None else []
    modules = f"module load {shlex.join(site.modules)}" if site.modules else None
    environment = [*filter(None, [modules, threads, cache, offline]), *scratch, *site.prolog]
    own = "emp-llm" if site.container else f"{shlex.quote(sys.executable)} -m emp_llm"
    command = " ".join(filter(None, (site.container, own if site.command is None else site.command)))

    head, _, rest = (data_folder("slurm") / "job.sh").read_text(encoding="utf-8").partition("#\n")
    rest = rest.partition("#@ options\n")[2]
    head = head.replace("#!/bin/bash\n", "#!/bin/bash -l\n") if site.modules else head
    changes = {
        "#@ environment\n": "".join(f"{line}\n" for line in environment),
        'list="slurm/NAME.jobs"': f'list="{FOLDER_NAME}/{array.name}.jobs"',
        "    emp-llm run": f"    {command} run",
        "-lt 50 ]": f"-lt {site.requeues} ]",
    }
    for mark, line in changes.items():
        assert rest.count(mark) == 1, f"job.sh has no line with {mark!r}"
        rest = rest.replace(mark, line)

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
            quoted = f'"{value}"' if any(letter.isspace() for letter in value) else value
            options.append(f"--{name}={quoted}")
    options += [site.gpus.replace("{gpus}", str(request.gpus))] if request.gpus else []
    options += [site.memory.replace("{megabytes}", str(request.megabytes))] if site.memory else []
    options += ["--requeue", "--open-mode=append", "--kill-on-invalid-dep=yes", *site.options]
    lines = "".join(f"#SBATCH {option}\n" for option in options)
    return f"{head}# Array {array.name}, written by emp-llm submit.\n{lines}{rest}"


def list_text(array: JobArray) -> str:
    """The list of an array: the id of the job of task N on line N + 1; an empty line for an index without a task."""
    return "".join(f"{array.jobs[index].id if index in array.jobs else ''}\n" for index in range(max(array.jobs) + 1))


# What was submitted.


class SubmittedTask(FileRecord, kw_only=True, omit_defaults=False):
    """A job that was submitted.

    Attributes:
        job: its id.
        array: name of the script and the list.
        task: of Slurm, such as "123_4".
    """

    KIND: ClassVar[str] = "submitted task"
    VERSION: ClassVar[int] = 1

    job: str
    array: str
    task: str


def submitted_tasks(study: Path) -> list[SubmittedTask]:
    """The notes in submitted.jsonl, oldest first; an incomplete line, of a crash, is left out."""
    path = study / FOLDER_NAME / NOTES_NAME
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            values = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(values, dict):
            found.append(record_of(values, SubmittedTask, f"{path}:{number}"))
    return found


def note_array(study: Path, array: JobArray, number: str) -> None:
    """Note a submitted array, by its number in Slurm; the notes are on disk on return."""
    new = [SubmittedTask(job=job.id, array=array.name, task=f"{number}_{index}") for index, job in array.jobs.items()]
    text = b"".join(msgspec.json.encode(each) + b"\n" for each in new)
    file = os.open(study / FOLDER_NAME / NOTES_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = os.lseek(file, 0, os.SEEK_END)
        torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
        os.write(file, b"\n" * torn + text)
        os.fsync(file)
    finally:
        os.close(file)


def queued_jobs(study: Path) -> dict[str, str]:
    """id -> task of the jobs of a study (an absolute path) that wait or run in Slurm.

    A submission that was killed before it noted its array is found by the array's name and the list of its jobs.

    Raises:
        UserError: something was submitted, and squeue does not answer.
    """
    folder = study / FOLDER_NAME
    noted = {each.task: each.job for each in submitted_tasks(study)}
    lists = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in folder.glob("*.jobs")}
    if not lists and not noted:
        return {}
    words = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%j|%Z"]
    try:
        answer = _called(words, study)
    except UserError as error:
        raise UserError(
            f"{folder / NOTES_NAME}: jobs were submitted before, and nobody knows whether they are still queued: {error} "
            "Nothing is submitted, so that no job runs twice. Try again when squeue answers; to forget what was submitted, "
            f"move {folder} away."
        ) from error
    found = {}
    for line in answer.splitlines():
        task, name, where = (*line.split("|", 2), "", "")[:3]
        task, number = task.strip(), task.strip().partition("_")[2]
        if task in noted:
            found[noted[task]] = task
        elif where == str(study) and number.isdigit() and int(number) < len(lists.get(name, [])):
            found[lists[name][int(number)]] = task
    return found


def next_number(study: Path) -> int:
    """The number of the next array of a study."""
    names: Iterable[str] = (path.name.partition("-")[0] for path in (study / FOLDER_NAME).glob("*-*.*"))
    return 1 + max((int(name) for name in names if name.isdigit()), default=0)


# Slurm's commands.


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
    dependency = array.dependency(numbers)
    options = [f"--export={','.join(EXPORTED)}", *([f"--dependency={dependency}"] if dependency else [])]
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
