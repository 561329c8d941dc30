"""The table of points: a row for each model, for the terminal, as Markdown and as CSV. `evaluate`
shows it with a column for each model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from emp_llm.common.errors import count_of
from emp_llm.common.tables import Rows, markdown_table, markdown_text, percent_cell, table
from emp_llm.evaluation.comparison import (
    UNPAIRED,
    Change,
    Value,
    advice,
    change_of,
    change_text,
    in_percent,
    main_measures,
    value_cell,
    values_of,
)
from emp_llm.evaluation.results import results_of_report
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.records.sweep import Sweep
from emp_llm.reporting.studies import (
    Point,
    Study,
    StudySuite,
    SuiteResult,
    run_point,
    studies,
)

Columns = Sequence[tuple[StudySuite, str]]
_UNPAIRED = (
    f"{UNPAIRED} unpaired standard error, usually too large: the results do not hold both models' "
    "answers to the same examples"
)
_PARTIAL = "* partial: only some of the examples or of the text"
_NOT_EVALUATED = (
    "Not evaluated. The option --evaluate of prune, or the command evaluate, measures what it cost"
)
_NEAR = "within 1 % of the targets"
_NONE = (
    f"{_NEAR}, so there are no differences; prune --match RUN, sweep --matched-baselines or "
    "--emp-sparsities adds some"
)


def all_columns(study: Study) -> Columns:
    """Every measure of every suite of a study."""
    return [(suite, measure) for suite in study.suites for measure in suite.measures]


def main_columns(study: Study) -> Columns:
    """The measures to show of many points."""
    return [(suite, measure) for suite in study.suites for measure in main_measures(suite.measures)]


@dataclass(frozen=True)
class Cell:
    """A measure of a point; None for what is not known.

    Attributes:
        value: of the point.
        change: from the dense model.
        difference: from the baseline with as many zeros.
    """

    measure: str
    value: Value | None
    change: Change | None
    difference: Change | None


def cells_of(study: Study, point: Point, columns: Columns) -> list[Cell]:
    """A cell for each column."""
    base = study.base_of(point)
    cells = []
    for suite, measure in columns:
        value = point.values_of(suite.key).get(measure)
        dense = point.dense_values_of(suite.key) or suite.dense
        other = {} if base is None else base.values_of(suite.key)
        change, difference = (
            None
            if value is None or measure not in values or values[measure] is value
            else change_of(measure, value, values[measure])
            for values in (dense, other)
        )
        cells.append(Cell(measure, value, change, difference))
    return cells


def _change_cell(measure: str, change: Change | None, unknown: str = "") -> str:
    return unknown if change is None else change_text(measure, change)


def point_rows(study: Study, columns: Columns, methods: bool = True) -> tuple[Rows, list[str]]:
    """A row for each point, by its zeros: value, change from the dense model, and difference from
    the baseline of each measure; and the notes of the table. Columns without content are left out.

    Args:
        columns: the measures.
        methods: whether to name the methods; the names of a sweep's points do.
    """
    rows = [["point", "method", "β", "removed %", "of all %"]]
    one = study.suites[0].name if len(study.suites) == 1 else ""
    for suite, measure in columns:
        of = "" if one else f" ({suite.name})"
        rows[0] += [f"{measure}{of}", "change", f"against {study.against}"]
    every: list[Cell] = []
    dense = [study.dense] if any(suite.dense for suite in study.suites) else []
    for point in [*dense, *study.points]:
        about = methods and not point.zeros and point.id != "dense"
        beta = point.recipe.counts.in_force if about else None
        row = [point.name, point.label if about else "", "" if beta is None else f"{beta:g}"]
        row.append(point.zeros or percent_cell(point.sparsity))
        row.append("" if point.sparsity_of_all is None else percent_cell(point.sparsity_of_all))
        cells = cells_of(study, point, columns)
        every += cells
        for cell in cells:
            row.append(value_cell(cell.measure, cell.value))
            row += [_change_cell(cell.measure, each) for each in (cell.change, cell.difference)]
        rows.append(row)
    shown = [place for place, cells in enumerate(zip(*rows[1:], strict=True)) if any(cells)]
    notes = [] if study.suites else [_NOT_EVALUATED]
    suite_of = f"suite {one}; " if one else ""
    of_all = ", and of all parameters" * (rows[0].index("of all %") in shown)
    notes.append(f"{suite_of}removed: percent of the targets{of_all}")
    notes += _cell_notes(every)
    labels = {point.label for point in study.points if not point.zeros}
    if any(cell.difference for cell in every):
        whose = f"against {study.against}: the difference from its point with the nearest zeros"
        notes.append(f"{whose}, {_NEAR}")
    elif len(labels) > 1 and every:
        whose = f"no other method has as many zeros as {study.against}"
        notes.append(f"{whose if study.against else 'no two methods have as many zeros'}, {_NONE}")
    return [[row[place] for place in shown] for row in rows], notes


def _cell_notes(cells: Sequence[Cell]) -> list[str]:
    """What the numbers of a table mean, and their marks and errors: of those that it holds."""
    notes = []
    known = [(cell.measure, cell.value) for cell in cells if cell.value is not None]
    both = [change for cell in cells for change in (cell.change, cell.difference)]
    changes = [change for change in both if change is not None]
    if any(value.partial for _, value in known):
        notes.append(_PARTIAL)
    if any(in_percent(name) for name, _ in known):
        notes.append("accuracies in percent ± standard error; their changes in points")
    if any(change.stderr is not None and change.paired for change in changes):
        notes.append(
            "changes ± paired standard error: both models judged on the same examples and "
            "blocks of text"
        )
    if not all(change.paired for change in changes):
        notes.append(_UNPAIRED)
    return notes


def points_text(study: Study, notes: Sequence[str] = (), methods: bool = True) -> str:
    """The table of a study for a terminal, its main measures only."""
    rows, own = point_rows(study, main_columns(study), methods)
    return "\n".join([table(rows), *own, *notes])


def points_markdown(rows: Rows, notes: Sequence[str]) -> list[str]:
    """A table and its notes as paragraphs of Markdown."""
    return [markdown_table(rows), *map(markdown_text, notes)]


# points.csv, with all digits.
CsvRow = list[object]
CSV_HEAD: CsvRow = [
    *("study", "suite", "point", "method", "beta", "order", "match"),
    *("sparsity_of_targets", "sparsity_of_all_parameters", "measure", "value", "stderr", "partial"),
    *("change", "change_stderr", "change_paired"),
    *("against", "difference", "difference_stderr", "difference_paired"),
]


def csv_rows(study: Study) -> Iterator[CsvRow]:
    """A line for each measure of every point and of the dense model. Changes of accuracies are in
    points, all others in percent.
    """
    columns = all_columns(study)
    for point in [study.dense, *study.points]:
        counts = point.recipe.counts
        about: CsvRow = [point.recipe.method, counts.in_force, counts.order, point.match]
        if point.id == "dense":
            about = ["dense", None, None, None]
        base = study.base_of(point)
        for (suite, _), cell in zip(columns, cells_of(study, point, columns), strict=True):
            value = cell.value
            if value is None:
                continue
            line: CsvRow = [study.title, suite.name, point.name, *about]
            line += [point.sparsity, point.sparsity_of_all, cell.measure]
            line += [value.value, value.stderr, value.partial]
            line += _numbers(cell.change)
            line.append(base.name if base is not None and cell.difference else None)
            yield line + _numbers(cell.difference)


def _numbers(change: Change | None) -> CsvRow:
    if change is None or math.isnan(change.value):
        return [None, None, None]
    return [change.value, change.stderr, None if change.stderr is None else change.paired]


# The tables of commands.


def sweep_table(record: Sweep, against: str | None = None) -> str:
    """The dense model, then all points by their zeros; `against` names the baseline, default the
    first.
    """
    points = [run_point(report, Path(report.point.name)) for report in record.points]
    same = [
        f"{each.point.name}: the same masks as {each.measures.same_masks_as}, so the same values"
        for each in record.points
        if each.measures.same_masks_as is not None
    ]
    found = studies(points, against)
    return "\n".join(points_text(study, same, methods=False) for study in found)


def evaluation_table(report: RunReport, form: str = "terminal") -> str:
    """The dense and the pruned model side by side; empty if they were not evaluated."""
    models = results_of_report(report)
    return compare(models, form, ["dense", "pruned"]) if len(models) == 2 else ""


def compare(models: list[Results], form: str = "terminal", labels: list[str] | None = None) -> str:
    """The results of one suite as a table with a column for each model, and footnotes. The first is
    the baseline; the others show their change from it.

    Args:
        models: the baseline first.
        form: terminal or markdown.
        labels: column headings; default: the models' names without owner or path.
    """
    labels = labels or _labels(models)
    measured = [values_of(model.measures) for model in models]
    names = dict.fromkeys(name for values in measured for name in values)
    suite = StudySuite("", "", measured[0], tuple(names))
    points = [
        Point(label, label, results=(SuiteResult("", "", values),))
        for label, values in zip(labels, measured, strict=True)
    ]
    study = Study("", "", points, [suite])
    columns = all_columns(study)
    by_model = [cells_of(study, point, columns) for point in points]
    rows = [["", labels[0]]]
    for label in labels[1:]:
        rows[0] += [label, "change"]
    for first, *others in zip(*by_model, strict=True):
        row = [first.measure, value_cell(first.measure, first.value)]
        for cell in others:
            row.append(value_cell(cell.measure, cell.value))
            row.append(_change_cell(cell.measure, cell.change, "-"))
        rows.append(row)
    noted = [cell for cells in by_model for cell in cells]
    notes = _model_notes(models, labels, _cell_notes(noted))
    form_table, gap = (markdown_table, "\n\n") if form == "markdown" else (table, "\n")
    return gap.join([form_table(rows), *notes])


def _model_notes(models: list[Results], labels: list[str], of_cells: list[str]) -> list[str]:
    """The zeros of models that differ in them, the suite, and what would cost less."""
    notes = []
    removed = {
        label: model.pruned.sparsity_of_targets
        for label, model in zip(labels, models, strict=True)
        if model.pruned
    }
    if removed and max(removed.values()) - min(removed.values()) > 0.01:
        shares = ", ".join(f"{label} {percent_cell(share)} %" for label, share in removed.items())
        notes.append(f"the models differ in their zeros: {shares} of the targets")
    first = models[0].measures
    text = models[0].made_by.text
    bos = "" if text is None else text.bos_note
    extent = (
        [f"{count_of(first.perplexity.tokens, 'token')}{bos}"]
        if first.perplexity is not None
        else []
    )
    if first.tasks:
        counts = [count for record in first.tasks.values() for count in record.n_samples.values()]
        extent.append(f"{count_of(sum(count.effective for count in counts), 'example')} by lm-eval")
    notes += [f"suite {models[0].suite}: {', '.join(extent)}", *of_cells]
    dense, *others = (
        None if model.perplexity is None else model.perplexity.perplexity for model in models
    )
    for model, label, after in zip(models[1:], labels[1:], others, strict=True):
        if dense and after and models[0].pruned is None and model.pruned is not None:
            notes += [f"{label}: {line}" for line in advice(model.pruned.recipe, dense, after)]
    return notes


def _labels(models: list[Results]) -> list[str]:
    """The models' names with their quantisation: the shortest ends of their paths that differ; else
    with the revision on the Hub.
    """
    bits = [
        f" {model.made_by.quantization.bits}" if model.made_by.quantization else ""
        for model in models
    ]
    at = [f"@{model.revision[:8]}" if model.revision else "" for model in models]

    def ends(parts: int) -> list[str]:
        return [str(PurePath(*PurePath(model.model).parts[-parts:])) for model in models]

    for parts in range(1, max(len(PurePath(model.model).parts) for model in models) + 1):
        labels = [end + suffix for end, suffix in zip(ends(parts), bits, strict=True)]
        if len(set(labels)) == len(labels):
            return labels
    return [end + mark + suffix for end, mark, suffix in zip(ends(2), at, bits, strict=True)]
