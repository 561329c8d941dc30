"""`emp-llm collect`: the finished results of a study -> tables and a report."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.jobs.studies import CollectOptions

if TYPE_CHECKING:
    from emp_llm.cluster.collecting.collect_study import CollectSummary


@takes(CollectOptions)
def collect(options: CollectOptions) -> "CollectSummary":
    """Collect the results of a study so far: tables beside the paper's values, as Markdown and CSV, and the HTML report.

    It may run at any time, also while jobs write. Tables of a part of the study say what is missing. The same results give the
    same bytes, wherever the jobs ran.

    Returns the tables, and what is missing.
    """
    from emp_llm.cluster.collecting.collect_study import collect_study

    return collect_study(options)


def show(summary: "CollectSummary") -> None:
    """Print the tables and their location."""
    from emp_llm.cluster.collecting.collect_study import collected_words

    print(collected_words(summary))


callable_module(__name__)

if __name__ == "__main__":
    run(collect, show)
