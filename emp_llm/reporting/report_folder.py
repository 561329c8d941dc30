"""The files of a report: HTML page, Markdown, figures and CSV tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from emp_llm.common.errors import printable
from emp_llm.common.tables import Rows, csv_table, table
from emp_llm.evaluation.comparison import UNPAIRED_NOTE
from emp_llm.evaluation.values import UNPAIRED
from emp_llm.records.bench import Bench
from emp_llm.records.report_page import ReportPage, StudySummary
from emp_llm.reporting.figures import draw
from emp_llm.reporting.page import FIGURES, html_page, markdown_page, sections
from emp_llm.reporting.page_tables import (
    Record,
    difference_records,
    difference_rows,
    fit_records,
    flat,
    matrix_records,
    value_records,
    verdict_rows,
)
from emp_llm.reporting.points import MeasuredPoint
from emp_llm.reporting.studies import studies

SUMMARY = "report.json"
NOTHING_EQUAL = "no emp point and baseline have equally many zeros, so none are compared; the page shows all points"


@dataclass(frozen=True)
class ReportContent:
    """A report in memory.

    Attributes:
        page: the content of report.json.
        files: all files by their relative names.
        text: the comparison of EMP with its baselines, for a terminal.
    """

    page: ReportPage
    files: dict[str, bytes]
    text: str


def report_content(points: Sequence[MeasuredPoint], benches: Sequence[Bench], title: str, plots: bool) -> ReportContent:
    """The files of a report.

    Args:
        points, benches: from `points.read_inputs`.
        title: heading of the page.
        plots: whether to draw figures; UserError if matplotlib is missing.
    """
    page = ReportPage(title=printable(title))
    files: dict[str, bytes] = {}
    drawn, lines = [], []
    found = studies(points)
    for number, study in enumerate(found, 1):
        drawings = draw(study, f"{number}-{study.title}" if len(found) > 1 else study.title) if plots else []
        drawn.append((study, drawings))
        for drawing in drawings:
            files |= {f"{FIGURES}/{drawing.name}.svg": drawing.svg, f"{FIGURES}/{drawing.name}.png": drawing.png}
        heading, *verdicts = verdict_rows(study)
        page.studies.append(
            StudySummary(
                title=study.title,
                model=study.model,
                targets=study.scope,
                points=[point.name for point in study.pruned],
                suites=[suite.name for suite in study.suites],
                verdicts=["; ".join(f"{name}: {cell}" for name, cell in zip(heading, row, strict=True)) for row in verdicts],
                figures=[drawing.name for drawing in drawings],
            )
        )
        tables: list[Rows] = [*(difference_rows(study, suite) for suite in study.suites), [heading, *verdicts]]
        compared = [table(rows) for rows in tables if len(rows) > 1] or [NOTHING_EQUAL]
        lines += [study.title, *compared, *([UNPAIRED_NOTE] if any(UNPAIRED in text for text in compared) else [])]
    parts = sections(page.title, drawn, benches)
    files["report.html"] = html_page(page.title, parts).encode()
    files["report.md"] = markdown_page(parts).encode()
    files[SUMMARY] = page.encoded()
    for name, records in (
        ("points.csv", [record for study in found for record in value_records(study)]),
        ("differences.csv", [record for study in found for record in difference_records(study)]),
        ("matrices.csv", [record for study in found for record in matrix_records(study)]),
        ("fits.csv", [record for study in found for record in fit_records(study)]),
        ("speeds.csv", [flat(bench.as_dict()) for bench in benches]),
    ):
        if records:
            files[name] = _csv(records)
    return ReportContent(page, files, "\n".join(lines))


def _csv(records: list[Record]) -> bytes:
    """Rows with all digits, under the names of their columns; what a row lacks is empty."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    rows = [[record.get(name) for name in columns] for record in records]
    cells = [[str(value).lower() if isinstance(value, bool) else value for value in row] for row in rows]
    return f"{csv_table([columns, *cells])}\n".encode()
