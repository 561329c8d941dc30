"""`emp-llm run`: all jobs of a plan on this machine, or one of them for a scheduler."""

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from emp_llm.cli import command
from emp_llm.cluster.jobs import Attempt, Job, JobFiles, JobState, read_plan
from emp_llm.common.declared import Opt
from emp_llm.common.errors import UserError, count_of, quotable, shortened_list
from emp_llm.common.machine import available_cores
from emp_llm.common.progress import progress_bar
from emp_llm.common.ranks import LOST_CODE
from emp_llm.options.jobs import StudyFolder

logger = logging.getLogger(__name__)
_TICK = 0.1  # seconds between two looks at the running jobs
_LOOK = 5.0  # seconds between two looks at jobs that other processes run
_ENOUGH = 2  # failures for one reason, after which no job of the kind is started
_WRONG_INPUT = 2  # exit code


@dataclass
class RunSummary:
    """What became of the jobs of a run.

    Attributes:
        done: ids of the jobs that are done.
        failed: states of the jobs that failed; stopped: of those that were stopped and resume when
            they are run again.
        waiting: ids of the jobs that did not run, because one that comes first failed, or those
            of their kind fail for one reason.
        elsewhere: ids of the jobs that another process runs, with --only.
    """

    done: list[str] = field(default_factory=list)
    failed: list[JobState] = field(default_factory=list)
    stopped: list[JobState] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not (self.failed or self.stopped or self.waiting or self.elsewhere)


@command
def run(
    study: StudyFolder,
    *,
    workers: Annotated[
        int | None,
        Opt(
            "Jobs at a time, which divide the GPUs and cores; default: one for each GPU, else one.",
            minimum=1,
        ),
    ] = None,
    only: Annotated[
        str | None, Opt("Ids of the jobs to run, separated by commas; default: all.")
    ] = None,
) -> RunSummary:
    """Run the jobs of a plan on this machine, several at a time, each in a process of its own.

    Jobs that are done are left out. The same command resumes a study that was killed, or in which
    a job failed. The outputs, states and logs are those of a study on a cluster. With --only, a
    scheduler's task runs one job.

    Returns the ids of the jobs that are done, and the states of those that failed.
    """
    plan = {job.id: job for job in read_plan(study)}
    jobs = [plan[name] for name in (plan if only is None else _named(only, plan))]
    machine = _machine(jobs, workers, only is not None)
    done = [job.id for job in jobs if JobFiles(study, job).status() == "done"]
    summary = RunSummary(list(done))
    left = {job.id: job for job in jobs if job.id not in done}
    if done:
        logger.info("%s of %d done before.", count_of(len(done), "job"), len(jobs))
    running: dict[str, Attempt] = {}
    gpus: dict[str, list[int]] = {}  # of the running jobs
    finished = set(done)
    lost = set[str]()
    hopeless = set[str]()  # kinds of jobs, none of which would succeed
    elsewhere = set[str]()
    looked = -_LOOK

    def start(job: Job) -> None:
        """Start a job if there is room, unless it is done by now, or another process runs it."""
        free = [gpu for gpu in machine.gpus or [] if not any(gpu in gpus[name] for name in running)]
        gpus_of_job = machine.gpus_of(job)
        if len(free) < gpus_of_job or len(running) >= machine.workers:
            return
        files = JobFiles(study, job)
        status = files.status()
        if status not in ("done", "running"):
            gpus[job.id] = free[:gpus_of_job]
            try:
                given = None if machine.gpus is None else gpus[job.id]
                running[job.id] = Attempt(study, job, given, machine.threads)
            except UserError:
                if files.runner() is None:
                    raise
                status = "running"  # another process was faster
            else:
                del left[job.id]
                shown = ", ".join(map(str, gpus[job.id]))
                logger.info("%s: started%s.", job.id, f" on GPU {shown}" if shown else "")
                return
        if status == "done" or only is not None:
            del left[job.id]
            finished.add(job.id)
            (summary.done if status == "done" else summary.elsewhere).append(job.id)
        elif job.id not in elsewhere:
            elsewhere.add(job.id)
            logger.info(
                "%s: %s works on it; waiting for that.", job.id, files.runner() or "another process"
            )

    try:
        with progress_bar(len(jobs), study.resolve().name, " jobs") as bar:
            bar.update(len(done))
            while left or running:
                look = time.monotonic() - looked > _LOOK
                looked = time.monotonic() if look else looked
                for job in list(left.values()):
                    if job.kind in hopeless or not lost.isdisjoint(job.after):
                        del left[job.id]
                        lost.add(job.id)
                        summary.waiting.append(job.id)
                        continue
                    for name in job.after:
                        # --only leaves it out.
                        if name not in finished and name not in left and name not in running:
                            if JobFiles(study, plan[name]).status() != "done":
                                raise UserError(
                                    f"{job.id} waits for {name}, which is not done. Run that first."
                                )
                            finished.add(name)
                    if finished.issuperset(job.after) and (look or job.id not in elsewhere):
                        start(job)
                if not left and not running:
                    break
                time.sleep(_TICK)
                for name, attempt in list(running.items()):
                    state = attempt.poll()
                    if state is not None:
                        del running[name]
                        (finished if state.status == "done" else lost).add(name)
                        _note(state, attempt.files, summary)
                        bar.update(1)
                        kind = attempt.files.job.kind
                        if kind not in hopeless and _fails_for_all(kind, plan, summary):
                            hopeless.add(kind)
                            _note_hopeless(kind, state, left.values())
    except BaseException:
        _stop(running)
        raise
    return summary


