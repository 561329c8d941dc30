"""A report as Markdown and as one self-contained HTML page, with the same headings, text, tables and figures."""

import html
import re
from collections.abc import Sequence

from emp_llm.common.tables import Rows, markdown_table
from emp_llm.reporting.figures.style import Drawing
from emp_llm.reporting.headlines import Headline
from emp_llm.reporting.page import Facts, Heading, PagePart, Paragraph, Table
from emp_llm.reporting.page_style import STYLE, themed

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
