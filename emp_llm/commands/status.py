"""`emp-llm status`: what is done, running, failed and missing of a study."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Opt
from emp_llm.common.errors import count_of, quotable, shortened_list
from emp_llm.common.tables import table
from emp_llm.options.jobs import StudyFolder

if TYPE_CHECKING:
    from emp_llm.cluster.collecting import JobView

_ORDER = ("done", "running", "queued", "stopped", "failed", "missing", "foreign")
_NAMES = 6  # jobs to list in a line


@dataclass(frozen=True)
class StudyStatus:
    """The jobs of a study, in the order of its plan.

    Attributes:
        study: its folder.
        views: its jobs with their states.
        log_lines: number of lines of the log to show of each failed job.
    """

    study: Path
    views: "list[JobView]"
    log_lines: int = 0


@command
def status(
    study: StudyFolder,
    *,
    lines: Annotated[int, Opt("Lines of the log to show of each failed job.", minimum=0)] = 5,
) -> StudyStatus:
    """Show how many jobs of a study are done, running, failed and missing.

    Of each failed job: the last lines of its log, and the command that runs it again. Nothing is
    changed.

    Returns the jobs with their states.
    """
    from emp_llm.cluster.collecting import job_views

    return StudyStatus(study, job_views(study), lines)


def show(result: StudyStatus) -> None:
    """Print the number of jobs by kind and status, and what to know of those that are not done."""
    views = {word: [view for view in result.views if view.status == word] for word in _ORDER}
    statuses = [word for word in _ORDER if word == "done" or views[word]]
    rows = [["jobs", *statuses]]
    for kind in dict.fromkeys(view.job.kind for view in result.views):
        rows.append(
            [
                kind,
                *(
                    str(sum(view.job.kind == kind for view in views[word]) or "-")
                    for word in statuses
                ),
            ]
        )
    print(table([*rows, ["all", *(str(len(views[word]) or "-") for word in statuses)]]))
    for view in views["running"]:
        host = f" on {view.state.host}" if view.state is not None and view.state.host else ""
        print(f"running{host}: {view.job.id}{_attempts(view)}")
    for view in views["stopped"]:
        print(f"stopped, and resumes when it is run again: {view.job.id}{_attempts(view)}")
    for view in views["failed"]:
        print(
            f"failed with exit code {view.state and view.state.exit_code}: "
            f"{view.job.id}{_attempts(view)}"
        )
        for line in view.files.last_lines(result.log_lines):
            print(f"    {line}")
        print(f"    log: {view.files.log_path}; to run it again: {view.files.rerun}")
    for view in views["foreign"]:
        print(f"of another plan: {view.job.id}: {quotable(view.message)}")
    lost = {view.job.id for view in views["failed"] + views["foreign"]}
    for view in result.views:  # those that come first stand before the others
        lost |= set() if lost.isdisjoint(view.job.after) else {view.job.id}
    missing = [view.job.id for view in views["missing"]]
    if waiting := [name for name in missing if name in lost]:
        print(f"waiting for jobs that failed: {shortened_list(waiting, _NAMES)}")
    if others := [name for name in missing if name not in lost]:
        print(f"not begun: {shortened_list(others, _NAMES)}")
    seconds = sum(view.state.seconds for view in result.views if view.state is not None)
    print(
        f"{count_of(len(views['done']), 'job')} of {len(result.views)} done; "
        f"{seconds / 3600:.2f} hours so far, the attempts of all jobs added up"
    )


def _attempts(view: "JobView") -> str:
    return (
        f" (attempt {view.state.attempts})"
        if view.state is not None and view.state.attempts > 1
        else ""
    )
