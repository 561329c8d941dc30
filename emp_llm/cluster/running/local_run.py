"""`emp-llm run`: the jobs of a plan on this machine, in the order of their dependencies, several at a time."""

import logging
import time
from dataclasses import dataclass, field

from emp_llm.cluster.plan_file import Job, read_plan
from emp_llm.cluster.running.job_files import JobFiles, JobState
from emp_llm.cluster.running.launch import node_of
from emp_llm.cluster.running.machine import Machine, MachinePart
from emp_llm.cluster.running.runner import Attempt, follow
from emp_llm.common.errors import UserError, count_of, quotable, shortened_list
from emp_llm.common.progress import progress_bar
from emp_llm.options.jobs.studies import RunOptions

logger = logging.getLogger(__name__)
_TICK = 0.1  # seconds between two looks at the running jobs
_LOOK = 5.0  # seconds between two looks at jobs that other processes run


@dataclass
class RunSummary:
    """What became of the jobs of a run.

    Attributes:
        done: ids of the jobs that are done; skipped: how many of them were done before.
        failed: states of the jobs that failed; stopped: of those that were stopped and go on when they are run again.
        waiting: ids of the jobs that did not run, because one that comes first failed.
        elsewhere: ids of the jobs that another process runs, with --only.
    """

    done: list[str] = field(default_factory=list)
    skipped: int = 0
    failed: list[JobState] = field(default_factory=list)
    stopped: list[JobState] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not (self.failed or self.stopped or self.waiting or self.elsewhere)


