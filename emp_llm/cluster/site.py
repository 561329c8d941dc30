"""site.toml: how a cluster wants its jobs, in one small file."""

import os
import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from emp_llm.calibration.texts import read_toml
from emp_llm.cluster.plan_file import Job, JobKind, Needs
from emp_llm.common.errors import UserError, quotable
from emp_llm.common.paths import data_folder
from emp_llm.records.base import converted

_Count = Annotated[int, Meta(ge=1)]
Hours = Annotated[float, Meta(gt=0, le=8760)]
Size = Annotated[float, Meta(gt=0)]
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SECRET = re.compile(r"(?i)\b(\w*(?:token|secret|password|passwd|api_?key))\s*=\s*\\?[\"']?[^\s\"'$\\]")
_QUOTED = ("partition", "cpu_partition", "account", "qos", "constraint", "scratch")  # between quotation marks in a script
_SHELL = ("about", "prolog")  # lines of their own
# What submit itself says to sbatch.
_OWN_OPTIONS = {
    *("partition", "account", "qos", "constraint", "time", "signal", "mem", "cpus-per-task", "array", "export", "dependency"),
    *("nodes", "ntasks", "ntasks-per-node", "chdir", "output", "job-name", "requeue", "no-requeue", "open-mode"),
    *("kill-on-invalid-dep", "parsable", "wrap"),
}


class LargestNode(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The largest node that a job can get. A GB is 1e9 bytes.

    Attributes:
        cpus: cores. memory_gb: memory. gpus: number of GPUs. gpu_gb: memory of each.
    """

    cpus: _Count
    memory_gb: Size
    gpus: Annotated[int, Meta(ge=0)] = 0
    gpu_gb: Annotated[float, Meta(ge=0)] = 0.0


class SiteNeeds(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Numbers of the site for jobs of one kind, in place of the plan's; null: the plan's.

    Attributes:
        gpus: number of GPUs of a node. memory_gb: memory of a node. hours: time.
    """

    gpus: Annotated[int, Meta(ge=0)] | None = None
    memory_gb: Size | None = None
    hours: Hours | None = None


class Site(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of a cluster.

    Attributes:
        about: a description in one sentence.
        partition, account, qos, constraint: as for sbatch; null: its default.
        cpu_partition: partition of jobs without GPUs; null: `partition`.
        gpus: the option that asks for GPUs, with {gpus} for their number on a node.
        memory: the option that asks for memory, with {megabytes} for MiB on a node; empty: no such option.
        cpus: cores for each process of a job.
        options: further options of sbatch.
        max_hours: longest time limit. A job that needs more is stopped and queued again, and resumes.
        min_hours: shortest time limit.
        signal_seconds: SIGTERM is sent so long before the time limit.
        requeues: a task is queued again at most so often.
        at_once: so many tasks of an array run at once; null: as many as fit.
        largest_array: number of tasks; the cluster's MaxArraySize may demand fewer.
        largest_node: jobs that need more are refused; null: nothing is refused.
        needs: kind of jobs -> numbers in place of the plan's.
        modules: loaded in this order, in a login shell.
        prolog: lines of shell at the start of each task, after the modules.
        container: words before the command, such as "apptainer exec --nv image.sif".
        command: emp-llm on the nodes; null: this Python's, and within a container "emp-llm".
        scratch: TMPDIR; made if missing. Variables such as $SLURM_JOB_ID get their value on the node.
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
    cpus: _Count = 4
    options: list[str] = []
    max_hours: Hours = 24.0
    min_hours: Hours = 0.25
    signal_seconds: Annotated[int, Meta(ge=1, le=65535)] = 180
    requeues: Annotated[int, Meta(ge=0)] = 50
    at_once: _Count | None = None
    largest_array: _Count = 1000
    largest_node: LargestNode | None = None
    needs: dict[JobKind, SiteNeeds] = {}
    modules: list[str] = []
    prolog: list[str] = []
    container: str = ""
    command: str | None = None
    scratch: str | None = None
    cache: str | None = None
    offline: bool = True

    def needs_of(self, job: Job) -> Needs:
        """The needs of a job: the site's numbers, and the plan's for the others."""
        own = msgspec.structs.asdict(self.needs.get(job.kind, SiteNeeds()))
        return msgspec.structs.replace(job.needs, **{name: value for name, value in own.items() if value is not None})


def quotes_well(text: str) -> bool:
    """Whether a text between quotation marks means itself, to sbatch and to a shell."""
    return text.isprintable() and not set(text) & set('"\\')


def read_site(path: Path) -> Site:
    """Read a site file.

    Raises:
        UserError: it cannot be read, a key is unknown or its value wrong, or a value looks like a secret.
    """
    if not os.path.isfile(path):
        raise UserError(
            f"--site {path}: no such file. Copy an example from {data_folder('slurm')}, and write your "
            "cluster's settings into it."
        )
    values = read_toml(path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assigned = _SECRET.search(line)
        if assigned or _TOKEN.search(line):
            raise UserError(
                f"{path}: line {number} seems to hold a secret ({assigned[1] if assigned else 'an access token of the Hub'}), "
                "and others can read the scripts of jobs. Take it out, and make the token invalid if others may have seen it; "
                "offline jobs need none."
            )
    site = converted(values, Site, str(path))
    for name, value in msgspec.structs.asdict(site).items():
        sound = quotes_well if name in _QUOTED else str.isprintable
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and name not in _SHELL and not sound(text):
                marks = ", without quotation marks and backslashes" if name in _QUOTED else ""
                raise UserError(f"{path}: {name}: {quotable(text)} must be one line{marks}.")
    if not (site.gpus.startswith("-") and "{gpus}" in site.gpus):
        raise UserError(f'{path}: gpus must be an option with {{gpus}}, such as "--gres=gpu:{{gpus}}", got "{site.gpus}".')
    if site.memory and not (site.memory.startswith("-") and "{megabytes}" in site.memory):
        raise UserError(
            f'{path}: memory must be an option with {{megabytes}}, such as "--mem={{megabytes}}M", or empty, got '
            f'"{site.memory}".'
        )
    if site.min_hours > site.max_hours:
        raise UserError(f"{path}: min_hours {site.min_hours:g} must not be above max_hours {site.max_hours:g}.")
    if site.signal_seconds >= site.min_hours * 3600:
        raise UserError(
            f"{path}: signal_seconds {site.signal_seconds} must be less than min_hours, {site.min_hours * 3600:g} seconds; "
            "else a task is stopped as soon as it starts."
        )
    for option in site.options:
        name = option.lstrip("-").partition("=")[0].partition(" ")[0]
        if not option.startswith("-"):
            raise UserError(f'{path}: options: "{quotable(option)}" must begin with a hyphen, as for sbatch.')
        if name in _OWN_OPTIONS:
            raise UserError(f"{path}: options: submit sets --{name} itself; set the key for it, or leave it out.")
    if site.cache is None:
        return site
    cache = os.path.expanduser(os.path.expandvars(site.cache))
    if "$" in cache or not os.path.isabs(cache):
        raise UserError(
            f"{path}: cache {quotable(site.cache)} must be an absolute path, of variables that are set here: login node and "
            "nodes use the same folder."
        )
    return msgspec.structs.replace(site, cache=cache)
