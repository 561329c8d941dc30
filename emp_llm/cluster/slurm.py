"""Studies on Slurm: the site file, jobs grouped into arrays, their scripts, sbatch and squeue.

site.toml says how a cluster wants its jobs, in one small file.
"""

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
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emp_llm.calibration.texts import read_toml
from emp_llm.cluster.jobs import Job, JobKind, Needs, Number
from emp_llm.common.errors import UserError, count_of, printable, quotable
from emp_llm.common.paths import data_folder
from emp_llm.records.base import converted

Hours = Annotated[float, Meta(gt=0, le=8760)]
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SECRET = re.compile(
    r"(?i)\b(\w*(?:token|secret|password|passwd|api_?key))\s*=\s*\\?[\"']?[^\s\"'$\\]"
)


class SiteNeeds(Needs, frozen=True, forbid_unknown_fields=True):  # type: ignore[misc]  # as `Quartiles`
    """What jobs need where their plan does not say it; null: no GPU, the cluster's default memory,
    the longest time.
    """


class Site(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The settings of a cluster.

    Attributes:
        about: a description in one sentence.
        partition, account, qos, constraint: as for sbatch; null: its default.
        cpu_partition: partition of jobs without GPUs; null: `partition`.
        gpus: the option that asks for GPUs, with {gpus} for their number.
        memory: the option that asks for memory, with {megabytes} for MiB; empty: no such option.
        cpus: cores of a job.
        options: further options of sbatch, after those that submit writes.
        max_hours: longest time limit. A job that needs more is stopped and queued again, and
            resumes.
        signal_seconds: SIGTERM is sent so long before the time limit.
        requeues: a task is queued again at most so often.
        at_once: so many tasks of an array run at once; null: as many as fit.
        largest_array: number of tasks; the cluster's MaxArraySize may demand fewer.
        needs: kind of jobs -> what they need; "all": of jobs of every kind.
        modules: loaded in this order, in a login shell.
        prolog: lines of shell at the start of each task, after the modules.
        container: words before the command, such as "apptainer exec --nv image.sif".
        command: emp-llm on the nodes; null: this Python's, and within a container "emp-llm".
        scratch: TMPDIR; made if missing. Variables such as $SLURM_JOB_ID get their value on the
            node.
        cache: HF_HOME, the Hub's cache, which login node and nodes share.
        offline: the nodes have no network; submit downloads what the jobs need.
    """

    about: str = ""
    partition: str | None = None
    cpu_partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: str = "--gpus-per-node={gpus}"
    memory: str = "--mem={megabytes}M"
    cpus: Number = 4
    options: list[str] = []
    max_hours: Hours = 24.0
    signal_seconds: Annotated[int, Meta(ge=1, le=65535)] = 180
    requeues: Annotated[int, Meta(ge=0)] = 50
    at_once: Number | None = None
    largest_array: Number = 1000
    needs: dict[Literal["all"] | JobKind, SiteNeeds] = {}
    modules: list[str] = []
    prolog: list[str] = []
    container: str = ""
    command: str | None = None
    scratch: str | None = None
    cache: str | None = None
    offline: bool = True

    def needs_of(self, job: Job) -> Needs:
        """The needs of a job: the plan's numbers, then the site's for its kind, then those for all
        kinds.
        """
        values: dict[str, Any] = {}
        for needs in (self.needs.get("all"), self.needs.get(job.kind), job.needs):
            values |= {} if needs is None else needs.as_dict()  # without nulls
        return Needs(**values)

    def minutes_of(self, needs: Needs) -> int:
        """The time limit of a task: its hours and the seconds after SIGTERM, or the longest."""
        most = int(self.max_hours * 60)
        if needs.hours is None:
            return most
        return min(most, math.ceil(needs.hours * 60 + self.signal_seconds / 60))


def quotes_well(text: str) -> bool:
    """Whether a text between quotation marks means itself, to sbatch and to a shell."""
    return text.isprintable() and not set(text) & set('"\\')


def read_site(path: Path) -> Site:
    """Read a site file.

    Raises:
        UserError: it cannot be read, a key is unknown or its value wrong, or a value looks like a
            secret.
    """
    if not os.path.isfile(path):
        raise UserError(
            f"--site {path}: no such file. Copy an example from "
            f"{data_folder('slurm')}, and edit it."
        )
    values = read_toml(path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assigned = _SECRET.search(line)
        if assigned or _TOKEN.search(line):
            raise UserError(
                f"{path}: line {number} seems to hold a secret "
                f"({assigned[1] if assigned else 'an access token of the Hub'}), and others can "
                "read the scripts of jobs. Take it out, and make the token invalid if others may "
                "have seen it."
            )
    site = converted(values, Site, str(path))
    if not (site.gpus.startswith("-") and "{gpus}" in site.gpus):
        raise UserError(
            f"{path}: gpus must be an option with {{gpus}}, such as "
            f'"--gres=gpu:{{gpus}}", got "{site.gpus}".'
        )
    if site.memory and not (site.memory.startswith("-") and "{megabytes}" in site.memory):
        raise UserError(
            f"{path}: memory must be empty, or an option such as "
            f'"--mem={{megabytes}}M", got "{site.memory}".'
        )
    if site.signal_seconds >= site.max_hours * 3600:
        raise UserError(
            f"{path}: signal_seconds {site.signal_seconds} must be less than max_hours, "
            f"{site.max_hours * 3600:g} seconds."
        )
    if site.cache is None:
        return site
    cache = os.path.expanduser(os.path.expandvars(site.cache))
    if "$" in cache or not os.path.isabs(cache):
        raise UserError(
            f"{path}: cache {quotable(site.cache)} must be an absolute path, of "
            "variables that are set here."
        )
    return msgspec.structs.replace(site, cache=cache)


FOLDER_NAME = "slurm"  # in the study
_ANSWER_SECONDS = 300  # for a command of Slurm
# Variables of the login node that tasks get. No other goes to Slurm, because any might hold a
# secret.
EXPORTED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "MODULEPATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "EMP_LLM_CACHE",
    "SLURM_CONF",
)
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")


# Arrays.


@dataclass(frozen=True)
class JobArray:
    """An array of tasks: the jobs of one kind, depth and needs.

    Attributes:
        name: unique in the study.
        needs: what each task asks for.
        jobs: of the tasks, in their order.
        after: arrays that come first, by their names or their numbers in Slurm. A task waits until
            they have ended, and refuses to begin if a job that it needs has failed.
    """

    name: str
    needs: Needs
    jobs: tuple[Job, ...]
    after: tuple[str, ...] = ()


def needs_text(needs: Needs, site: Site) -> str:
    """What each task of an array asks for, in words."""
    words = [count_of(needs.gpus, "GPU")] if needs.gpus else []
    words.append(count_of(site.cpus, "core"))
    if needs.memory_gb is not None:
        words.append(f"{needs.memory_gb:g} GB")
    minutes = site.minutes_of(needs)
    return ", ".join([*words, f"{minutes // 60}:{minutes % 60:02d} h"])


def grouped_jobs(
    jobs: Sequence[Job], site: Site, queued: Mapping[str, str], first: int
) -> list[JobArray]:
    """The arrays for jobs, in an order in which they can be submitted: one for each kind, depth and
    needs.

    Args:
        jobs: that are neither done nor queued, those that come first before the others.
        queued: id -> task of the jobs that are queued already; others that a job waits for are
            done.
        first: number of the first array.
    """
    depth: dict[str, int] = {}
    groups: dict[tuple[int, str, Needs], list[Job]] = defaultdict(list)
    for job in jobs:
        depth[job.id] = 1 + max((depth[name] for name in job.after if name in depth), default=0)
        groups[depth[job.id], job.kind, site.needs_of(job)].append(job)
    arrays: list[JobArray] = []
    array_of: dict[str, str] = {}  # id -> its array
    for level, kind, needs in sorted(groups, key=lambda group: group[0]):
        members = groups[level, kind, needs]
        for start in range(0, len(members), site.largest_array):
            tasks = members[start : start + site.largest_array]
            before = {name for job in tasks for name in job.after}
            after = {array_of[name] for name in before if name in array_of}
            after |= {queued[name].partition("_")[0] for name in before if name in queued}
            name = f"{first + len(arrays):03d}-{kind}"
            arrays.append(JobArray(name, needs, tuple(tasks), tuple(sorted(after))))
            array_of |= {job.id: name for job in tasks}
    return arrays


# Scripts.


def script_text(array: JobArray, site: Site, study: Path) -> str:
    """The batch script of an array: its options and environment, then scripts/slurm/job.sh.
    `study` is an absolute path.
    """
    needs = array.needs
    minutes = site.minutes_of(needs)
    environment = [f"module load {shlex.join(site.modules)}"] if site.modules else []
    environment.append(f"export OMP_NUM_THREADS={site.cpus}")
    environment += [f"export HF_HOME={shlex.quote(site.cache)}"] if site.cache is not None else []
    environment += [f"export {' '.join(f'{name}=1' for name in _OFFLINE)}"] if site.offline else []
    environment += (
        [f'export TMPDIR="{site.scratch}"', 'mkdir -p "$TMPDIR"']
        if site.scratch is not None
        else []
    )
    program = "emp-llm" if site.container else f"{shlex.quote(sys.executable)} -m emp_llm"
    command = f"{site.container} {program if site.command is None else site.command}".strip()
    places = f"%{site.at_once}" if site.at_once is not None else ""
    chosen = {
        "job-name": array.name,
        "array": f"0-{len(array.jobs) - 1}{places}",
        "chdir": str(study),
        "output": f"{FOLDER_NAME}/{array.name}-%a.log",
        "partition": site.partition
        if needs.gpus or site.cpu_partition is None
        else site.cpu_partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(site.cpus),
        "time": f"{minutes // 60}:{minutes % 60:02d}:00",
        "signal": f"TERM@{site.signal_seconds}",
    }
    options = []
    for name, value in chosen.items():
        if value is not None:
            options.append(
                f"--{name}={value}" if shlex.quote(value) == value else f'--{name}="{value}"'
            )
    if needs.gpus:
        options.append(site.gpus.replace("{gpus}", str(needs.gpus)))
    if site.memory and needs.memory_gb is not None:
        megabytes = math.ceil(needs.memory_gb * 1e9 / 2**20)  # as Slurm has them
        options.append(site.memory.replace("{megabytes}", str(megabytes)))
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
    """The list of an array: the id of the job of task N on line N + 1."""
    return "".join(f"{job.id}\n" for job in array.jobs)


# Slurm's commands.


def queued_jobs(study: Path) -> dict[str, str]:
    """id -> task of the jobs of a study (an absolute path) that wait or run in Slurm.

    A task is known by its folder, the name of its array, and the list of the array's jobs, which
    was written before it was submitted.

    Raises:
        UserError: something was submitted, and squeue does not answer.
    """
    folder = study / FOLDER_NAME
    lists = {
        path.stem: path.read_text(encoding="utf-8").splitlines() for path in folder.glob("*.jobs")
    }
    if not lists:
        return {}
    try:
        answer = _called(
            ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%j|%Z"], study
        )
    except UserError as error:
        raise UserError(
            f"{folder}: jobs were submitted before, and nobody knows whether they are still "
            f"queued: {error} Nothing is submitted, so that no job runs twice. Try again when "
            f"squeue answers; to forget what was submitted, move {folder} away."
        ) from error
    tasks = {}
    for line in answer.splitlines():
        task, name, where = (*line.strip().split("|", 2), "", "")[:3]
        number = task.partition("_")[2]
        if where == str(study) and number.isdecimal() and int(number) < len(lists.get(name, [])):
            tasks[lists[name][int(number)]] = task
    return tasks


def next_number(study: Path) -> int:
    """The number of the next array of a study."""
    names = (path.name.partition("-")[0] for path in (study / FOLDER_NAME).glob("*-*.*"))
    return 1 + max((int(name) for name in names if name.isdecimal()), default=0)


def check_sbatch(study: Path) -> None:
    """Raise UserError if this machine has no sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch: not found; submit on a login node of a Slurm cluster. Without Slurm, emp-llm "
            f"run {study} runs the study on this machine, and docs/clusters.md shows other "
            "schedulers."
        )


def sbatch_words(array: JobArray, numbers: Mapping[str, str]) -> list[str]:
    """The command that submits an array, given the numbers of arrays by name.

    --export stands here and not in the script, where a variable of the environment (SBATCH_EXPORT)
    would replace it.
    """
    options = [f"--export={','.join(EXPORTED)}"]
    if array.after:
        before = ":".join(numbers.get(name, name) for name in array.after)
        options.append(f"--dependency=afterany:{before}")
    return ["sbatch", "--parsable", *options, f"{FOLDER_NAME}/{array.name}.sh"]


def submit_script(words: Sequence[str], study: Path) -> str:
    """Submit a script; returns the number of the array. UserError if sbatch refuses, in its own
    words.
    """
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
            encoding="utf-8",
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
        lines = [
            line.removeprefix(f"{name}: ").removeprefix("error: ")
            for line in (done.stderr + done.stdout).splitlines()
        ]
        said = "; ".join(line.strip().rstrip(".") for line in lines if line.strip())
        raise UserError(
            f"{name} said: {printable(said, 500) or f'nothing, with exit code {done.returncode}'}."
        )
    return done.stdout
