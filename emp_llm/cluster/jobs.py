"""Jobs: the plan that names them, the files that tell what became of one, how it is started, and
one attempt to run it.

plan.jsonl holds the jobs of a study, one a line, each with its command and the jobs that come
first.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from emp_llm.checkpoint.files import STRICT, parse_json, read_json, write_bytes
from emp_llm.checkpoint.locks import FileLock, holder_of
from emp_llm.common.errors import UserError, did_you_mean, quotable, reason
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME
from emp_llm.common.ranks import LOST_CODE, RESUMES
from emp_llm.records.base import FileRecord, Part, converted, read_record, record_of
from emp_llm.records.run_report import REPORT_LIMIT

PLAN_NAME = "plan.jsonl"
JobKind = Literal["calibrate", "prune", "evaluate", "sweep"]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")

Number = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class Needs(Part, kw_only=True, frozen=True):  # type: ignore[misc]  # as `Quartiles`
    """What a job needs. A GB is 1e9 bytes; null is the site's number, or the machine's.

    Attributes:
        gpus: number of GPUs; 0: the job computes on the CPU.
        memory_gb: main memory.
        hours: time.
    """

    gpus: Annotated[int, Meta(ge=0)] | None = None
    memory_gb: Positive | None = None
    hours: Positive | None = None


class Job(FileRecord, kw_only=True, omit_defaults=False):
    """A job.

    Attributes:
        id: letters, digits, dots, hyphens and underscores; unique in the plan.
        kind: the command.
        command: for a shell in the study's folder; it begins with "emp-llm".
        after: ids of the jobs that must be done first.
        output: file or folder that the command writes, relative to the study's folder.
        needs: where they are not the site's.
    """

    KIND: ClassVar[str] = "job"
    VERSION: ClassVar[int] = 1

    id: str
    kind: JobKind
    command: str
    after: list[str] = msgspec.field(default_factory=list)
    output: str
    needs: Needs = Needs()

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
        UserError: there is no plan, or a line is not a job; two jobs have one id or one output; a
            job waits for an unknown job, or for itself.
    """
    path = folder / PLAN_NAME
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: there is no plan; write one with emp-llm plan --output {folder}."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the plan cannot be read ({error}).") from error
    jobs = [_job(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not jobs:
        raise UserError(
            f"{path}: the plan has no jobs; write one with emp-llm plan --output {folder}."
        )
    for field in ("id", "output"):
        seen: set[str] = set()
        for job in jobs:
            value = job[field]
            if value in seen:
                raise UserError(
                    f"{path}: two jobs have the {field} {quotable(value)}; give each its own."
                )
            seen.add(value)
    return _in_order(jobs, path)


def _job(line: str, where: str) -> Job:
    try:
        values: Any = parse_json(line.encode(), **STRICT)
    except ValueError as error:
        raise UserError(f"{where}: this line is not JSON ({reason(error)}).") from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: a line must be a JSON object with the fields of a job.")
    job = record_of(values, Job, where)
    _check_keys(values, Job, where)
    _check_keys(values.get("needs", {}), Needs, f"{where}: needs")
    if _ID.fullmatch(job.id) is None:
        raise UserError(
            f"{where}: id {quotable(job.id)} must be of letters, digits, dots, hyphens "
            "and underscores."
        )
    try:
        words = shlex.split(job.command)
    except ValueError as error:
        raise UserError(f"{where}: command: {error}; a quotation mark must be closed.") from error
    if words[:2] != ["emp-llm", job.kind]:
        raise UserError(f'{where}: command must begin with "emp-llm {job.kind}", as its kind says.')
    inside = Path(job.output)
    if inside.is_absolute() or ".." in inside.parts or not inside.parts:
        raise UserError(
            f"{where}: output {quotable(job.output)} must be a path within the study's folder."
        )
    return job


def _check_keys(values: dict[str, Any], kind: type[Part], where: str) -> None:
    """Raise UserError for a key that has no meaning: a misspelt one would be without effect."""
    known = kind.__struct_fields__
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        raise UserError(
            f"{where}: unknown field {quotable(unknown)}; there are {', '.join(known)}."
            f"{did_you_mean(unknown, known)}"
        )


def _in_order(jobs: list[Job], path: Path) -> list[Job]:
    """The jobs with those that they wait for before them; UserError for an unknown one, or a
    circle.
    """
    places = {job.id: place for place, job in enumerate(jobs)}
    for job in jobs:
        missing = next((name for name in job.after if name not in places), None)
        if missing is not None:
            raise UserError(
                f"{path}: {job.id} waits for {quotable(missing)}, which is not in the "
                "plan; change after."
            )
    if all(places[name] < places[job.id] for job in jobs for name in job.after):
        return jobs
    try:
        return [
            jobs[places[name]]
            for name in TopologicalSorter({job.id: job.after for job in jobs}).static_order()
        ]
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise UserError(
            f"{path}: these jobs wait for each other: {circle}. Take one out of after."
        ) from error


def option_of(job: Job, flag: str) -> str:
    """The value of an option of a job's command; empty if it has none. The parser takes 15 ms
    for a command.
    """
    for word, following in pairwise([*job.arguments, ""]):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return ""


JobStatus = Literal["done", "running", "stopped", "failed", "missing"]
_GLANCE = 0.5  # seconds to wait for a lock: `runner` takes it for a moment
_PATIENCE = 100.0  # seconds that a command has to end after SIGTERM
# Variables with the number of the scheduler's job.
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


class JobState(FileRecord, kw_only=True, omit_defaults=False):
    """What the last attempt of a job has come to.

    Attributes:
        command: that ran.
        status: "running" also after the runner was killed.
        attempts: their number.
        host, pid: the process that ran it.
        scheduler_job: the scheduler's number for it; null without a scheduler.
        exit_code: null while the command runs.
        message: why it failed.
        seconds: of all finished attempts together; last_seconds: of the last one.
    """

    KIND: ClassVar[str] = "job state"
    VERSION: ClassVar[int] = 1

    id: str
    command: str
    status: Literal["running", "done", "failed", "stopped"]
    attempts: int = 1
    host: str = ""
    pid: int = 0
    scheduler_job: str | None = None
    exit_code: int | None = None
    message: str = ""
    seconds: float = 0.0
    last_seconds: float = 0.0


class _Made(msgspec.Struct):
    """The part of an output that tells its command."""

    command: str | None = None
    complete: bool = True


class JobFiles:
    """The files of a job in its study's folder.

    Attributes:
        study: the folder.
        job: of its plan.
        rerun: the command that runs the job again.
    """

    def __init__(self, study: Path, job: Job) -> None:
        self.study = study
        self.job = job
        self.state_path = study / "jobs" / f"{job.id}.json"
        self.lock_path = study / "jobs" / f"{job.id}.lock"
        self.log_path = study / "logs" / f"{job.id}.log"
        self.output = study / job.output
        self.rerun = f"emp-llm run {study} --only {job.id}"

    def state(self) -> JobState | None:
        """The state of the last attempt; None if there was none, or its file is damaged."""
        try:
            return read_record(self.state_path, JobState)
        except UserError:
            return None

    def status(self) -> JobStatus:
        """What has become of the job so far; UserError if the output was made by another
        command.
        """
        state = self.state()
        if self.runner() is not None:
            return "running"
        if self.is_complete(state):
            return "done"
        if state is None:
            return "missing"
        return "stopped" if state.status in ("running", "done") else state.status

    def runner(self) -> str | None:
        """The process that works on the job, in words; None if there is none."""
        return holder_of(self.lock_path)

    def last_lines(self, count: int) -> list[str]:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 400 * count))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        lines = [quotable(line) for line in text.splitlines() if line.strip()]
        return lines[-count:] if count else []

    def is_complete(self, state: JobState | None) -> bool:
        """Whether the output is finished, given the state of the last attempt.

        Raises:
            UserError: the output was made by another command.
        """
        if not self.output.exists():
            return False
        if state is not None and state.status == "done" and state.command == self.job.command:
            return True
        made = _Made(command=None if state is None else state.command)
        if self.job.kind != "calibrate":  # its output does not tell the command
            name = {"prune": REPORT_NAME, "sweep": SWEEP_NAME}.get(self.job.kind, "")
            try:
                held = read_json(self.output / name, limit=REPORT_LIMIT)
                made = converted(held, _Made, str(self.output))
            except UserError:
                return False
        other = made.command if made.command != self.job.command else None
        # The program may differ.
        if other is not None and other.partition(" ")[2] != shlex.join(self.job.arguments):
            raise UserError(
                f"{self.output}: it was made by another command than this plan's "
                f"({quotable(other)}). Move it away."
            )
        # A sweep is finished only if its command said so.
        return made.complete and self.job.kind != "sweep"


