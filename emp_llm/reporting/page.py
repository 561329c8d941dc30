"""The files of a report: a page of Markdown, its figures, and points.csv."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from emp_llm.common.errors import printable
from emp_llm.common.paths import shown_name
from emp_llm.common.tables import csv_table, markdown_text
from emp_llm.records.base import FileRecord
from emp_llm.records.bench import Bench
from emp_llm.reporting.figures import Drawing, draw
from emp_llm.reporting.points import (
    CSV_HEAD,
    csv_rows,
    main_columns,
    point_rows,
    points_markdown,
    points_text,
)
from emp_llm.reporting.run_tables import SPEED_NOTE, speed_rows
from emp_llm.reporting.studies import Point, Study, studies

FIGURES = "figures"


def page_text(
    title: str, studies: Sequence[tuple[Study, list[Drawing]]], benches: Sequence[Bench]
) -> str:
    """The page as Markdown; its figures are in a folder beside it.

    Args:
        title: its heading.
        studies: with their figures.
        benches: speeds, for the end of the page.
    """
    texts = [f"# {markdown_text(title)}"]
    for study, drawings in studies:
        texts += _study_texts(study, drawings)
    if benches:
        texts += ["## Speed and memory", *points_markdown(speed_rows(benches), [SPEED_NOTE])]
    return "\n\n".join(texts) + "\n"


def _study_texts(study: Study, drawings: list[Drawing]) -> list[str]:
    facts: dict[str, list[str]] = {"model": [shown_name(study.model)]}
    for point in study.points:
        for name, fact in point.facts.items():
            facts.setdefault(name, []).append(fact)
    # A fact in which the points differ lists all its values.
    lines = [
        f"- {markdown_text(name)}: {markdown_text('; '.join(dict.fromkeys(values)))}"
        for name, values in facts.items()
    ]
    texts = [f"## {markdown_text(study.title)}", "\n".join(lines)]
    if study.points or study.suites:
        compared = study.against and any(point.recipe.adaptive for point in study.points)
        texts.append("### Is EMP better at the same sparsity?" if compared else "### All points")
        texts += points_markdown(*point_rows(study, main_columns(study)))
    for drawing in drawings:
        texts += [
            f"![{markdown_text(drawing.title)}]({FIGURES}/{drawing.name}.svg)",
            markdown_text(drawing.caption),
        ]
    return texts


SUMMARY = "report.json"


class ReportPage(FileRecord, kw_only=True):
    """report.json: the files of a report, by which --overwrite knows them.

    Attributes:
        title: heading of its page.
        files: their names in its folder.
    """

    KIND: ClassVar[str] = "report"

    title: str
    files: list[str] = msgspec.field(default_factory=list)


def report_content(
    points: Sequence[Point],
    benches: Sequence[Bench],
    title: str,
    plots: bool,
    against: str | None = None,
) -> tuple[dict[str, bytes], str]:
    """A report in memory.

    Args:
        points, benches: from `studies.read_inputs`.
        title: heading of the page.
        plots: whether to draw figures; UserError if matplotlib is missing.
        against: method or name of the baseline; None: the first.

    Returns:
        All files by their relative names; the tables of points, for a terminal.
    """
    files: dict[str, bytes] = {}
    drawn = []
    lines = []
    all_studies = studies(points, against)
    for number, study in enumerate(all_studies, 1):
        title_of_study = f"{number}-{study.title}" if len(all_studies) > 1 else study.title
        drawings = draw(study, title_of_study) if plots else []
        drawn.append((study, drawings))
        for drawing in drawings:
            files |= {
                f"{FIGURES}/{drawing.name}.svg": drawing.svg,
                f"{FIGURES}/{drawing.name}.png": drawing.png,
            }
        lines += [study.title, points_text(study)]
    title = printable(title)
    files["report.md"] = page_text(title, drawn, benches).encode()
    csv_lines = [line for study in all_studies for line in csv_rows(study)]
    if csv_lines:
        files["points.csv"] = f"{csv_table([CSV_HEAD, *csv_lines])}\n".encode()
    files[SUMMARY] = ReportPage(title=title, files=sorted(files)).encoded()
    return files, "\n".join(lines)
