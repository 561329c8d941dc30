"""`python -m emp_llm.report`: run folders, sweeps, measures and results files -> tables, figures and one page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from emp_llm.cli import run
from emp_llm.models.errors import UserError
from emp_llm.models.plain_output import check_folder, write_folder
from emp_llm.services.pages import FIGURES, html_page, markdown_page, parts_of
from emp_llm.services.plot_style import Drawing, check_matplotlib, slug
from emp_llm.services.plots import draw
from emp_llm.services.records import printable
from emp_llm.services.report_tables import change_rows, difference_rows, matrix_rows, value_rows, verdicts
from emp_llm.services.runs import read_points
from emp_llm.services.studies import Study, studies
from emp_llm.services.tables import Rows, csv_table, table

_FORMAT = "emp-llm report 1"
_SUMMARY = "report.json"


def report(
    runs: Annotated[list[Path], Argument(help="Outputs of prune, sweep and measure, and results files of evaluate.")],
    output: Annotated[Path, Option(help="Folder to write.")] = Path("report"),
    title: Annotated[str, Option(help="Heading of the page.")] = "Effective Model Pruning",
    no_plots: Annotated[bool, Option("--no-plots", help="Tables only, which need no matplotlib.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an older report at the output.")] = False,
) -> dict[str, Any]:
    """Show what pruning did: where a model is redundant, what each point of β costs, and whether EMP beats its baselines.

    Models and choices of targets are never mixed in one curve; each has a part of its own. The output has report.html, which
    needs no other file, report.md with figures/*.svg and *.png, and CSV tables with all digits. The same input gives the same
    bytes.

    Returns what is also written as report.json: of each study its verdicts and the names of its figures.
    """
    if not runs:
        raise UserError("nothing to report on; give run folders, a sweep, or results files.")
    check_folder(output, overwrite, _SUMMARY)
    if not no_plots:
        check_matplotlib()
    found = studies(read_points(list(runs)))
    drawn = [(study, [] if no_plots else draw(study, name)) for study, name in zip(found, _names(found), strict=True)]
    summary = {"format": _FORMAT, "title": printable(title), "studies": [_summary(*each) for each in drawn]}
    files = _files(summary, drawn)
    write_folder(output, files, overwrite, _SUMMARY)
    return summary | {"output": str(output), "files": sorted(files), "differences": [_differences(study) for study in found]}


def show(summary: dict[str, Any]) -> None:
    """Print how EMP compares with its baselines, and where the report is."""
    for study, rows in zip(summary["studies"], summary["differences"], strict=True):
        print(study["title"])
        if len(rows) > 1:
            print(table(rows))
        for sentence in study["verdicts"]:
            print(sentence)
    print(f"{len(summary['files'])} files in {summary['output']}; open {Path(summary['output']) / 'report.html'}")


def _files(summary: dict[str, Any], drawn: Sequence[tuple[Study, list[Drawing]]]) -> dict[str, bytes]:
    parts = parts_of(summary["title"], drawn)
    files = {
        _SUMMARY: json.dumps(summary, indent=1, ensure_ascii=False) + "\n",
        "report.html": html_page(summary["title"], parts),
        "report.md": markdown_page(parts),
        "points.csv": csv_table(_joined([value_rows(study) for study, _ in drawn])) + "\n",
        "differences.csv": csv_table(_joined([change_rows(study) for study, _ in drawn])) + "\n",
        "matrices.csv": csv_table(_joined([matrix_rows(study) for study, _ in drawn])) + "\n",
    }
    encoded = {name: text.encode("utf-8") for name, text in files.items()}
    for _, drawings in drawn:
        for drawing in drawings:
            encoded |= {f"{FIGURES}/{drawing.name}.svg": drawing.svg, f"{FIGURES}/{drawing.name}.png": drawing.png}
    return encoded


def _joined(tables: list[Rows]) -> Rows:
    """Tables of one heading below each other."""
    return tables[0][:1] + [row for rows in tables for row in rows[1:]]


def _differences(study: Study) -> Rows:
    tables = [difference_rows(study, suite) for suite in study.suites]
    return _joined(tables) if tables else [["EMP"]]


def _summary(study: Study, drawings: list[Drawing]) -> dict[str, Any]:
    return {
        "title": study.title,
        "model": study.model,
        "targets": study.scope,
        "points": [point.name for point in study.pruned],
        "suites": [suite.name for suite in study.suites],
        "verdicts": [sentence for suite in study.suites for sentence in verdicts(study, suite)],
        "figures": [drawing.name for drawing in drawings],
    }


def _names(found: list[Study]) -> list[str]:
    """What the files of each study's figures begin with: letters, digits and hyphens; numbered where there are several."""
    slugs = [slug(study.title) or "model" for study in found]
    return slugs if len(slugs) == 1 else [f"{number}-{name}" for number, name in enumerate(slugs, 1)]


if __name__ == "__main__":
    run(report, show)
