"""plan.jsonl: the jobs of a study, one a line, each with its command, the jobs that come first, and its needs."""

import re
import shlex
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from emp_llm.checkpoint.files import write_bytes
from emp_llm.common.errors import UserError, quotable
from emp_llm.records.base import FileRecord, Part, record_of

PLAN_NAME = "plan.jsonl"
JobKind = Literal["calibrate", "prune", "evaluate", "sweep"]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")

Gigabytes = Annotated[float, Meta(ge=0)]
Number = Annotated[int, Meta(ge=1)]


class Needs(Part, kw_only=True, omit_defaults=False):
    """What a job needs of each of its nodes. A GB is 1e9 bytes.

    Attributes:
        nodes: number of machines.
        processes: ranks on a node, each with a whole model; more than one are started by torchrun.
        gpus: number of GPUs on a node; 0: it computes on the CPU.
        gpu_gb: memory of each GPU.
        memory_gb: memory of the node.
        disk_gb: written into the study's folder.
        hours: time.
    """

    nodes: Number = 1
    processes: Number = 1
    gpus: Annotated[int, Meta(ge=0)] = 0
    gpu_gb: Gigabytes = 0.0
    memory_gb: Gigabytes
    disk_gb: Gigabytes
    hours: Annotated[float, Meta(gt=0)]


class Job(FileRecord, kw_only=True, omit_defaults=False):
    """A job.

    Attributes:
        id: letters, digits, dots, hyphens and underscores; unique in the plan.
        kind: the command.
        command: for a shell in the study's folder; it begins with "emp-llm".
        after: ids of the jobs that must be done first.
        output: file or folder that the command writes, relative to the study's folder.
        needs: of the job.
    """

    KIND: ClassVar[str] = "job"
    VERSION: ClassVar[int] = 1

    id: str
    kind: JobKind
    command: str
    after: list[str] = msgspec.field(default_factory=list)
    output: str
    needs: Needs

    @property
    def arguments(self) -> list[str]:
        """The words of the command after "emp-llm"."""
        return shlex.split(self.command)[1:]


def write_plan(folder: Path, jobs: Sequence[Job]) -> None:
    """Write the plan of a study, atomically."""
    write_bytes(folder / PLAN_NAME, b"".join(msgspec.json.encode(job) + b"\n" for job in jobs))


def read_plan(folder: Path) -> list[Job]:
    """The jobs of a study, those that come first before the others; else in the order of the file.

    Raises:
        UserError: there is no plan, or a line is not a job; two jobs have one id or one output; a job waits for an unknown job,
            or for itself.
    """
    path = folder / PLAN_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no plan; write one with emp-llm plan --output {folder}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the plan cannot be read ({error}).") from error
    jobs = [_job(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not jobs:
        raise UserError(f"{path}: the plan has no jobs; write one with emp-llm plan --output {folder}.")
    for field in ("id", "output"):
        seen: set[str] = set()
        for job in jobs:
            value = job[field]
            if value in seen:
                raise UserError(f"{path}: two jobs have the {field} {quotable(value)}; give each its own.")
            seen.add(value)
    return _in_order(jobs, path)


def _job(line: str, where: str) -> Job:
    try:
        values: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{where}: this line is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: a line must be a JSON object with the fields of a job.")
    job = record_of(values, Job, where)
    if _ID.fullmatch(job.id) is None:
        raise UserError(f"{where}: id {quotable(job.id)} must be of letters, digits, dots, hyphens and underscores.")
    try:
        words = shlex.split(job.command)
    except ValueError as error:
        raise UserError(f"{where}: command: {error}; a quotation mark must be closed.") from error
    if words[:2] != ["emp-llm", job.kind]:
        raise UserError(f'{where}: command must begin with "emp-llm {job.kind}", as its kind says.')
    inside = Path(job.output)
    if inside.is_absolute() or ".." in inside.parts or not inside.parts:
        raise UserError(f"{where}: output {quotable(job.output)} must be a path within the study's folder.")
    return job


def _in_order(jobs: list[Job], path: Path) -> list[Job]:
    """The jobs with those that they wait for before them; UserError for an unknown one, or a circle."""
    by_id = {job.id: job for job in jobs}
    seen: set[str] = set()
    ordered = True
    for job in jobs:
        missing = next((name for name in job.after if name not in by_id), None)
        if missing is not None:
            raise UserError(f"{path}: {job.id} waits for {quotable(missing)}, which is not in the plan; change after.")
        ordered = ordered and seen.issuperset(job.after)
        seen.add(job.id)
    if ordered:
        return jobs
    try:
        return [by_id[name] for name in TopologicalSorter({job.id: job.after for job in jobs}).static_order()]
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise UserError(f"{path}: these jobs wait for each other: {circle}. Take one out of after.") from error


def option_of(job: Job, flag: str) -> str:
    """The value of an option of a job's command; empty if it has none. The parser takes 15 ms for a command."""
    words = job.arguments
    for number, word in enumerate(words):
        if word == flag:
            return words[number + 1] if number + 1 < len(words) else ""
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""
