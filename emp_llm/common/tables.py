"""Tables as text: aligned for a terminal, Markdown or CSV. The first row is the heading."""

import csv
import re
from collections.abc import Iterable, Sequence
from io import StringIO

Rows = list[list[str]]
# The beginning of a formula; numbers and signs alone are none.
_CODE = re.compile(r"`[^`]*`")
_MARKUP = re.compile(r"[\\`*{}\[\]<>#~$&|]|(?<!\w)_|_(?!\w)")
_FORMULA = re.compile(r"(?![-+]?([0-9.]+(e[-+]?[0-9]+)?|inf|nan)?$)[-=+@\t\r]")


def table(rows: Rows) -> str:
    """Aligned columns: the first aligned left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown_table(rows: Rows, as_markdown: bool = False) -> str:
    """A table in the Markdown of GitHub and the Hub.

    Args:
        rows: The heading, then the rows.
        as_markdown: The cells are Markdown of our own; otherwise each is shown as it is.
    """
    cell_of = _bars_escaped if as_markdown else _cell
    lines = ["| " + " | ".join(cell_of(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A cell of a Markdown table; code stays code."""
    if _CODE.fullmatch(text):
        return _bars_escaped(printable_text(text))
    return markdown_text(text)


def _bars_escaped(text: str) -> str:
    """Markdown whose bars do not end a cell."""
    return text.replace("|", "\\|")


def markdown_text(text: str) -> str:
    """Text on one line that Markdown shows as it is: no link, HTML, code, heading or cell comes
    of it.
    """
    return _MARKUP.sub(r"\\\g<0>", printable_text(text))


def markdown_code(text: str) -> str:
    """Text on one line as code; it cannot end the code."""
    return printable_text(text).replace("`", "'")


def printable_text(text: str) -> str:
    """Text without control characters and line breaks."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def csv_table(rows: Iterable[Sequence[object]]) -> str:
    """Comma-separated values, quoted where necessary, with all digits; None is empty.

    An apostrophe keeps spreadsheets from computing a text as a formula.
    """
    text = StringIO()
    cells = (
        [str(cell).lower() if isinstance(cell, bool) else cell for cell in row] for row in rows
    )
    safe = ([_safe(cell) if isinstance(cell, str) else cell for cell in row] for row in cells)
    csv.writer(text, lineterminator="\n").writerows(safe)
    return text.getvalue().rstrip("\n")


def _safe(text: str) -> str:
    """A text that no spreadsheet computes, and no terminal obeys."""
    return f"'{printable_text(text)}" if _FORMULA.match(text) else printable_text(text)


def percent_cell(fraction: float | None) -> str:
    """A fraction as a cell, in percent with two decimals; a dash for None."""
    return "-" if fraction is None else _rounded(100 * fraction, 2)


def number_cell(value: float | None) -> str:
    """A number as a cell, with three decimals; a dash for None."""
    return "-" if value is None else _rounded(value, 3)


def _rounded(value: float, decimals: int) -> str:
    """A number with `decimals` decimals; never "-0.00"."""
    return f"{round(value, decimals) + 0.0:.{decimals}f}"