class LocalRun:
    """A run of a plan's jobs.

    Args:
        options: of the command.

    Raises:
        UserError: the plan is wrong, an output was made by another command, or there are not enough GPUs.
    """

    def __init__(self, options: RunOptions) -> None:
        self._study = options.study
        plan = read_plan(options.study)
        self._plan = {job.id: job for job in plan}
        self._jobs = plan if options.only is None else [self._plan[name] for name in _named(options.only, self._plan)]
        self._only = options.only is not None
        self._machine = Machine.found(self._jobs, options.workers, self._only)
        self._elsewhere: set[str] = set()
        self.summary = RunSummary()
        self._left = {}
        for job in self._jobs:
            if JobFiles(options.study, job).status() == "done":
                self.summary.done.append(job.id)
            else:
                self._left[job.id] = job
        self.summary.skipped = len(self.summary.done)
        self._finished = set(self.summary.done)
        self._running: list[tuple[Attempt, MachinePart]] = []
        self._looked = -_LOOK

    def run(self) -> RunSummary:
        """Run the jobs. A signal stops the running ones, so that the same command goes on.

        Of a job of several nodes, this one may be another than the first: then it only starts its processes.
        """
        if self._only and len(self._jobs) == 1 and node_of(self._jobs[0])[0] > 0:
            for job in self._left.values():
                follow(self._study, job)
            return self.summary
        if self.summary.skipped:
            logger.info("%s of %d done before.", count_of(self.summary.skipped, "job"), len(self._jobs))
        try:
            with progress_bar(len(self._jobs), self._study.resolve().name, " jobs") as bar:
                bar.update(self.summary.skipped)
                while self._left or self._running:
                    self._start_ready()
                    if not self._running and not self._left:
                        break
                    time.sleep(_TICK)
                    bar.update(self._finish_ended())
        except BaseException:
            self._stop()
            raise
        return self.summary

    def _start_ready(self) -> None:
        """Start the jobs that can run now; drop those that never can."""
        look = time.monotonic() - self._looked > _LOOK
        if look:
            self._looked = time.monotonic()
        for job in list(self._left.values()):
            if any(name in self._lost for name in job.after):
                del self._left[job.id]
                self.summary.waiting.append(job.id)
                continue
            if not all(self._is_done(name) for name in job.after):
                self._check_comes(job)
                continue
            if look or job.id not in self._elsewhere:
                self._start(job)

    def _check_comes(self, job: Job) -> None:
        """Raise UserError if a job waits for one that this run does not include."""
        coming = {*self._left, *(attempt.files.job.id for attempt, _ in self._running), *self._finished}
        first = next((name for name in job.after if name not in coming), None)
        if self._only and first is not None:
            raise UserError(f"{job.id} waits for {first}, which is not done. Run that first.")

    def _start(self, job: Job) -> None:
        """Start a job, unless it is done by now, another process runs it, or the machine is busy."""
        files = JobFiles(self._study, job)
        share = self._machine.take(job)
        if share is None:
            return
        status = files.status()
        try:
            if status not in ("done", "running"):
                self._running.append((Attempt(self._study, job, share.gpus, share.threads), share))
                del self._left[job.id]
                logger.info("%s: started%s.", job.id, share.words)
                return
        except UserError:
            if files.runner() is None:
                raise
            status = "running"  # another process was faster
        finally:
            if not self._running or self._running[-1][1] is not share:
                self._machine.give_back(share)
        if status == "done" or self._only:
            del self._left[job.id]
            self._finished.add(job.id)
            (self.summary.done if status == "done" else self.summary.elsewhere).append(job.id)
        elif job.id not in self._elsewhere:
            self._elsewhere.add(job.id)
            logger.info("%s: %s works on it; waiting for that.", job.id, files.runner() or "another machine")

    @property
    def _lost(self) -> set[str]:
        return {state.id for state in self.summary.failed + self.summary.stopped} | set(self.summary.waiting)

    def _is_done(self, name: str) -> bool:
        if name not in self._finished and name not in self._left and JobFiles(self._study, self._plan[name]).status() == "done":
            self._finished.add(name)
        return name in self._finished

    def _finish_ended(self) -> int:
        """Note the jobs that have ended; returns their number."""
        ended = 0
        for attempt, share in list(self._running):
            state = attempt.poll()
            if state is None:
                continue
            self._running.remove((attempt, share))
            self._machine.give_back(share)
            ended += 1
            self._note(state, attempt.files)
        return ended

    def _note(self, state: JobState, files: JobFiles) -> None:
        if state.status == "done":
            self.summary.done.append(state.id)
            self._finished.add(state.id)
            logger.info("%s: done in %.1f s.", state.id, state.seconds)
            return
        if state.status == "stopped":
            self.summary.stopped.append(state)
            logger.error("%s: stopped with exit code %s: %s", state.id, state.exit_code, quotable(state.message))
            logger.error("  it goes on when it is run again: %s", files.rerun)
            return
        self.summary.failed.append(state)
        logger.error("%s: failed with exit code %s: %s", state.id, state.exit_code, quotable(state.message))
        logger.error("  its log: %s; to run it again: %s", files.log_path, files.rerun)

    def _stop(self) -> None:
        """Ask all running commands to end, and wait for them."""
        for attempt, _ in self._running:
            attempt.stop()
        if self._running:
            names = [attempt.files.job.id for attempt, _ in self._running]
            logger.info("stopping %s; the same command goes on with them.", shortened_list(names))
        try:
            while self._running:
                self._running = [(attempt, share) for attempt, share in self._running if not _ended(attempt)]
                time.sleep(_TICK)
        except BaseException:  # a second signal
            for attempt, _ in self._running:
                attempt.kill()
            for attempt, _ in self._running:
                attempt.wait()
            raise


def _ended(attempt: Attempt) -> bool:
    """Whether a job that is being stopped has ended, also if its state cannot be written."""
    try:
        return attempt.poll() is not None
    except UserError as error:
        logger.error("%s", error)
        return True


def _named(text: str, plan: dict[str, Job]) -> list[str]:
    """The ids in --only; UserError for one that the plan does not have."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = next((name for name in names if name not in plan), None)
    if unknown is not None or not names:
        raise UserError(f"--only {text}: the plan has no job {quotable(unknown or '')!r}; emp-llm status lists its jobs.")
    return [name for name in plan if name in names]
