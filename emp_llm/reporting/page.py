"""A report as Markdown and as one self-contained HTML page, with the same headings, text, tables and figures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from emp_llm.common.errors import count_of
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.evaluation.values import UNPAIRED
from emp_llm.records.bench import Bench
from emp_llm.reporting.figures import Drawing
from emp_llm.reporting.page_tables import Headline, difference_rows, fit_rows, headlines, point_rows, role_rows, verdict_rows
from emp_llm.reporting.run_tables import SPEED_NOTE, cost_rows, speed_notes, speed_rows, structure_rows
from emp_llm.reporting.studies import Study, label_of

# Colours of the figures -> (variable, value on a dark page). On a light page they keep their values.
_THEME = {
    "#ffffff": ("paper", "#16181c"),
    "#000000": ("ink", "#e8e8e8"),
    "#666666": ("faint", "#a6a9ae"),
    "#dddddd": ("grid", "#3a3d42"),
    "#eeeeee": ("empty", "#2a2d31"),
    "#00664b": ("better", "#5fd3ae"),
    "#0072b2": ("blue", "#4fa8e0"),
    "#d55e00": ("red", "#ff8b42"),
    "#009e73": ("green", "#35c79c"),
    "#cc79a7": ("pink", "#e39cc5"),
    "#e69f00": ("orange", "#f0b73a"),
    "#56b4e9": ("sky", "#a3d8f7"),
}
_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")


def _themed(svg: str) -> str:
    """A figure with its colours as variables of the page, so that it is dark on a dark page. Others, such as a map's, stay."""

    def variable(match: re.Match[str]) -> str:
        name, colour = match.groups()
        return f"{name}: var(--{_THEME[colour][0]})" if colour in _THEME else match.group(0)

    return _COLOUR.sub(variable, svg)


_POINTS = "All points"
_REDUNDANT = "Where the model is redundant"
_FITS = "Output error of the fitted layers"
_ERROR = (
    "The squared error of the layers' outputs as a share of the dense outputs, with the masked weights (before) and with the "
    "fitted ones (after). Held out: on sequences of the calibration text to which no weight was fitted."
)
_SPEED = "Speed and memory"
_UNITS = "Heads and neurons"
_QUESTION = "Is EMP better at the same sparsity?"
_CLEARLY = "Number of points. Clearly: by more than two standard errors of the difference, where these are known."
_DIFFERENCES = (
    "EMP − baseline: the difference of perplexities in percent, and of accuracies in points. Both models have the same number "
    "of zeros, in total or in every matrix."
)
_PAIRED = (
    "± of a difference: its paired standard error. Both models were judged on the same examples and blocks of text, and only "
    "those count on which they differ."
)
_PARTIAL = "* partial: only some of the examples or of the text."
_UNPAIRED = (
    f"{UNPAIRED} An unpaired standard error: the root of the sum of both squares, as if the two models had answered different "
    "examples. The results of one of them do not hold its answers (an older emp-llm wrote them), or the examples differ. "
    "Paired errors are usually smaller, so a difference that is not clear here may still be real."
)


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Facts:
    """Short facts, each with its name."""

    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    rows: Rows
    title: str


PagePart = Heading | Paragraph | Facts | Headline | Table | Drawing


def page_parts(
    title: str,
    studies: Sequence[tuple[Study, list[Drawing]]],
    benches: Sequence[Bench] = (),
) -> list[PagePart]:
    """The parts of a report from top to bottom."""
    parts: list[PagePart] = [Heading(title, 1)]
    for study, drawings in studies:
        heads = headlines(study)
        parts += [Heading(study.title), *heads, _facts(study)]
        if len(study.pruned) > len(heads):
            parts.append(Paragraph(f"All {count_of(len(study.pruned), 'pruned model')} are listed under “{_POINTS}”."))
        left = {drawing.name: drawing for drawing in drawings}
        rows = verdict_rows(study)
        if len(rows) > 1:
            parts += [Heading(_QUESTION, 3), Table(rows, _QUESTION), Paragraph(_CLEARLY)]
        parts += [left.pop(drawing.name) for drawing in drawings if drawing.answers]
        for suite in study.suites:
            rows = difference_rows(study, suite)
            named = [Paragraph(f"Suite {suite.name}:")] if len(study.suites) > 1 else []
            parts += (
                [*named, Table(rows, f"differences, suite {suite.name}"), Paragraph(_DIFFERENCES), *_error_notes(rows)]
                if len(rows) > 1
                else []
            )
        if len(study.pruned):
            rows = point_rows(study)
            parts += [Heading(_POINTS, 3), Table(rows, _POINTS), *_error_notes(rows)]
        rows = fit_rows(study)
        if len(rows) > 1:
            parts += [Heading(_FITS, 3), Table(rows, _FITS), Paragraph(_ERROR)]
        parts += _structures(study)
        rows = role_rows(study)
        if len(rows) > 1:
            parts += [Heading(_REDUNDANT, 3), Table(rows, _REDUNDANT)]
        parts += left.values()
    if benches:
        parts += [Heading(_SPEED), Table(speed_rows(benches), _SPEED), Paragraph(SPEED_NOTE)]
    return parts


