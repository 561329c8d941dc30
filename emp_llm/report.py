"""`emp-llm report`: runs, sweeps, measures and results files -> tables, figures and a page."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.commands import ReportOptions

if TYPE_CHECKING:
    from emp_llm.reporting.report_folder import ReportSummary


@takes(ReportOptions)
def report(options: ReportOptions) -> "ReportSummary":
    """Report on finished runs: the redundancy of a model by layer, the cost of each β, and EMP against its baselines.

    Each model and choice of targets has its own section; they never share a curve. The output folder holds report.html, which
    needs no other file; report.md with figures/*.svg and *.png; and CSV tables with all digits. The same input gives the same
    bytes.

    Returns the content of report.json, the names of the files, and the differences between EMP and its baselines.
    """
    from emp_llm.reporting.report_folder import write_report

    return write_report(options.runs, options.output, options.title, not options.no_plots, options.overwrite)


def show(summary: "ReportSummary") -> None:
    """Print the comparison of EMP with its baselines, and the location of the report."""
    from emp_llm.reporting.report_folder import summary_words

    print(summary_words(summary))


callable_module(__name__)

if __name__ == "__main__":
    run(report, show)
