"""The files of a report: a page of Markdown, its figures, and CSV tables."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from emp_llm.common.errors import printable
from emp_llm.common.paths import shown_name
from emp_llm.common.tables import (
    Rows,
    csv_table,
    markdown_table,
    markdown_text,
    number_cell,
    percent_cell,
    table,
)
from emp_llm.evaluation.comparison import (
    UNPAIRED,
    UNPAIRED_NOTE,
    Value,
    change_text,
    in_percent,
    shown_change,
    value_cell,
)
from emp_llm.records.base import FileRecord
from emp_llm.records.bench import Bench
from emp_llm.reporting.figures import Drawing, draw
from emp_llm.reporting.run_tables import (
    SPEED_NOTE,
    effective_share,
    main_measures,
    mass_cells,
    row_mean,
    speed_rows,
)
from emp_llm.reporting.studies import (
    MeasuredPoint,
    Study,
    StudySuite,
    differences,
    label_of,
    studies,
)


def point_rows(study: Study) -> Rows:
    """Every point: recipe, sparsity, and the main measures of every suite with their change from
    the dense model.
    """
    measured = [
        (suite, measure) for suite in study.suites for measure in main_measures(suite.measures)
    ]
    rows = [["point", "method", "β", "order", "removed of targets %", "of all parameters %"]]
    for suite, measure in measured:
        rows[0] += [_of_suite(study, suite, measure), "change"]
    if any(suite.dense for suite in study.suites):
        dense = [
            cell
            for suite, measure in measured
            for cell in (value_cell(measure, suite.dense.get(measure)), "")
        ]
        rows.append(["dense", "", "", "", "0.00", "0.00", *dense])
    for point in study.points:
        method = label_of(point) if point.pruned else f"{label_of(point)}: measured, not pruned"
        row = [
            point.name,
            method,
            _short(point.recipe.counts.in_force),
            _short(point.recipe.counts.order),
        ]
        row += [percent_cell(point.sparsity), percent_cell(point.sparsity_of_all)]
        for suite, measure in measured:
            value = point.values_of(suite.key).get(measure)
            row += [
                value_cell(measure, value),
                shown_change(measure, suite.dense.get(measure), value),
            ]
        rows.append(row)
    return rows


def difference_rows(study: Study, suite: StudySuite) -> Rows:
    """EMP points and their baselines with as many removed weights; the heading alone if there
    are none.
    """
    rows = [
        [
            "EMP",
            "β",
            "baseline",
            "removed of targets %",
            "measure",
            "EMP value",
            "baseline value",
            "EMP − baseline",
            "better",
        ]
    ]
    measures = main_measures(suite.measures)
    for difference in differences(study, suite):
        if difference.measure not in measures:
            continue
        point = difference.point
        baseline = label_of(difference.baseline)
        if difference.match == "total":
            baseline += ", as many weights in total"
        rows.append(
            [
                label_of(point),
                _short(point.recipe.counts.in_force),
                baseline,
                percent_cell(point.sparsity),
                difference.measure,
                value_cell(difference.measure, Value(difference.value)),
                value_cell(difference.measure, Value(difference.base)),
                change_text(difference.measure, difference.change),
                difference.verdict,
            ]
        )
    return rows


def role_rows(study: Study) -> Rows:
    """N_eff / N by role for every criterion and order, over the blocks; one row for all targets
    if they were one group.
    """
    rows = [
        [
            "criterion",
            "layers",
            "N_eff/N % mean",
            "lowest block",
            "highest block",
            "s_eff",
            "bound",
            "least margin",
        ]
    ]
    for grid in study.measured:
        for role in grid.roles:
            matrices = [matrix for matrix in grid.matrices if matrix.role == role]
            blocks = [share for (name, _), share in grid.shares.items() if name == role]
            margins = [
                matrix.least_margin_over_bound
                for matrix in matrices
                if matrix.least_margin_over_bound is not None
            ]
            rows.append(
                [
                    grid.label,
                    f"{role} x {len(matrices)}",
                    percent_cell(row_mean(matrices, effective_share)),
                    percent_cell(min(blocks)),
                    percent_cell(max(blocks)),
                    *mass_cells(matrices),
                    number_cell(min(margins, default=None)),
                ]
            )
    for point in study.points:
        whole = point.targets
        if whole is not None and whole.n_eff is not None and whole.weights:
            least = (
                None
                if whole.s_eff_bound is None or whole.s_eff is None
                else whole.s_eff - whole.s_eff_bound
            )
            numbers = map(number_cell, (whole.s_eff, whole.s_eff_bound, least))
            share = percent_cell(whole.n_eff / whole.weights)
            row = [label_of(point), "all targets as one group", share, "-", "-", *numbers]
            rows += [row] if row not in rows else []  # one for all β
    return rows


def _of_suite(study: Study, suite: StudySuite, measure: str) -> str:
    """The heading of a measure: with its suite if there are several."""
    return f"{measure} ({suite.name})" if len(study.suites) > 1 else measure


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


# CSV files, with all digits.

CsvRow = list[object]
_VALUE_COLUMNS: CsvRow = [
    "study",
    "suite",
    "point",
    "method",
    "beta",
    "order",
    "match",
    "baseline_of",
    "sparsity_of_targets",
    "sparsity_of_all_parameters",
    "measure",
    "value",
    "stderr",
    "partial",
]
_DIFFERENCE_COLUMNS: CsvRow = [
    "study",
    "suite",
    "point",
    "baseline",
    "method",
    "beta",
    "order",
    "match",
    "sparsity_of_targets",
    "measure",
    "value",
    "baseline_value",
    "change",
    "unit",
    "stderr",
    "paired",
    "better",
]


def value_lines(study: Study) -> list[CsvRow]:
    """The lines of points.csv: all measures of every point and of the dense model."""
    names = {point.id: point.name for point in study.points}
    lines = []
    for suite in study.suites:
        models: list[tuple[CsvRow, dict[str, Value]]] = [
            (["dense", "dense", None, None, None, None, 0, 0], suite.dense)
        ]
        for point in study.pruned:
            recipe = point.recipe
            about: CsvRow = [
                point.name,
                recipe.method,
                recipe.counts.in_force,
                recipe.counts.order,
                point.match,
                names.get(point.baseline_of or ""),
                point.sparsity,
                point.sparsity_of_all,
            ]
            models.append((about, point.values_of(suite.key)))
        for about, values in models:
            for measure, value in values.items():
                numbers: CsvRow = [value.value, value.stderr, value.partial]
                lines.append([study.title, suite.name, *about, measure, *numbers])
    return lines


def difference_lines(study: Study) -> list[CsvRow]:
    """The lines of differences.csv: all differences between EMP and its baselines."""
    return [
        [
            study.title,
            suite.name,
            difference.point.name,
            difference.baseline.name,
            difference.point.recipe.method,
            difference.point.recipe.counts.in_force,
            difference.point.recipe.counts.order,
            difference.match,
            difference.point.sparsity,
            difference.measure,
            difference.value,
            difference.base,
            difference.change.value,
            "points" if in_percent(difference.measure) else "percent",
            difference.change.stderr,
            difference.change.paired if difference.change.stderr is not None else None,
            difference.verdict,
        ]
        for suite in study.suites
        for difference in differences(study, suite)
    ]


FIGURES = "figures"
_NOT_EVALUATED = (
    "Not evaluated. The option --evaluate of prune, or the command evaluate, measures what it cost."
)
_NO_BASELINE = (
    "No baseline has as many zeros as the point {}. To make one: prune --method {} --match RUN."
)
_DIFFERENCES = (
    "EMP − baseline: the difference of perplexities in percent, and of accuracies in points. Both "
    "models have the same number of zeros, in total or in every matrix."
)
_PAIRED = (
    "± of a difference: its paired standard error. Both models were judged on the same examples "
    "and blocks of text, and only those count on which they differ."
)
_UNPAIRED = (
    f"{UNPAIRED} An unpaired standard error: the root of the sum of both squares, as if the two "
    "models had answered different examples. The results of one of them do not hold its answers "
    "(an older emp-llm wrote them), or the examples differ. Paired errors are usually smaller, so "
    "a difference that is not clear here may still be real."
)
_PARTIAL = "* partial: only some of the examples or of the text."


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
        texts += ["## Speed and memory", *_table_texts(speed_rows(benches), [SPEED_NOTE])]
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
    texts = [f"## {markdown_text(study.title)}", "\n".join(lines), *_points_texts(study)]
    for suite in study.suites:
        rows = difference_rows(study, suite)
        texts += _section(
            f"Is EMP better at the same sparsity? Suite {suite.name}",
            rows,
            [_DIFFERENCES, *_table_notes(rows)],
            [drawing for drawing in drawings if drawing.suite == suite.key],
        )
    others = [drawing for drawing in drawings if not drawing.suite]
    return texts + _section("Where the model is redundant", role_rows(study), drawings=others)


def _section(
    title: str, rows: Rows, notes: Sequence[str] = (), drawings: Sequence[Drawing] = ()
) -> list[str]:
    """A heading, a table with its notes, and figures; nothing if the table is empty and there
    are no figures.
    """
    if len(rows) == 1 and not drawings:
        return []
    texts = [f"### {markdown_text(title)}", *_table_texts(rows, notes)]
    for drawing in drawings:
        texts += [
            f"![{markdown_text(drawing.title)}]({FIGURES}/{drawing.name}.svg)",
            markdown_text(drawing.caption),
        ]
    return texts


def _table_texts(rows: Rows, notes: Sequence[str]) -> list[str]:
    """A table and its notes; nothing if it has only its heading."""
    return [markdown_table(rows), *map(markdown_text, notes)] if len(rows) > 1 else []


def _points_texts(study: Study) -> list[str]:
    """All points, with what to do if they were not evaluated, or cannot be compared."""
    rows = point_rows(study)
    notes = []
    if study.pruned and not study.suites:
        notes.append(_NOT_EVALUATED)
    baselines = {point.baseline_of for point in study.points}
    alone = {
        p.recipe.name: p.name
        for p in study.pruned
        if p.recipe.adaptive and p.recipe.structure is None and p.id not in baselines
    }
    notes += [_NO_BASELINE.format(name, criterion) for criterion, name in alone.items()]
    return _section("All points", rows, [*notes, *_table_notes(rows)])


def _table_notes(rows: Rows) -> list[str]:
    """The explanation of the marks and standard errors of a table: those that it holds."""
    cells = [cell for row in rows[1:] for cell in row]
    changes = [cell for cell in cells if "±" in cell and cell[0] in "+-0"]
    notes = [_PAIRED] if any(UNPAIRED not in cell for cell in changes) else []
    notes += [_UNPAIRED] if any(UNPAIRED in cell for cell in changes) else []
    return notes + ([_PARTIAL] if any(cell.endswith(" *") for cell in cells) else [])


SUMMARY = "report.json"
NOTHING_EQUAL = (
    "no emp point and baseline have equally many zeros, so none are compared; the page "
    "shows all points"
)


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
    points: Sequence[MeasuredPoint], benches: Sequence[Bench], title: str, plots: bool
) -> tuple[dict[str, bytes], str]:
    """A report in memory.

    Args:
        points, benches: from `studies.read_inputs`.
        title: heading of the page.
        plots: whether to draw figures; UserError if matplotlib is missing.

    Returns:
        All files by their relative names; the comparison of EMP with its baselines, for a
        terminal.
    """
    files: dict[str, bytes] = {}
    drawn = []
    lines = []
    all_studies = studies(points)
    for number, study in enumerate(all_studies, 1):
        title_of_study = f"{number}-{study.title}" if len(all_studies) > 1 else study.title
        drawings = draw(study, title_of_study) if plots else []
        drawn.append((study, drawings))
        for drawing in drawings:
            files |= {
                f"{FIGURES}/{drawing.name}.svg": drawing.svg,
                f"{FIGURES}/{drawing.name}.png": drawing.png,
            }
        lines += [study.title, *_comparison_lines(study)]
    title = printable(title)
    files["report.md"] = page_text(title, drawn, benches).encode()
    for name, columns, lines_of in (
        ("points.csv", _VALUE_COLUMNS, value_lines),
        ("differences.csv", _DIFFERENCE_COLUMNS, difference_lines),
    ):
        csv_lines = [line for study in all_studies for line in lines_of(study)]
        if csv_lines:
            files[name] = f"{csv_table([columns, *csv_lines])}\n".encode()
    files[SUMMARY] = ReportPage(title=title, files=sorted(files)).encoded()
    return files, "\n".join(lines)


def _comparison_lines(study: Study) -> list[str]:
    """EMP and its baselines in tables for a terminal."""
    tables = [difference_rows(study, suite) for suite in study.suites]
    lines = [table(rows) for rows in tables if len(rows) > 1]
    if not lines:
        return [NOTHING_EQUAL]
    return lines + [UNPAIRED_NOTE] * any(UNPAIRED in text for text in lines)
