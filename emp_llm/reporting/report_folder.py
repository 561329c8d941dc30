"""The report folder: HTML page, Markdown, figures and CSV tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from emp_llm.checkpoint.output import check_folder, write_folder
from emp_llm.common.errors import UserError, count_of, printable
from emp_llm.common.tables import Rows, csv_table, table
from emp_llm.evaluation.comparison import UNPAIRED_NOTE
from emp_llm.evaluation.values import UNPAIRED
from emp_llm.records.bench import Bench
from emp_llm.records.report_page import ReportPage, StudySummary
from emp_llm.reporting.figures import Drawing, check_matplotlib, draw, slug
from emp_llm.reporting.page import FIGURES, html_page, markdown_page, page_parts
from emp_llm.reporting.page_tables import change_rows, difference_rows, layer_fit_rows, matrix_rows, value_rows, verdicts
from emp_llm.reporting.points import read_points
from emp_llm.reporting.run_tables import speed_figures, split_benches
from emp_llm.reporting.studies import Study, studies

_SUMMARY = "report.json"


@dataclass(frozen=True)
class ReportSummary:
    """The summary of a written report.

    Attributes:
        page: the content of report.json.
        output: its folder; files: the names of its files.
        differences: for each study a table of EMP points and their baselines.
    """

    page: ReportPage
    output: Path
    files: list[str]
    differences: list[Rows]


def write_report(runs: list[Path], output: Path, title: str, plots: bool, overwrite: bool) -> ReportSummary:
    """Read runs and write their report.

    Args:
        runs: outputs of prune, sweep, measure and bench, and results files of evaluate.
        output: the folder to write.
        title: heading of the page.
        plots: whether to draw figures.
        overwrite: replace an older report.

    Raises:
        UserError: there is nothing to report, an input is none of these, the output may not be written, or matplotlib is
            missing. Inputs are checked first.
    """
    content = report_content(runs, title, plots, lambda: check_folder(output, overwrite, _SUMMARY))
    write_folder(output, content.files, overwrite, _SUMMARY)
    return ReportSummary(content.page, output, sorted(content.files), [_differences(study) for study in content.studies])


@dataclass(frozen=True)
class ReportContent:
    """A report in memory: its files by name, the content of report.json, and its studies."""

    files: dict[str, bytes]
    page: ReportPage
    studies: list[Study]


def report_content(
    runs: list[Path], title: str, plots: bool, before_drawing: Callable[[], None] | None = None
) -> ReportContent:
    """The files of a report.

    Args:
        runs, title, plots: as for `write_report`.
        before_drawing: called when the input is read.

    Raises:
        UserError: as for `write_report`.
    """
    if not runs:
        raise UserError("There is nothing to report; give run folders, a sweep, or results files.")
    others, benches = split_benches([Path(path) for path in runs])
    found = studies(read_points(others)) if others else []
    if before_drawing is not None:
        before_drawing()
    if plots:
        check_matplotlib()
    drawn = [(study, draw(study, name) if plots else []) for study, name in zip(found, _names(found), strict=True)]
    page = ReportPage(title=printable(title), studies=[_summary(*each) for each in drawn])
    return ReportContent(_files(page, drawn, benches), page, found)


def summary_words(summary: ReportSummary) -> str:
    """The comparison of EMP with its baselines as text, and the location of the report."""
    lines = []
    for study, rows in zip(summary.page.studies, summary.differences, strict=True):
        lines.append(study.title)
        if len(rows) > 1:
            lines.append(table(rows))
            lines += [UNPAIRED_NOTE] if any(UNPAIRED in cell for row in rows for cell in row) else []
        lines += study.verdicts
    lines.append(f"{count_of(len(summary.files), 'file')} in {summary.output}; open {summary.output / 'report.html'}")
    return "\n".join(lines)


def _files(page: ReportPage, drawn: Sequence[tuple[Study, list[Drawing]]], benches: list[Bench]) -> dict[str, bytes]:
    parts = page_parts(page.title, drawn, benches)
    files = {
        "report.html": html_page(page.title, parts),
        "report.md": markdown_page(parts),
    }
    if drawn:
        found = [study for study, _ in drawn]
        files["points.csv"] = csv_table(_joined([value_rows(study) for study in found])) + "\n"
        files["differences.csv"] = csv_table(_joined([change_rows(study) for study in found])) + "\n"
        files["matrices.csv"] = csv_table(_joined([matrix_rows(study) for study in found])) + "\n"
    if any(point.fits for study, _ in drawn for point in study.points):
        files["fits.csv"] = csv_table(_joined([layer_fit_rows(study) for study, _ in drawn])) + "\n"
    if benches:
        files["speeds.csv"] = csv_table(speed_figures(benches)) + "\n"
    encoded = {name: text.encode("utf-8") for name, text in files.items()}
    encoded[_SUMMARY] = msgspec.json.format(msgspec.json.encode(page), indent=1) + b"\n"
    for _, drawings in drawn:
        for drawing in drawings:
            encoded |= {f"{FIGURES}/{drawing.name}.svg": drawing.svg, f"{FIGURES}/{drawing.name}.png": drawing.png}
    return encoded


def _joined(tables: list[Rows]) -> Rows:
    """Several tables with the same heading as one table."""
    return tables[0][:1] + [row for rows in tables for row in rows[1:]]


def _differences(study: Study) -> Rows:
    tables = [difference_rows(study, suite) for suite in study.suites]
    return _joined(tables) if tables else [["EMP"]]


def _summary(study: Study, drawings: list[Drawing]) -> StudySummary:
    return StudySummary(
        title=study.title,
        model=study.model,
        targets=study.scope,
        points=[point.name for point in study.pruned],
        suites=[suite.name for suite in study.suites],
        verdicts=[sentence for suite in study.suites for sentence in verdicts(study, suite)],
        figures=[drawing.name for drawing in drawings],
    )


def _names(found: list[Study]) -> list[str]:
    """The beginning of each study's figure names: letters, digits and hyphens; numbered if there are several studies."""
    slugs = [slug(study.title) or "model" for study in found]
    return slugs if len(slugs) == 1 else [f"{number}-{name}" for number, name in enumerate(slugs, 1)]