def launch_of(
    job: Job,
    *,
    gpus: Sequence[int] | None = None,
    threads: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of a job's process, for the study's folder.

    Args:
        gpus: numbers of the GPUs that the job may use, counted among those that the environment
            shows; None: as the environment says. A job that needs no GPU sees none.
        threads: number of cores; None: as the environment says.
        environment: variables of this process.
    """
    words = [sys.executable, "-m", "emp_llm", job.kind, *job.arguments[1:]]
    variables = dict(environment)
    if job.needs.gpus == 0:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif gpus is not None:
        shown = environment.get("CUDA_VISIBLE_DEVICES")
        names = None if shown is None else [name.strip() for name in shown.split(",")]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(
            str(number) if names is None else names[number] for number in gpus
        )
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return words, variables


class Attempt:
    """A job that runs from its construction on, with lock, log and state. It has ended if another
    process has just finished it.

    Args:
        study: folder of the study.
        job: of its plan.
        gpus: numbers of the GPUs for it; None: as the environment says.
        threads: cores for it; None: as the environment says.

    Attributes:
        files: the job's state, lock, log and output.

    Raises:
        UserError: another process works on the job, or its files cannot be written.
    """

    def __init__(
        self, study: Path, job: Job, gpus: Sequence[int] | None = None, threads: int | None = None
    ) -> None:
        self.files = files = JobFiles(study, job)
        self._process: subprocess.Popen[bytes] | None = None  # while it runs
        self._stopped: float | None = None
        for path in (files.lock_path, files.log_path, files.output):
            with writable(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(files.lock_path, job.id)
        self._lock.acquire(_GLANCE)
        try:
            before = files.state()
            self._state = before or JobState(
                id=job.id, command=job.command, status="done", attempts=0
            )
            if files.is_complete(before):  # by another process, which held the lock until now
                self._state.status = "done"
                self._lock.release()
                return
            words, environment = launch_of(job, gpus=gpus, threads=threads)
            self._state = JobState(
                id=job.id,
                command=job.command,
                status="running",
                attempts=self._state.attempts + 1,
                host=socket.gethostname(),
                pid=os.getpid(),
                scheduler_job=next(
                    (os.environ[name] for name in _SCHEDULERS if name in os.environ), None
                ),
                seconds=self._state.seconds,
            )
            with writable(files.state_path):
                self._state.save(files.state_path)
            self._began = time.monotonic()
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._log(
                f"--- attempt {self._state.attempts}, {self._state.host}, {now}: {job.command}"
            )
            with files.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    words,
                    cwd=study,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # It shares the lock: if this process is killed, it stays until that has ended.
                    pass_fds=[self._lock.descriptor],
                    start_new_session=True,  # Ctrl-C reaches it once, through this process
                )
        except BaseException:
            self._lock.release()
            raise

    def poll(self) -> JobState | None:
        """The state of the finished job; None while it runs. UserError if the state cannot be
        written.
        """
        if self._process is None:
            return self._state
        if self._stopped is not None and time.monotonic() - self._stopped > _PATIENCE:
            self.kill()
        code = self._process.poll()
        if code is None:
            return None
        self._process = None
        state = self._state
        state.exit_code = 128 - code if code < 0 else code
        state.last_seconds = time.monotonic() - self._began
        state.seconds += state.last_seconds
        if code == 0:
            written = self.files.output.exists()
            state.status = "done" if written else "failed"
            state.message = (
                ""
                if written
                else f"the command ended well, but did not write {self.files.job.output}"
            )
        else:
            resumes = self._stopped is not None or state.exit_code in (130, 143, LOST_CODE)
            state.status = "stopped" if resumes else "failed"
            state.message = "".join(self.files.last_lines(1))
            if code < 0 and state.exit_code != 143:  # a process that fails itself says why
                name = signal.Signals(-code).name
                reason = "; the machine may have too little memory" if name == "SIGKILL" else ""
                state.message = f"the process was ended by {name}{reason}. {RESUMES}"
                self._log(state.message)
        try:
            with writable(self.files.state_path):
                state.save(self.files.state_path)
        finally:
            self._lock.release()
        return state

    def stop(self) -> None:
        """Ask the command to end where it can resume."""
        if self._process is not None and self._stopped is None:
            self._stopped = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the command and all its processes at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _log(self, line: str) -> None:
        with self.files.log_path.open("ab") as log:
            log.write(f"{line}\n".encode())


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an error of the system into a sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}).") from error