def _structures(study: Study) -> list[PagePart]:
    """For each structured point, the heads and neurons that stay, and size and speed."""
    parts: list[PagePart] = []
    for point in study.points:
        if point.structure is not None:
            title = f"{label_of(point)} ({point.name})"
            parts += [Heading(f"{_UNITS}: {title}", 3), Table(structure_rows(point.structure), f"{_UNITS}, {title}")]
            parts += [Table(cost_rows(point.structure), f"{_SPEED}, {title}"), *map(Paragraph, speed_notes(point.structure))]
    return parts


def _facts(study: Study) -> Facts:
    """Facts about the model and its calibration. A fact in which the points differ lists all its values."""
    facts: dict[str, list[str]] = {}
    for point in study.points:
        for name, fact in point.facts.items():
            facts.setdefault(name, []).append(fact)
    facts = facts or {"model": [study.model]}
    return Facts(tuple((name, "; ".join(dict.fromkeys(texts))) for name, texts in facts.items()))


def _error_notes(rows: Rows) -> list[PagePart]:
    """The explanation of a table's marks and of the standard errors of its differences: the kinds that it holds."""
    changes = [cell for row in rows[1:] for cell in row if "±" in cell and cell[0] in "+-0"]
    paired = [Paragraph(_PAIRED)] if any(UNPAIRED not in cell for cell in changes) else []
    unpaired = [Paragraph(_UNPAIRED)] if any(UNPAIRED in cell for cell in changes) else []
    partial = [Paragraph(_PARTIAL)] if any(cell.endswith(" *") for row in rows[1:] for cell in row) else []
    return [*paired, *unpaired, *partial]


FIGURES = "figures"
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#~$&])")
_ID = re.compile(r'\b(id|xlink:href|clip-path)="(url\(#|#)?([^"#()]+)(\)?)"')
_NUMBER = re.compile(r"[+-]?\d|-$|infinite|\+inf|$")  # the beginning of a cell of numbers
_LONG_HEADING, _LONG_TEXT = 14, 30  # characters in a heading or a text that may be broken across lines


def markdown_page(parts: Sequence[PagePart]) -> str:
    """The page as Markdown; its figures are in a folder beside it."""
    lines = []
    for part in parts:
        match part:
            case Heading():
                lines.append(f"{'#' * part.level} {_escaped(part.text)}")
            case Paragraph():
                lines.append(_escaped(part.text))
            case Facts():
                lines.append("\n".join(f"- {_escaped(name)}: {_escaped(fact)}" for name, fact in part.facts))
            case Headline():
                lines += [f"**{_escaped(part.title)}**", _markdown_tiles(part)]
            case Table():
                lines.append(markdown_table([[_escaped(cell) for cell in row] for row in part.rows]))
            case Drawing():
                lines += [f"![{_escaped(part.title)}]({FIGURES}/{part.name}.svg)", _escaped(part.caption)]
    return "\n\n".join(lines) + "\n"


def _markdown_tiles(headline: Headline) -> str:
    lines = []
    for tile in headline.tiles:
        numbers = "; ".join(f"**{_escaped(number)}** {_escaped(words)}" for number, words in tile.entries)
        note = _escaped(tile.note)
        lines.append(f"- {tile.title}: " + (f"{numbers} ({note})" if numbers else note))
    return "\n".join(lines)


def html_page(title: str, parts: Sequence[PagePart]) -> str:
    """The page as HTML by the template page.html.j2: figures inline, no scripts, no requests, all texts escaped."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True)
    environment.tests["kind"] = lambda part, name: type(part).__name__ == name
    environment.filters |= {"marked": _marked_cells, "inline_svg": inline_svg}
    colours = [(name, colour, dark) for colour, (name, dark) in _THEME.items()]
    return environment.get_template("page.html.j2").render(title=title, parts=parts, colours=colours)


def _marked_cells(rows: Rows) -> list[list[tuple[str, str]]]:
    """The cells of a table with their CSS classes. Numbers are never broken across lines; long texts and headings may be."""
    columns = list(zip(*rows[1:], strict=True))
    texts = [not all(map(_NUMBER.match, column)) for column in columns]
    wide = [is_text and max(map(len, column)) > _LONG_TEXT for is_text, column in zip(texts, columns, strict=True)]
    marked = []
    for number, row in enumerate(rows):
        long = wide if number else [len(cell) > _LONG_HEADING for cell in row]
        marks = [" ".join(["text"] * is_text + ["long"] * is_long) for is_text, is_long in zip(texts, long, strict=True)]
        marked.append(list(zip(row, marks, strict=True)))
    return marked


def inline_svg(drawing: Drawing) -> Markup:
    """The svg element of a figure, for a page with several: with a label, with unique ids, and in the colours of the page."""
    text = drawing.svg.decode("utf-8")
    text = text[text.index("<svg") :].rstrip()

    def own(match: re.Match[str]) -> str:
        attribute, before, name, after = match.groups()
        if attribute != "id" and before is None:
            return match.group(0)
        return f'{attribute}="{before or ""}{drawing.name}-{name}{after}"'

    text = _ID.sub(own, text)
    return Markup(_themed(text).replace("<svg", f'<svg role="img" aria-label="{escape(drawing.title)}"', 1))


def _escaped(text: str) -> str:
    """Text with Markdown's special characters escaped, except bars, which the table escapes in its cells."""
    return _MARKDOWN.sub(r"\\\1", text)
