"""A report as Markdown and as one self-contained HTML page, with the same headings, text, tables and figures."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from emp_llm.common.errors import printable
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.evaluation.comparison import UNPAIRED
from emp_llm.records.bench import Bench
from emp_llm.reporting.figures import Drawing
from emp_llm.reporting.page_tables import difference_rows, fit_rows, point_rows, role_rows, verdict_rows
from emp_llm.reporting.run_tables import SPEED_NOTE, cost_rows, speed_notes, speed_rows, structure_rows
from emp_llm.reporting.studies import Study, label_of

FIGURES = "figures"
_NOT_EVALUATED = "Not evaluated. The option --evaluate of prune, or the command evaluate, measures what it cost."
_NO_BASELINE = "No baseline has as many zeros as the point {}. To make one: prune --method {} --match RUN."
_CLEARLY = "Number of points. Clearly: by more than two standard errors of the difference, where these are known."
_DIFFERENCES = (
    "EMP − baseline: the difference of perplexities in percent, and of accuracies in points. Both models have the same number "
    "of zeros, in total or in every matrix."
)
_PAIRED = (
    "± of a difference: its paired standard error. Both models were judged on the same examples and blocks of text, and only "
    "those count on which they differ."
)
_UNPAIRED = (
    f"{UNPAIRED} An unpaired standard error: the root of the sum of both squares, as if the two models had answered different "
    "examples. The results of one of them do not hold its answers (an older emp-llm wrote them), or the examples differ. "
    "Paired errors are usually smaller, so a difference that is not clear here may still be real."
)
_PARTIAL = "* partial: only some of the examples or of the text."
_ERROR = (
    "The squared error of the layers' outputs as a share of the dense outputs, with the masked weights (before) and with the "
    "fitted ones (after). Held out: on sequences of the calibration text to which no weight was fitted."
)


@dataclass(frozen=True)
class Section:
    """A heading with what is below it, in this order: facts, a table with its notes, figures. Each of them may be missing.

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


def sections(title: str, studies: Sequence[tuple[Study, list[Drawing]]], benches: Sequence[Bench]) -> list[Section]:
    """The sections of a report from top to bottom. A section with an empty table and no figures is left out."""
    found = [Section(title, 1)]
    for study, drawings in studies:
        found += [Section(study.title, 2, facts=_facts(study)), _points(study)]
        compared = [drawing for drawing in drawings if drawing.answers]
        found.append(
            Section("Is EMP better at the same sparsity?", rows=verdict_rows(study), notes=[_CLEARLY], drawings=compared)
        )
        for suite in study.suites:
            rows = difference_rows(study, suite)
            found.append(Section(f"Differences, suite {suite.name}", rows=rows, notes=[_DIFFERENCES, *_table_notes(rows)]))
        found.append(Section("Output error of the fitted layers", rows=fit_rows(study), notes=[_ERROR]))
        for name, structure in [(f"{label_of(p)} ({p.name})", p.structure) for p in study.points if p.structure]:
            found.append(Section(f"Heads and neurons: {name}", rows=structure_rows(structure)))
            found.append(Section(f"Size and speed: {name}", rows=cost_rows(structure), notes=speed_notes(structure)))
        others = [drawing for drawing in drawings if not drawing.answers]
        found.append(Section("Where the model is redundant", rows=role_rows(study), drawings=others))
    if benches:
        found.append(Section("Speed and memory", 2, rows=speed_rows(benches), notes=[SPEED_NOTE]))
    return [each for each in found if len(each.rows) != 1 or each.drawings]


def _facts(study: Study) -> list[tuple[str, str]]:
    """Facts about the model and its calibration. A fact in which the points differ lists all its values."""
    facts: dict[str, list[str]] = {"model": [study.model]}
    for point in study.points:
        for name, fact in point.facts.items():
            facts.setdefault(name, []).append(fact)
    return [(name, "; ".join(dict.fromkeys(texts))) for name, texts in facts.items()]


def _points(study: Study) -> Section:
    """All points, with what to do if they were not evaluated, or cannot be compared."""
    rows, notes = point_rows(study), []
    if study.pruned and not study.suites:
        notes.append(_NOT_EVALUATED)
    baselines = {point.baseline_of for point in study.points}
    alone = {p.recipe.name: p.name for p in study.pruned if p.recipe.adaptive and p.structure is None and p.id not in baselines}
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
        texts.append(f"{'#' * part.level} {_escaped(part.title)}")
        if part.facts:
            texts.append("\n".join(f"- {_escaped(name)}: {_escaped(fact)}" for name, fact in part.facts))
        if len(part.rows) > 1:
            texts.append(markdown_table([[_escaped(cell) for cell in row] for row in part.rows]))
            texts += map(_escaped, part.notes)
        for drawing in part.drawings:
            texts += [f"![{_escaped(drawing.title)}]({FIGURES}/{drawing.name}.svg)", _escaped(drawing.caption)]
    return "\n\n".join(texts) + "\n"


def _escaped(text: str) -> str:
    """Text with Markdown's special characters escaped, except bars, which the table escapes in its cells."""
    return re.sub(r"([\\`*_{}\[\]<>#~$&])", r"\\\1", printable(text, 1000))


def html_page(title: str, parts: Sequence[Section]) -> str:
    """The page as HTML by the template page.html.j2: figures inside it, no scripts, no requests, all texts escaped."""

    def safe(value: Any) -> Any:
        return printable(value, 1000) if type(value) is str else value

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True, finalize=safe
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template("page.html.j2").render(title=title, parts=parts)
