"""A report as Markdown and as one self-contained HTML page, with the same headings, text, tables and figures."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

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


def themed(svg: str) -> str:
    """A figure with its colours as variables of the page, so that it is dark on a dark page. Others, such as a map's, stay."""

    def variable(match: re.Match[str]) -> str:
        name, colour = match.groups()
        return f"{name}: var(--{_THEME[colour][0]})" if colour in _THEME else match.group(0)

    return _COLOUR.sub(variable, svg)


def _variables(dark: bool) -> str:
    return " ".join(f"--{name}: {value if dark else colour};" for colour, (name, value) in _THEME.items())


STYLE = f"""
:root {{ color-scheme: light dark; --rule: #d4d7db; --tile: #f5f6f8; {_variables(dark=False)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --rule: #3a3d42; --tile: #1f2227; {_variables(dark=True)} }} }}
* {{ box-sizing: border-box; }}
body {{ color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 1120px;
  margin: 1.5em auto; padding: 0 1em; overflow-wrap: break-word; }}
h1 {{ font-size: 1.5em; margin: 0 0 0.5em; line-height: 1.25; }}
h2 {{ font-size: 1.25em; border-bottom: 1px solid var(--rule); margin: 1.2em 0 0.6em; line-height: 1.3; }}
h3 {{ font-size: 1.05em; margin: 1.6em 0 0.5em; }} h2 + h3 {{ margin-top: 0.6em; }}
h4 {{ font-size: 13px; margin: 0 0 0.3em; color: var(--faint); font-weight: 600; }}
p {{ margin: 0.6em 0; }} ul {{ padding-left: 1.2em; }} li {{ margin: 0.3em 0; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); gap: 12px; }}
.tile {{ background: var(--tile); border: 1px solid var(--rule); border-radius: 6px; padding: 10px 14px; }}
.tile p {{ margin: 0.15em 0; }} .tile p.note {{ margin-top: 0.5em; }}
.tile b {{ font-size: 1.2em; font-variant-numeric: tabular-nums; white-space: nowrap; margin-right: 0.25em; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 1em 0; font-size: 13px; }}
.facts div {{ min-width: 0; }} dt {{ display: inline; color: var(--faint); }} dt::after {{ content: ":"; }}
dd {{ display: inline; margin: 0 0 0 0.3em; }}
.wide {{ overflow-x: auto; max-width: 100%; background:
  linear-gradient(to left, var(--paper) 12px, transparent) right / 36px 100% no-repeat local,
  linear-gradient(to left, var(--rule), transparent) right / 14px 100% no-repeat scroll; }}
.wide:focus-visible {{ outline: 2px solid var(--blue); outline-offset: 2px; }}
table {{ border-collapse: separate; border-spacing: 0; font-size: 13px; font-variant-numeric: tabular-nums; margin: 0.3em 0; }}
th, td {{ padding: 4px 8px; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }}
td {{ white-space: nowrap; }} th {{ font-weight: 600; }} tbody tr:hover td {{ background: var(--tile); }}
th {{ vertical-align: bottom; }} th.long {{ min-width: 8.5em; text-wrap: balance; }}
.text {{ text-align: left; }} td.text.long {{ white-space: normal; min-width: 17em; }}
th:first-child, td:first-child {{ text-align: left; position: sticky; left: 0; background: var(--paper); }}
figure {{ margin: 1.5em 0; max-width: 880px; }} figure svg {{ display: block; width: 100%; min-width: 620px; height: auto;
  fill: var(--ink); }}
figcaption, .note {{ color: var(--faint); font-size: 13px; }}
@media (max-width: 600px) {{ body {{ margin-top: 0.8em; padding: 0 0.8em; }} td.long:first-child {{ position: static; }} }}
@media print {{ .wide {{ overflow: visible; }} figure svg {{ min-width: 0; }} figure, .tile, tr {{ break-inside: avoid; }} }}
""".strip()


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
    """The page as HTML: figures inline, no scripts, no requests."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>"
    )
    return "\n".join([head, *(_html(part) for part in parts), "</body>\n</html>\n"])


def _html(part: PagePart) -> str:
    match part:
        case Heading():
            return f"<h{part.level}>{html.escape(part.text)}</h{part.level}>"
        case Paragraph():
            return f'<p class="note">{html.escape(part.text)}</p>'
        case Facts():
            facts = "\n".join(
                f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(fact)}</dd></div>" for name, fact in part.facts
            )
            return f'<dl class="facts">\n{facts}\n</dl>'
        case Headline():
            return _html_headline(part)
        case Table():
            return _scrolling(_html_table(part.rows), f"Table: {part.title}")
        case Drawing():
            box = _scrolling(inline_svg(part), f"Figure: {part.title}")
            return f"<figure>\n{box}\n<figcaption>{html.escape(part.caption)}</figcaption>\n</figure>"


def _scrolling(content: str, label: str) -> str:
    """A box as wide as the page, in which wider content scrolls; the keyboard reaches it too."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(label)}">\n{content}\n</div>'


def _html_headline(headline: Headline) -> str:
    lines = [f"<h3>{html.escape(headline.title)}</h3>", '<div class="tiles">']
    for tile in headline.tiles:
        lines.append(f'<section class="tile">\n<h4>{html.escape(tile.title)}</h4>')
        lines += [f"<p><b>{html.escape(number)}</b> {html.escape(words)}</p>" for number, words in tile.entries]
        lines.append(f'<p class="note">{html.escape(tile.note)}</p>\n</section>')
    return "\n".join([*lines, "</div>"])


def _html_table(rows: Rows) -> str:
    """A table. Numbers are never broken across lines; long texts and headings may be."""
    columns = list(zip(*rows[1:], strict=True))
    texts = [not all(map(_NUMBER.match, column)) for column in columns]
    long_texts = [is_text and max(map(len, column)) > _LONG_TEXT for is_text, column in zip(texts, columns, strict=True)]

    def line(row: list[str], kind: str) -> str:
        cells = []
        for cell, is_text, is_long in zip(row, texts, long_texts, strict=True):
            long = len(cell) > _LONG_HEADING if kind == "th" else is_long
            names = " ".join(["text"] * is_text + ["long"] * long)
            mark = f' class="{names}"' if names else ""
            cells.append(f"<{kind}{mark}>{html.escape(cell)}</{kind}>")
        return f"<tr>{''.join(cells)}</tr>"

    return "\n".join(
        [
            "<table>",
            f"<thead>{line(rows[0], 'th')}</thead>",
            "<tbody>",
            *(line(r, "td") for r in rows[1:]),
            "</tbody>",
            "</table>",
        ]
    )


def inline_svg(drawing: Drawing) -> str:
    """The svg element of a figure, for a page with several: with a label, with unique ids, and in the colours of the page."""
    text = drawing.svg.decode("utf-8")
    text = text[text.index("<svg") :].rstrip()

    def own(match: re.Match[str]) -> str:
        attribute, before, name, after = match.groups()
        if attribute != "id" and before is None:
            return match.group(0)
        return f'{attribute}="{before or ""}{drawing.name}-{name}{after}"'

    text = _ID.sub(own, text)
    return themed(text).replace("<svg", f'<svg role="img" aria-label="{html.escape(drawing.title)}"', 1)


def _escaped(text: str) -> str:
    """Text with Markdown's special characters escaped, except bars, which the table escapes in its cells."""
    return _MARKDOWN.sub(r"\\\1", text)
