"""A report as Markdown and as one self-contained HTML page, with the same headings, text, tables and figures."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from emp_llm.common.tables import Rows, markdown_table
from emp_llm.evaluation.measured_values import in_percent
from emp_llm.reporting.figures.style import Drawing
from emp_llm.reporting.page_tables import difference_rows, point_rows, role_rows, verdicts
from emp_llm.reporting.studies.study import Study, StudySuite

FIGURES = "figures"
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#~$&])")
_ID = re.compile(r'\b(id|xlink:href|clip-path)="(url\(#|#)?([^"#()]+)(\)?)"')
_DIFFERENCES = (
    "EMP − baseline: the difference of perplexities in percent, with the standard error of the paired losses of the text's "
    "blocks if the results hold them; the difference of accuracies in points. Both models have the same number of zeros, in "
    "total or in every matrix."
)
_UNPAIRED = (
    "Standard errors of differences of accuracies are unpaired: the root of the sum of both squares, as if the two models had "
    "answered different examples, because results files do not hold individual answers. Paired errors are usually smaller, so "
    "a difference that is not clear here may still be real."
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --rule: #d0d0d0; --faint: #666666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #181818; --rule: #444444; --faint: #a0a0a0; } }
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 880px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.3em; border-bottom: 1px solid var(--rule); margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 9px; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
figure { margin: 1.5em 0; } figure svg { width: 100%; height: auto; background: #ffffff; }
figcaption, .note { color: var(--faint); font-size: 13px; }
""".strip()


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class BulletList:
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    rows: Rows


PagePart = Heading | Paragraph | BulletList | Table | Drawing


def page_parts(title: str, studies: Sequence[tuple[Study, list[Drawing]]]) -> list[PagePart]:
    """The parts of a report from top to bottom."""
    parts: list[PagePart] = [Heading(title, 1)]
    for study, drawings in studies:
        parts.append(Heading(study.title))
        parts.append(_facts(study))
        left = {drawing.name: drawing for drawing in drawings}
        sentences = [sentence for suite in study.suites for sentence in verdicts(study, suite)]
        if sentences:
            parts += [Heading("Is EMP better at the same sparsity?", 3), BulletList(tuple(sentences))]
        parts += [left.pop(drawing.name) for drawing in drawings if drawing.answers]
        for suite in study.suites:
            rows = difference_rows(study, suite)
            named = [Paragraph(f"Suite {suite.name}:")] if len(study.suites) > 1 else []
            parts += [*named, Table(rows), Paragraph(_DIFFERENCES), *_unpaired(suite)] if len(rows) > 1 else []
        if len(study.pruned):
            parts += [Heading("All points", 3), Table(point_rows(study)), *_unpaired(*study.suites)]
        rows = role_rows(study)
        if len(rows) > 1:
            parts += [Heading("Where the model is redundant", 3), Table(rows)]
        parts += left.values()
    return parts


def _facts(study: Study) -> BulletList:
    """Facts about the model and its calibration. A fact in which the points differ lists all its values."""
    facts: dict[str, list[str]] = {}
    for point in study.points:
        for name, fact in point.facts.items():
            facts.setdefault(name, []).append(fact)
    facts = facts or {"model": [study.model]}
    return BulletList(tuple(f"{name}: {'; '.join(dict.fromkeys(texts))}" for name, texts in facts.items()))


def _unpaired(*suites: StudySuite) -> list[PagePart]:
    """The explanation of the errors of accuracies' differences, if a suite has accuracies."""
    return [Paragraph(_UNPAIRED)] if any(in_percent(measure) for suite in suites for measure in suite.measures) else []


def markdown_page(parts: Sequence[PagePart]) -> str:
    """The page as Markdown; its figures are in a folder beside it."""
    lines = []
    for part in parts:
        match part:
            case Heading():
                lines.append(f"{'#' * part.level} {_escaped(part.text)}")
            case Paragraph():
                lines.append(_escaped(part.text))
            case BulletList():
                lines.append("\n".join(f"- {_escaped(sentence)}" for sentence in part.sentences))
            case Table():
                lines.append(markdown_table([[_escaped(cell) for cell in row] for row in part.rows]))
            case Drawing():
                lines += [f"![{_escaped(part.title)}]({FIGURES}/{part.name}.svg)", _escaped(part.caption)]
    return "\n\n".join(lines) + "\n"


def html_page(title: str, parts: Sequence[PagePart]) -> str:
    """The page as HTML: figures inline, no scripts, no requests."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>"
    )
    return "\n".join([head, *(_html(part) for part in parts), "</body>\n</html>\n"])


def _html(part: PagePart) -> str:
    match part:
        case Heading():
            return f"<h{part.level}>{html.escape(part.text)}</h{part.level}>"
        case Paragraph():
            return f'<p class="note">{html.escape(part.text)}</p>'
        case BulletList():
            return "<ul>\n" + "\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in part.sentences) + "\n</ul>"
        case Table():
            return f'<div class="wide">\n{_html_table(part.rows)}\n</div>'
        case Drawing():
            return f"<figure>\n{inline_svg(part)}\n<figcaption>{html.escape(part.caption)}</figcaption>\n</figure>"


def _html_table(rows: Rows) -> str:
    def line(row: list[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row) + "</tr>"

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
    """The svg element of a figure, for a page with several: without prologue, with a label and with unique ids."""
    text = drawing.svg.decode("utf-8")
    text = text[text.index("<svg") :].rstrip()

    def own(match: re.Match[str]) -> str:
        attribute, before, name, after = match.groups()
        if attribute != "id" and before is None:
            return match.group(0)
        return f'{attribute}="{before or ""}{drawing.name}-{name}{after}"'

    text = _ID.sub(own, text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(drawing.title)}"', 1)


def _escaped(text: str) -> str:
    """Text with Markdown's special characters escaped, except bars, which the table escapes in its cells."""
    return _MARKDOWN.sub(r"\\\1", text)
