"""`emp-llm submit`: the jobs of a study as arrays of Slurm."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.jobs.submitting import SubmitOptions

if TYPE_CHECKING:
    from emp_llm.cluster.slurm.submission import SubmitSummary


@takes(SubmitOptions)
def submit(options: SubmitOptions) -> "SubmitSummary":
    """Submit the jobs of a study that are neither done nor queued, as job arrays of Slurm with their dependencies.

    Jobs with equal needs share an array. Before its time limit a job is stopped and queued again, and resumes. The scripts are
    written to STUDY/slurm. The same command submits what failed, and never a job twice.

    Returns the arrays and their numbers.
    """
    from emp_llm.cluster.slurm.submission import submit_study

    return submit_study(options)


def show(summary: "SubmitSummary") -> None:
    """Print the arrays; for a dry run also their scripts."""
    from emp_llm.cluster.slurm.submission import submit_words

    print(submit_words(summary))


callable_module(__name__)

if __name__ == "__main__":
    run(submit, show)
