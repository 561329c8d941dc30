"""`emp-llm run`: all jobs of a plan on this machine, or one of them for a scheduler."""

import sys
from typing import TYPE_CHECKING

from emp_llm.cli import callable_module
from emp_llm.cli import run as run_command
from emp_llm.lifelines.peer import LOST_CODE
from emp_llm.options.base import takes
from emp_llm.options.jobs.studies import RunOptions

if TYPE_CHECKING:
    from emp_llm.cluster.running.local_run import RunSummary


@takes(RunOptions)
def run(options: RunOptions) -> "RunSummary":
    """Run the jobs of a plan on this machine, several at a time, each in a process of its own.

    Jobs that are done are left out. Killed and started again, the same command goes on where it stopped; so it does after a job
    failed. The outputs, states and logs are those of a study on a cluster. With --only, a scheduler's task runs one job.

    Returns the ids of the jobs that are done, and the states of those that failed.
    """
    from emp_llm.cluster.running.local_run import LocalRun

    return LocalRun(options).run()


def show(summary: "RunSummary") -> None:
    """Print the number of jobs by what became of them.

    Exit codes: 1 if a job failed; 75 if the others only need to be run again, which a scheduler may do.
    """
    from emp_llm.common.errors import count_of

    counts = {
        "failed": len(summary.failed),
        "stopped": len(summary.stopped),
        "not run": len(summary.waiting),
        "run by another process": len(summary.elsewhere),
    }
    words = [f"{count} {word}" for word, count in counts.items() if count]
    print(", ".join([f"{count_of(len(summary.done), 'job')} done", *words]))
    if not summary.complete:
        sys.exit(LOST_CODE if summary.stopped and not summary.failed else 1)


callable_module(__name__)

if __name__ == "__main__":
    run_command(run, show)
