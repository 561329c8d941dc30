"""The files of a report: HTML page, Markdown, figures and CSV tables.

The Markdown and the one self-contained HTML page have the same headings, text, tables and figures.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader

from emp_llm.common.errors import printable
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
    signed,
    value_cell,
)
from emp_llm.records.bench import Bench
from emp_llm.records.report_page import ReportPage, StudySummary
from emp_llm.reporting.figures import Drawing, draw
from emp_llm.reporting.run_tables import (
    FIT_ERRORS,
    SPEED_NOTE,
    cost_rows,
    effective_share,
    main_measures,
    mass_cells,
    mean_error,
    row_mean,
    speed_notes,
    speed_rows,
    structure_rows,
)
from emp_llm.reporting.studies import (
    Difference,
    MeasuredPoint,
    Study,
    StudySuite,
    by_role_and_block,
    differences,
    label_of,
    studies,
)

_MATCHES = {"total": "as many weights in total", "matrix": "as many weights in every matrix"}


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
        row = [point.name, method, _short(point.recipe.beta), _short(point.recipe.order)]
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
    for each in differences(study, suite):
        if each.measure in main_measures(suite.measures):
            values = [value_cell(each.measure, Value(value)) for value in (each.value, each.base)]
            baseline = label_of(each.baseline) + (
                f", {_MATCHES['total']}" if each.match == "total" else ""
            )
            start = [
                label_of(each.point),
                _short(each.point.recipe.beta),
                baseline,
                percent_cell(each.point.sparsity),
            ]
            rows.append(
                [
                    *start,
                    each.measure,
                    *values,
                    change_text(each.measure, each.change),
                    each.verdict,
                ]
            )
    return rows


def verdict_rows(study: Study) -> Rows:
    """For each EMP method, kind of baseline and main measure, the number of points at which EMP
    is better.
    """
    rows = [
        ["EMP", "uniform baseline", "measure", "EMP better", "EMP worse", "equal", "difference"]
    ]
    for suite in study.suites:
        groups: dict[tuple[str, str, str], list[Difference]] = {}
        for each in differences(study, suite):
            if each.measure in main_measures(suite.measures) and each.better is not None:
                groups.setdefault((label_of(each.point), each.match, each.measure), []).append(each)
        for (method, match, measure), members in groups.items():
            better = [each for each in members if each.better]
            worse = [each for each in members if not each.better and each.change.value]
            least, most = (signed(end(each.change.value for each in members)) for end in (min, max))
            span = f"{least} to {most}" if len(members) > 1 else least
            unit = "points" if in_percent(measure) else "%"
            counts = [
                _counted(better, members),
                _counted(worse, members),
                str(len(members) - len(better) - len(worse)),
            ]
            rows.append(
                [
                    method,
                    _MATCHES[match],
                    _of_suite(study, suite, measure),
                    *counts,
                    f"{span} {unit}",
                ]
            )
    return rows


def _counted(chosen: list[Difference], members: list[Difference]) -> str:
    """ "2 of 3, 1 clearly": by more than two standard errors, if these are known of all."""
    text = f"{len(chosen)} of {len(members)}"
    if not chosen or any(each.clear is None for each in members):
        return text
    mark = "" if all(each.change.paired for each in members) else f" {UNPAIRED}"
    return f"{text}, {sum(1 for each in chosen if each.clear)} clearly{mark}"


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
            cells = [
                cell
                for (name, _), cell in grid.cells.items()
                if name == role and effective_share(cell) is not None
            ]
            if cells:
                shares = [effective_share(cell) or 0.0 for cell in cells]
                known = (cell.least_margin_over_bound for cell in cells)
                margins = [margin for margin in known if margin is not None]
                percents = map(
                    percent_cell, (row_mean(cells, effective_share), min(shares), max(shares))
                )
                margin = number_cell(min(margins, default=None))
                rows.append(
                    [grid.label, f"{role} x {len(cells)}", *percents, *mass_cells(cells), margin]
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


def fit_rows(study: Study) -> Rows:
    """The mean output error of each role's layers before and after the fit, and the largest one
    held out, for each point.
    """
    rows = [
        [
            "method",
            "layers",
            "before %",
            "after %",
            "held out before %",
            "held out after %",
            "largest held out after %",
        ]
    ]
    for point in study.points:
        roles = {
            name: point.matrices[name].role if name in point.matrices else name
            for name in point.fits
        }
        for role in dict.fromkeys(roles.values()):
            fits = [fit for name, fit in point.fits.items() if roles[name] == role]
            largest = max(
                (fit.held_out_after for fit in fits if fit.held_out_after is not None), default=None
            )
            errors = [*(mean_error(fits, name) for name in FIT_ERRORS), largest]
            rows.append([label_of(point), f"{role} x {len(fits)}", *map(percent_cell, errors)])
    return rows


def _of_suite(study: Study, suite: StudySuite, measure: str) -> str:
    """The heading of a measure: with its suite if there are several."""
    return f"{measure} ({suite.name})" if len(study.suites) > 1 else measure


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


# CSV files: a dictionary for each row, from column to value.

Record = dict[str, Any]


def value_records(study: Study) -> list[Record]:
    """All measures of every point and of the dense model."""
    names = {point.id: point.name for point in study.points}
    records = []
    for suite in study.suites:
        dense: Record = {
            "point": "dense",
            "method": "dense",
            "sparsity_of_targets": 0,
            "sparsity_of_all_parameters": 0,
        }
        results = [(dense, suite.dense)]
        for point in study.pruned:
            recipe: Record = {
                "point": point.name,
                "method": point.recipe.method,
                "beta": point.recipe.beta,
                "order": point.recipe.order,
            }
            recipe |= {"match": point.match, "baseline_of": names.get(point.baseline_of or "")}
            recipe |= {
                "sparsity_of_targets": point.sparsity,
                "sparsity_of_all_parameters": point.sparsity_of_all,
            }
            results.append((recipe, point.values_of(suite.key)))
        for start, values in results:
            for measure, value in values.items():
                numbers = {
                    "measure": measure,
                    "value": value.value,
                    "stderr": value.stderr,
                    "partial": value.partial,
                }
                records.append({"study": study.title, "suite": suite.name} | start | numbers)
    return records


def difference_records(study: Study) -> list[Record]:
    """All differences between EMP and its baselines."""
    return [
        {
            "study": study.title,
            "suite": suite.name,
            "point": each.point.name,
            "baseline": each.baseline.name,
            "method": each.point.recipe.method,
            "beta": each.point.recipe.beta,
            "order": each.point.recipe.order,
            "match": each.match,
            "sparsity_of_targets": each.point.sparsity,
            "measure": each.measure,
            "value": each.value,
            "baseline_value": each.base,
            "change": each.change.value,
            "unit": "points" if in_percent(each.measure) else "percent",
            "stderr": each.change.stderr,
            "paired": each.change.paired if each.change.stderr is not None else None,
            "better": each.verdict,
        }
        for suite in study.suites
        for each in differences(study, suite)
    ]


def matrix_records(study: Study) -> list[Record]:
    """The figures of every role and block of every point."""
    return [
        {
            "study": study.title,
            "point": point.name,
            "method": point.recipe.method,
            "beta": point.recipe.beta,
        }
        | {"order": point.recipe.order, "n_eff_over_n": effective_share(cell)}
        | flat(msgspec.to_builtins(cell))
        for point in study.points
        for cell in by_role_and_block(point.matrices).values()
    ]


def fit_records(study: Study) -> list[Record]:
    """The output errors of every fitted layer."""
    return [
        {"study": study.title, "point": point.name, "method": point.recipe.method, "layer": name}
        | msgspec.structs.asdict(fit)
        for point in study.points
        for name, fit in point.fits.items()
    ]


def flat(values: Record, prefix: str = "") -> Record:
    """A nested dictionary as one: the key of an inner value is the outer key, an underscore and
    its own.
    """
    flattened: Record = {}
    for name, value in values.items():
        flattened |= (
            flat(value, f"{prefix}{name}_")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flattened


FIGURES = "figures"
_NOT_EVALUATED = (
    "Not evaluated. The option --evaluate of prune, or the command evaluate, measures what it cost."
)
_NO_BASELINE = (
    "No baseline has as many zeros as the point {}. To make one: prune --method {} --match RUN."
)
_CLEARLY = (
    "Number of points. Clearly: by more than two standard errors of the difference, where "
    "these are known."
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
_ERROR = (
    "The squared error of the layers' outputs as a share of the dense outputs, with the masked "
    "weights (before) and with the fitted ones (after). Held out: on sequences of the calibration "
    "text to which no weight was fitted."
)


@dataclass(frozen=True)
class Section:
    """A heading with what is below it, in this order: facts, a table with its notes, figures. Each
    of them may be missing.

    Attributes:
        title, level: the heading.
        facts: short facts, each with its name.
        rows: of the table; the first is its heading, and a table with a heading alone is not shown.
        notes: paragraphs below the table.
        drawings: figures.
    """

    title: str
    level: int = 3
    facts: Sequence[tuple[str, str]] = ()
    rows: Rows = field(default_factory=list)
    notes: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()


def sections(
    title: str, studies: Sequence[tuple[Study, list[Drawing]]], benches: Sequence[Bench]
) -> list[Section]:
    """The sections of a report from top to bottom. A section with an empty table and no figures
    is left out.
    """
    found = [Section(title, 1)]
    for study, drawings in studies:
        facts: dict[str, list[str]] = {"model": [study.model]}
        for point in study.points:
            for name, fact in point.facts.items():
                facts.setdefault(name, []).append(fact)
        # A fact in which the points differ lists all its values.
        told = [(name, "; ".join(dict.fromkeys(texts))) for name, texts in facts.items()]
        found += [Section(study.title, 2, facts=told), _points(study)]
        compared = [drawing for drawing in drawings if drawing.answers]
        found.append(
            Section(
                "Is EMP better at the same sparsity?",
                rows=verdict_rows(study),
                notes=[_CLEARLY],
                drawings=compared,
            )
        )
        for suite in study.suites:
            rows = difference_rows(study, suite)
            found.append(
                Section(
                    f"Differences, suite {suite.name}",
                    rows=rows,
                    notes=[_DIFFERENCES, *_table_notes(rows)],
                )
            )
        found.append(
            Section("Output error of the fitted layers", rows=fit_rows(study), notes=[_ERROR])
        )
        for name, structure in [
            (f"{label_of(p)} ({p.name})", p.structure) for p in study.points if p.structure
        ]:
            kinds = " and ".join(
                dict.fromkeys(entry.kind for entry in structure.layers.values())
            ).capitalize()
            found.append(Section(f"{kinds}: {name}", rows=structure_rows(structure, by_layer=True)))
            found.append(
                Section(
                    f"Size and speed: {name}",
                    rows=cost_rows(structure),
                    notes=speed_notes(structure),
                )
            )
        others = [drawing for drawing in drawings if not drawing.answers]
        found.append(
            Section("Where the model is redundant", rows=role_rows(study), drawings=others)
        )
    if benches:
        found.append(Section("Speed and memory", 2, rows=speed_rows(benches), notes=[SPEED_NOTE]))
    return [each for each in found if len(each.rows) != 1 or each.drawings]


def _points(study: Study) -> Section:
    """All points, with what to do if they were not evaluated, or cannot be compared."""
    rows = point_rows(study)
    notes = []
    if study.pruned and not study.suites:
        notes.append(_NOT_EVALUATED)
    baselines = {point.baseline_of for point in study.points}
    alone = {
        p.recipe.name: p.name
        for p in study.pruned
        if p.recipe.adaptive and p.structure is None and p.id not in baselines
    }
    notes += [_NO_BASELINE.format(name, criterion) for criterion, name in alone.items()]
    return Section("All points", rows=rows, notes=[*notes, *_table_notes(rows)])


def _table_notes(rows: Rows) -> list[str]:
    """The explanation of the marks and standard errors of a table: those that it holds."""
    cells = [cell for row in rows[1:] for cell in row]
    changes = [cell for cell in cells if "±" in cell and cell[0] in "+-0"]
    notes = [_PAIRED] if any(UNPAIRED not in cell for cell in changes) else []
    notes += [_UNPAIRED] if any(UNPAIRED in cell for cell in changes) else []
    return notes + ([_PARTIAL] if any(cell.endswith(" *") for cell in cells) else [])


def markdown_page(parts: Sequence[Section]) -> str:
    """The page as Markdown; its figures are in a folder beside it."""
    texts = []
    for part in parts:
        texts.append(f"{'#' * part.level} {markdown_text(part.title)}")
        if part.facts:
            texts.append(
                "\n".join(
                    f"- {markdown_text(name)}: {markdown_text(fact)}" for name, fact in part.facts
                )
            )
        if len(part.rows) > 1:
            texts.append(markdown_table(part.rows))
            texts += map(markdown_text, part.notes)
        for drawing in part.drawings:
            texts += [
                f"![{markdown_text(drawing.title)}]({FIGURES}/{drawing.name}.svg)",
                markdown_text(drawing.caption),
            ]
    return "\n\n".join(texts) + "\n"


def html_page(title: str, parts: Sequence[Section]) -> str:
    """The page as HTML by the template page.html.j2: figures inside it, no scripts, no requests,
    all texts escaped.
    """

    def safe(value: Any) -> Any:
        return printable(value, 1000) if type(value) is str else value

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        keep_trailing_newline=True,
        finalize=safe,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template("page.html.j2").render(title=title, parts=parts)


SUMMARY = "report.json"
NOTHING_EQUAL = (
    "no emp point and baseline have equally many zeros, so none are compared; the page "
    "shows all points"
)


def report_content(
    points: Sequence[MeasuredPoint], benches: Sequence[Bench], title: str, plots: bool
) -> tuple[ReportPage, dict[str, bytes], str]:
    """A report in memory.

    Args:
        points, benches: from `studies.read_inputs`.
        title: heading of the page.
        plots: whether to draw figures; UserError if matplotlib is missing.

    Returns:
        The content of report.json; all files by their relative names; the comparison of EMP with
        its baselines, for a terminal.
    """
    page = ReportPage(title=printable(title))
    files: dict[str, bytes] = {}
    drawn = []
    lines = []
    found = studies(points)
    for number, study in enumerate(found, 1):
        title_of_study = f"{number}-{study.title}" if len(found) > 1 else study.title
        drawings = draw(study, title_of_study) if plots else []
        drawn.append((study, drawings))
        for drawing in drawings:
            files |= {
                f"{FIGURES}/{drawing.name}.svg": drawing.svg,
                f"{FIGURES}/{drawing.name}.png": drawing.png,
            }
        heading, *verdicts = verdict_rows(study)
        page.studies.append(
            StudySummary(
                title=study.title,
                model=study.model,
                targets=study.scope,
                points=[point.name for point in study.pruned],
                suites=[suite.name for suite in study.suites],
                verdicts=[
                    "; ".join(f"{name}: {cell}" for name, cell in zip(heading, row, strict=True))
                    for row in verdicts
                ],
                figures=[drawing.name for drawing in drawings],
            )
        )
        tables: list[Rows] = [
            *(difference_rows(study, suite) for suite in study.suites),
            [heading, *verdicts],
        ]
        compared = [table(rows) for rows in tables if len(rows) > 1] or [NOTHING_EQUAL]
        lines += [
            study.title,
            *compared,
            *([UNPAIRED_NOTE] if any(UNPAIRED in text for text in compared) else []),
        ]
    parts = sections(page.title, drawn, benches)
    files["report.html"] = html_page(page.title, parts).encode()
    files["report.md"] = markdown_page(parts).encode()
    for name, records in (
        ("points.csv", [record for study in found for record in value_records(study)]),
        ("differences.csv", [record for study in found for record in difference_records(study)]),
        ("matrices.csv", [record for study in found for record in matrix_records(study)]),
        ("fits.csv", [record for study in found for record in fit_records(study)]),
        (
            "speeds.csv",
            [
                flat(values | batch)
                for values in map(Bench.as_dict, benches)
                for batch in values.pop("batches")
            ],
        ),
    ):
        if records:
            files[name] = _csv(records)
    page.files = sorted(files)
    files[SUMMARY] = page.encoded()
    return page, files, "\n".join(lines)


def _csv(records: list[Record]) -> bytes:
    """Rows with all digits, under the names of their columns; what a row lacks is empty."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    rows = [[record.get(name) for name in columns] for record in records]
    return f"{csv_table([columns, *rows])}\n".encode()
