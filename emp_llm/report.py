"""`emp-llm report`: runs, sweeps, measures and results files -> tables, figures and a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from emp_llm.cli import command, run
from emp_llm.options.base import Opt

if TYPE_CHECKING:
    from emp_llm.reporting.report_folder import ReportSummary


@command
def report(
    runs: Annotated[list[Path], Opt("Outputs of prune, sweep, measure and bench, and results of evaluate.", argument=True)],
    *,
    output: Annotated[Path, Opt("Folder to write.")] = Path("report"),
    overwrite: Annotated[bool, Opt("Replace an existing report at the output.")] = False,
    title: Annotated[str, Opt("Heading of the page.")] = "Effective Model Pruning",
    no_plots: Annotated[bool, Opt("Write tables only, without matplotlib.")] = False,
) -> "ReportSummary":
    """Report on finished runs: the redundancy of a model by layer, the cost of each β, and EMP against its baselines.

    Each model and choice of targets has its own section; they never share a curve. The output folder holds report.html, which
    needs no other file; report.md with figures/*.svg and *.png; and CSV tables with all digits. The same input gives the same
    bytes.

    Returns the content of report.json, the names of the files, and the differences between EMP and its baselines.
    """
    from emp_llm.reporting.report_folder import write_report

    return write_report(runs, output, title, not no_plots, overwrite)


def show(summary: "ReportSummary") -> None:
    """Print the comparison of EMP with its baselines, and the location of the report."""
    from emp_llm.reporting.report_folder import summary_words

    print(summary_words(summary))


if __name__ == "__main__":
    run(report, show)
