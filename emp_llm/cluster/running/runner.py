"""One attempt of a job: its command in a process of its own, with lock, log and state."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from emp_llm.checkpoint.locks import FileLock
from emp_llm.cluster.plan_file import Job
from emp_llm.cluster.running.job_files import BEAT, JobFiles, JobState
from emp_llm.cluster.running.launch import exit_code_of, launch_words
from emp_llm.common.errors import UserError
from emp_llm.lifelines.peer import LOST_CODE

logger = logging.getLogger(__name__)
_GLANCE = 0.5  # seconds: one who looks who holds a lock holds it for a moment
_PATIENCE = 100.0  # seconds that a command has to end after SIGTERM
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")  # variables with the number of the scheduler's job


class Attempt:
    """A job that runs, from its construction on. If another process has just finished it, it has ended already.

    Args:
        study: folder of the study.
        job: of its plan.
        gpus: numbers of the GPUs that it may use; None: all that are visible.
        threads: cores for all its processes; None: as the environment says.
        environment: of this process.

    Attributes:
        files: of the job.

    Raises:
        UserError: another process works on the job, or its files cannot be written.
    """

    def __init__(
        self,
        study: Path,
        job: Job,
        gpus: Sequence[int] | None = None,
        threads: int | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.files = JobFiles(study, job)
        self._stopping: float | None = None
        self._ended: JobState | None = None
        for path in (self.files.lock_path, self.files.log_path, self.files.output):
            _make_folder(path.parent)
        self._lock = FileLock(self.files.lock_path, job.id)
        self._lock.acquire(_GLANCE)
        try:
            before = self.files.state()
            if self.files.is_complete(before):  # by another process, which held the lock until now
                self._ended = before or JobState(id=job.id, command=job.command, status="done")
                self._ended.status = "done"
                self._lock.release()
            else:
                self._start(before, gpus, threads, environment)
        except BaseException:
            self._lock.release()
            raise

    def _start(
        self, before: JobState | None, gpus: Sequence[int] | None, threads: int | None, environment: Mapping[str, str]
    ) -> None:
        job = self.files.job
        words, variables = launch_words(job, gpus=gpus, threads=threads, environment=environment)
        scheduler = next((environment[name] for name in _SCHEDULERS if name in environment), None)
        self._state = JobState(
            id=job.id,
            command=job.command,
            status="running",
            attempts=1 if before is None else before.attempts + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            scheduler_job=scheduler,
            seconds=0.0 if before is None else before.seconds,
        )
        self._save()
        self._began = self._beat = time.monotonic()
        with self.files.log_path.open("ab") as log:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            log.write(f"--- attempt {self._state.attempts}, {self._state.host}, {now}: {job.command}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                words,
                cwd=self.files.study,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lock.descriptor],  # if this process is killed, the lock stays until the command has ended
                start_new_session=True,  # Ctrl-C reaches it once, through this process
            )

    def poll(self) -> JobState | None:
        """The state of the finished job; None while it runs. UserError if the state cannot be written."""
        if self._ended is not None:
            return self._ended
        now = time.monotonic()
        if now - self._beat > BEAT:
            self._beat = now
            with suppress(OSError):
                os.utime(self.files.lock_path)
        if self._stopping is not None and now - self._stopping > _PATIENCE:
            self.kill()
        code = self._process.poll()
        return None if code is None else self._finish(code)

    def wait(self) -> JobState:
        """The state of the job when it has ended."""
        return self._ended or self._finish(self._process.wait())

    def stop(self) -> None:
        """Ask the command to end where it can go on later."""
        if self._stopping is None and self._ended is None:
            self._stopping = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the command and all its processes at once."""
        if self._ended is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _finish(self, returncode: int) -> JobState:
        state, files = self._state, self.files
        code = exit_code_of(returncode)
        state.exit_code = code
        state.seconds += time.monotonic() - self._began
        if code == 0 and not files.output.exists():
            state.status, state.message = "failed", f"the command ended well, but did not write {files.job.output}"
        elif code == 0:
            state.status = "done"
        elif code in (130, 143, LOST_CODE) or self._stopping is not None:
            state.status, state.message = "stopped", next(iter(files.last_lines(1)), "")
        else:
            state.status = "failed"
            state.message = next(iter(files.last_lines(1)), "")
        self._ended = state
        try:
            self._save()
        finally:
            self._lock.release()
        return state

    def _save(self) -> None:
        try:
            self._state.save(self.files.state_path)
        except OSError as error:
            raise UserError(f"{self.files.state_path}: cannot be written ({error.strerror}).") from error


def follow(study: Path, job: Job) -> None:
    """Start the processes of a node that is not the job's first, and wait for them. Lock, log and state are the first node's.

    Raises:
        SystemExit: they failed; with their exit code.
    """
    words, variables = launch_words(job)
    process = subprocess.Popen(words, cwd=study, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = exit_code_of(process.wait())
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE)
        raise
    if code != 0:
        sys.exit(code)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: the folder cannot be made ({error.strerror}).") from error
