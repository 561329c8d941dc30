"""`emp-llm status`: what is done, running, failed and missing of a study."""

import logging
from dataclasses import dataclass
from pathlib import Path

from emp_llm.cluster.plan_file import Job, read_plan
from emp_llm.cluster.running.job_files import JobFiles, JobState
from emp_llm.cluster.slurm.notes import Notes
from emp_llm.common.errors import UserError, count_of, quotable, shortened_list
from emp_llm.common.tables import table

ORDER = ("done", "running", "queued", "stopped", "failed", "missing")
logger = logging.getLogger(__name__)
_NAMES = 6  # jobs to list in a line


@dataclass(frozen=True)
class JobView:
    """A job with what has become of it.

    Attributes:
        files: of the job.
        status: of the job; "queued" if it waits in Slurm; "foreign" if its output was made by another command.
        state: of its last attempt.
        message: why it failed, or is foreign.
    """

    files: JobFiles
    status: str
    state: JobState | None
    message: str = ""

    @property
    def job(self) -> Job:
        return self.files.job


@dataclass(frozen=True)
class StudyStatus:
    """The jobs of a study, in the order of its plan.

    Attributes:
        study: its folder.
        views: of its jobs.
        log_lines: of each failed job.
    """

    study: Path
    views: list[JobView]
    log_lines: int = 0

    @property
    def complete(self) -> bool:
        return all(view.status == "done" for view in self.views)

    def of(self, status: str) -> list[JobView]:
        """The jobs of a status."""
        return [view for view in self.views if view.status == status]


def study_status(study: Path, log_lines: int = 0) -> StudyStatus:
    """Look at all jobs of a study; nothing is changed.

    Raises:
        UserError: the plan is wrong.
    """
    plan, queued = read_plan(study), _queued(study)
    return StudyStatus(study, [_view(JobFiles(study, job), job.id in queued) for job in plan], log_lines)


def _queued(study: Path) -> set[str]:
    """Ids of the jobs in Slurm's queue; none if nothing was submitted, or Slurm does not answer."""
    try:
        return set(Notes(study.resolve()).queued())
    except UserError as error:
        logger.warning("warning: %s", error)
        return set()


def _view(files: JobFiles, queued: bool) -> JobView:
    state = files.state()
    try:
        status = files.status()
    except UserError as error:
        return JobView(files, "foreign", state, str(error))
    if queued and status in ("missing", "stopped", "failed"):
        return JobView(files, "queued", state)
    return JobView(files, status, state, state.message if state is not None and status == "failed" else "")


def status_words(status: StudyStatus) -> str:
    """The number of jobs by kind and status, and what to know of those that are not done."""
    found = [name for name in (*ORDER, "foreign") if name == "done" or status.of(name)]
    kinds = list(dict.fromkeys(view.job.kind for view in status.views))
    rows = [["jobs", *found]]
    for kind in kinds:
        own = [view for view in status.views if view.job.kind == kind]
        rows.append([kind, *(str(sum(view.status == name for view in own) or "-") for name in found)])
    rows.append(["all", *(str(len(status.of(name)) or "-") for name in found)])
    lines = [table(rows)]
    for view in status.of("running"):
        host = f" on {view.state.host}" if view.state is not None and view.state.host else ""
        lines.append(f"running{host}: {view.job.id}{_attempts(view)}")
    for view in status.of("stopped"):
        lines.append(f"stopped, and goes on when it is run again: {view.job.id}{_attempts(view)}")
    for view in status.of("failed"):
        code = None if view.state is None else view.state.exit_code
        lines.append(f"failed with exit code {code}: {view.job.id}{_attempts(view)}")
        lines += [f"    {line}" for line in view.files.last_lines(status.log_lines)]
        lines.append(f"    log: {view.files.log_path}; to run it again: {view.files.rerun}")
    lines += [f"of another plan: {view.job.id}: {quotable(view.message)}" for view in status.of("foreign")]
    missing = status.of("missing")
    if missing:
        lost = _lost(status)
        waiting = [view.job.id for view in missing if view.job.id in lost]
        if waiting:
            lines.append(f"waiting for jobs that failed: {shortened_list(waiting, _NAMES)}")
        others = [view.job.id for view in missing if view.job.id not in lost]
        if others:
            lines.append(f"not begun: {shortened_list(others, _NAMES)}")
    seconds = sum(view.state.seconds for view in status.views if view.state is not None)
    lines.append(f"{count_of(len(status.of('done')), 'job')} of {len(status.views)} done; {seconds / 3600:.2f} hours so far")
    return "\n".join(lines)


def _attempts(view: JobView) -> str:
    return f" (attempt {view.state.attempts})" if view.state is not None and view.state.attempts > 1 else ""


def _lost(status: StudyStatus) -> set[str]:
    """Ids of the jobs that wait for one that failed."""
    lost = {view.job.id for view in status.of("failed") + status.of("foreign")}
    for view in status.views:  # those that come first stand before the others
        if lost.intersection(view.job.after):
            lost.add(view.job.id)
    return lost
