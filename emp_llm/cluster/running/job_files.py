"""The files of a job in its study: its state, its lock, its log, and its output."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from uuid import uuid4

import msgspec

from emp_llm.checkpoint.locks import holder_of
from emp_llm.cluster.plan_file import Job, shell_words
from emp_llm.common.errors import UserError, quotable
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME
from emp_llm.records.base import FileRecord, read_record

JobStatus = Literal["done", "running", "stopped", "failed", "missing"]
_SILENT = 120.0  # seconds after which a job on another machine, without a lock that can be seen here, has died
BEAT = 20.0  # seconds between two signs of life


class JobState(FileRecord, kw_only=True, omit_defaults=False):
    """What the last attempt of a job has come to.

    Attributes:
        command: that ran.
        status: "running" also after the runner was killed.
        attempts: their number.
        host, pid: of the runner.
        scheduler_job: of the scheduler; null without one.
        exit_code: of the command; null while it runs. message: why it failed.
        seconds: of all finished attempts together.
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


class _Made(msgspec.Struct):
    """The part of an output that tells its command."""

    command: str | None = None
    complete: bool = True


@dataclass(frozen=True)
class JobFiles:
    """The files of a job.

    Attributes:
        study: folder of the study.
        job: of its plan.
    """

    study: Path
    job: Job

    @property
    def state_path(self) -> Path:
        return self.study / "jobs" / f"{self.job.id}.json"

    @property
    def lock_path(self) -> Path:
        return self.study / "jobs" / f"{self.job.id}.lock"

    @property
    def log_path(self) -> Path:
        return self.study / "logs" / f"{self.job.id}.log"

    @property
    def output(self) -> Path:
        return self.study / self.job.output

    @property
    def rerun(self) -> str:
        """The command that runs the job again."""
        return f"emp-llm run {self.study} --only {self.job.id}"

    def state(self) -> JobState | None:
        """The state of the last attempt; None if there was none, or its file is damaged."""
        try:
            return read_record(self.state_path, JobState)
        except UserError:
            return None

    def status(self) -> JobStatus:
        """What has become of the job so far.

        Raises:
            UserError: the output was made by another command.
        """
        state = self.state()
        if self._is_running(state):
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
        if count == 0:
            return []
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 400 * count))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [quotable(line) for line in text.splitlines() if line.strip()][-count:]

    def _is_running(self, state: JobState | None) -> bool:
        """Whether a process works on the job: by its lock, or on a file system without locks by its signs of life."""
        if self.runner() is not None:
            return True
        if state is None or state.status != "running" or state.host == os.uname().nodename:
            return False
        try:
            return server_time(self.lock_path.parent) - self.lock_path.stat().st_mtime < _SILENT
        except OSError:
            return False

    def is_complete(self, state: JobState | None) -> bool:
        """Whether the output is finished, given the state of the last attempt.

        Raises:
            UserError: the output was made by another command.
        """
        if not self.output.exists():
            return False
        if state is not None and state.status == "done" and state.command == self.job.command:
            return True
        made = self._made()
        command = state.command if made is None and state is not None else None if made is None else made.command
        if command not in (None, self.job.command) and _arguments(command or "") != self.job.arguments:
            raise UserError(
                f"{self.output}: it was made by another command than this plan's ({quotable(command or '')}). Move it away, or "
                "write the plan that it belongs to."
            )
        if self.job.kind == "sweep":  # a sweep is finished only if its command said so
            return False
        return made is None or made.complete

    def _made(self) -> _Made | None:
        """The command that made the output, as the output says; None if it cannot tell."""
        name = {"prune": REPORT_NAME, "sweep": SWEEP_NAME}.get(self.job.kind)
        path = self.output if name is None else self.output / name
        if self.job.kind == "calibrate":
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Made)
        except (OSError, msgspec.DecodeError):
            return _Made(complete=False)


def _arguments(command: str) -> list[str]:
    """The words of a command after the program."""
    try:
        return shell_words(command)[1:]
    except ValueError:
        return [command]


def server_time(folder: Path) -> float:
    """The clock of a folder's file server, in seconds, by a file that is written and deleted."""
    path = folder / f".{uuid4().hex}.now"
    try:
        path.touch()
        return path.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        path.unlink(missing_ok=True)
