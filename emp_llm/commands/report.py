"""`emp-llm report`: runs, sweeps and results files -> a page, figures and a table of points."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError, count_of


@dataclass(frozen=True)
class ReportSummary:
    """The summary of a written report.

    Attributes:
        output: its folder.
        files: the names of its files.
        text: the tables of points, for a terminal.
    """

    output: Path
    files: list[str]
    text: str


@command
def report(
    runs: Annotated[
        list[Path],
        Flag(
            "Outputs of prune, sweep, bench and evaluate; or the folder of a study.",
            argument=True,
            metavar="RUNS...",
        ),
    ],
    *,
    output: Annotated[
        Path | None, Flag("Folder to write; default: report, and of a study its tables.")
    ] = None,
    against: Annotated[
        str | None,
        Flag("Method or point that the others are compared with; default: the first."),
    ] = None,
    overwrite: Annotated[bool, Flag("Replace an existing report at the output.")] = False,
    title: Annotated[str, Flag("Heading of the page.")] = "Effective Model Pruning",
    no_plots: Annotated[bool, Flag("Write tables only, without matplotlib.")] = False,
) -> ReportSummary:
    """Report on finished runs: what each point cost, and how methods differ at the same sparsity.

    Each model and choice of targets has its own section; they never share a table or a curve. The
    output folder holds report.md with figures/*.svg and *.png, and points.csv with all digits. The
    same input gives the same bytes.

    Of a study, tables.md is added: all its results so far, with the published values below.

    Returns the names of the files, and the tables.
    """
    from emp_llm.checkpoint.output import check_folder, write_folder
    from emp_llm.reporting.page import SUMMARY, report_content
    from emp_llm.reporting.studies import read_inputs
    from emp_llm.study.plan import STUDY_NAME, read_study
    from emp_llm.study.tables import study_markdown, study_results, study_text

    if not runs:
        raise UserError("No run is given. Name outputs of prune, sweep, bench or evaluate.")
    study = runs[0] if len(runs) == 1 and (runs[0] / STUDY_NAME).is_file() else None
    output = output or (Path("report") if study is None else study / "tables")
    results = None if study is None else study_results(study, read_study(study), against)
    inputs = runs if results is None else results.inputs
    points, benches = read_inputs(inputs) if inputs else ([], [])
    check_folder(output, overwrite, SUMMARY)
    files, text = report_content(points, benches, title, not no_plots, against)
    if results is not None:
        files["tables.md"] = study_markdown(results).encode()
        text = study_text(results)
    write_folder(output, files, overwrite, SUMMARY)
    return ReportSummary(output, sorted(files), text)


def show(summary: ReportSummary) -> None:
    """Print the tables of points, and the location of the report."""
    print(summary.text)
    print(
        f"{count_of(len(summary.files), 'file')} in {summary.output}; open "
        f"{summary.output / 'report.md'}"
    )