def _named(text: str, plan: dict[str, Job]) -> list[str]:
    """The ids in --only, in the order of the plan; UserError for one that the plan does not
    have.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = next((name for name in names if name not in plan), None)
    if unknown is not None or not names:
        raise UserError(
            f"--only {text}: the plan has no job {quotable(unknown or '')!r}; emp-llm "
            "status lists its jobs."
        )
    return [name for name in plan if name in names]


def _note(state: JobState, files: JobFiles, summary: RunSummary) -> None:
    """Add a job that has ended to the summary and to the log."""
    if state.status == "done":
        summary.done.append(state.id)
        together = f" ({state.seconds:.1f} s in {state.attempts} attempts)"
        logger.info(
            "%s: done in %.1f s%s.",
            state.id,
            state.last_seconds,
            together if state.attempts > 1 else "",
        )
        return
    (summary.stopped if state.status == "stopped" else summary.failed).append(state)
    logger.error(
        "%s: %s with exit code %s: %s",
        state.id,
        state.status,
        state.exit_code,
        quotable(state.message),
    )
    resumes = (
        "it resumes when it is run again"
        if state.status == "stopped"
        else f"its log: {files.log_path}; to run it again"
    )
    logger.error("  %s: %s", resumes, files.rerun)


def _fails_for_all(kind: str, plan: Mapping[str, Job], summary: RunSummary) -> bool:
    """Whether several jobs of a kind failed with wrong input, all for one reason, and none of the
    kind is done: the others would fail too.
    """
    failed = [state for state in summary.failed if plan[state.id].kind == kind]
    reasons = {
        (state.exit_code, state.message.replace(plan[state.id].output, "")) for state in failed
    }
    return (
        len(failed) >= _ENOUGH
        and len(reasons) == 1
        and failed[0].exit_code == _WRONG_INPUT
        and not any(plan[name].kind == kind for name in summary.done)
    )


def _note_hopeless(kind: str, state: JobState, left: Iterable[Job]) -> None:
    """Log that the other jobs of a kind are not started."""
    others = sum(job.kind == kind for job in left)
    if others:
        logger.error(
            "%s not started: those before failed for one reason (%s). Mend it, and run the same "
            "command.",
            count_of(others, f"{kind} job"),
            quotable(state.message.removeprefix("error: ").rstrip(".")),
        )


def _stop(running: dict[str, Attempt]) -> None:
    """Ask all running commands to end, and wait for them; on a second signal, kill them."""
    for attempt in running.values():
        attempt.stop()
    if running:
        logger.info("stopping %s; the same command resumes them.", shortened_list(list(running)))
    try:
        while running:
            for name, attempt in list(running.items()):
                try:
                    if attempt.poll() is not None:
                        del running[name]
                except UserError as error:  # its state cannot be written
                    logger.error("%s", error)
                    del running[name]
            time.sleep(_TICK)
    except BaseException:
        for attempt in running.values():
            attempt.kill()
        for attempt in running.values():
            attempt.poll()
        raise


class Machine(NamedTuple):
    """What the jobs of a run share.

    Attributes:
        workers: number of jobs at the same time.
        gpus: their numbers; None: a scheduler has divided the machine already, and each job may use
            all of it.
        threads: cores of a job; None: the scheduler or OMP_NUM_THREADS has set their number.
    """

    workers: int
    gpus: list[int] | None
    threads: int | None

    def gpus_of(self, job: Job) -> int:
        """The number of GPUs that a job gets: those of its plan, or a worker's part of all."""
        count = len(self.gpus or [])
        wanted = job.needs.gpus
        return min(count, max(1, count // self.workers) if wanted is None else wanted)


def _machine(jobs: Sequence[Job], workers: int | None, scheduled: bool) -> Machine:
    """This machine, for some jobs.

    Args:
        workers: number of jobs at the same time; None: one for each GPU, or one.
        scheduled: a scheduler has chosen the machine for the job.
    """
    if scheduled:
        return Machine(workers or 1, None, None)
    gpus: list[int] = []
    if any(job.needs.gpus != 0 for job in jobs):
        import torch

        gpus = list(range(torch.cuda.device_count()))
    short = [job.id for job in jobs if (job.needs.gpus or 0) > len(gpus)]
    if short:
        logger.warning(
            "warning: planned for more GPUs than this machine has (%s), and run on what is there: "
            "%s.",
            len(gpus) or "none",
            shortened_list(short),
        )
    workers = workers or max(1, len(gpus))
    given = "OMP_NUM_THREADS" in os.environ
    return Machine(workers, gpus, None if given else max(1, available_cores() // workers))


def show(summary: RunSummary) -> None:
    """Print the number of jobs by what became of them.

    Exit codes: 1 if a job failed; 75 if the others only need to be run again, which a scheduler may
    do.
    """
    kinds = ("failed", summary.failed), ("stopped", summary.stopped), ("not run", summary.waiting)
    words = [
        f"{len(jobs)} {kind}"
        for kind, jobs in (*kinds, ("run by another process", summary.elsewhere))
        if jobs
    ]
    print(", ".join([f"{count_of(len(summary.done), 'job')} done", *words]))
    if not summary.complete:
        sys.exit(LOST_CODE if summary.stopped and not summary.failed else 1)
