"""`emp-llm status`: what is done, running, failed and missing of a study."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.jobs.studies import StatusOptions

if TYPE_CHECKING:
    from emp_llm.cluster.collecting.study_status import StudyStatus


@takes(StatusOptions)
def status(options: StatusOptions) -> "StudyStatus":
    """Show how many jobs of a study are done, running, failed and missing.

    Of each failed job: the last lines of its log, and the command that runs it again. Nothing is changed.

    Returns the jobs with their states.
    """
    from emp_llm.cluster.collecting.study_status import study_status

    return study_status(options.study, options.lines)


def show(result: "StudyStatus") -> None:
    """Print the numbers of jobs, and what to know of those that are not done."""
    from emp_llm.cluster.collecting.study_status import status_words

    print(status_words(result))


callable_module(__name__)

if __name__ == "__main__":
    run(status, show)
