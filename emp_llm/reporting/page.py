"""The figures of a report as SVG and PNG: the same data give the same bytes. Only this file
imports matplotlib.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from textwrap import fill
from typing import Any, ClassVar

import msgspec

from emp_llm.common.errors import UserError, printable, reason
from emp_llm.common.paths import shown_name
from emp_llm.common.tables import csv_table, markdown_text
from emp_llm.evaluation.comparison import in_percent
from emp_llm.records.base import FileRecord
from emp_llm.records.evaluation import Bench
from emp_llm.reporting.run_tables import SPEED_NOTE, speed_rows
from emp_llm.reporting.studies import (
    CSV_HEAD,
    Curve,
    Point,
    Study,
    StudySuite,
    csv_rows,
    curves,
    main_columns,
    point_rows,
    points_markdown,
    points_text,
    studies,
)

WIDTH = 8.0  # inches
_DPI = 150
# Okabe and Ito, "Color universal design" (2008): distinct for all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
_TITLE = 76  # characters of a line of a title
LABEL = 36  # characters of a name that fit beside a panel
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # a dollar in a name is no mathematics
    "svg.fonttype": "none",
    "path.simplify": False,
}


@dataclass(frozen=True)
class Drawing:
    """A figure as files.

    Attributes:
        name: of its files, without extension; unique in a report.
        title, caption: title in a few words; explanation in sentences.
        svg, png: the content of the files.
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes


@contextmanager
def new_figure(height: float) -> Iterator[Any]:
    """An empty figure of the common width; height in inches. The user's matplotlib settings have no
    effect in this context.

    Raises:
        UserError: matplotlib is not installed; the message says how to install it.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"Plots need matplotlib ({reason(error)}): pip install matplotlib, or add --no-plots."
        ) from error
    with style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # names in other scripts: boxes, in the PNG only
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def render(figure: Any, name: str, title: str, caption: str) -> Drawing:
    """Render a finished figure as SVG and PNG, without dates or versions; call it within the
    context of `new_figure`.
    """
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = name  # the same ids in every run
    # On as many lines as it needs.
    heading = fill(printable(title, 4 * _TITLE), _TITLE)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, weight="bold")
    svg = BytesIO()
    png = BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(
        png, format="png", dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True}
    )
    return Drawing(name, title, caption, svg.getvalue(), png.getvalue())


def slug(text: str) -> str:
    """Text as part of a file name: its ASCII letters and digits in lower case, joined by
    hyphens.
    """
    words = "".join(
        letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower()
    ).split()
    return "-".join(words)[:60]


_LOG_FROM = 3.0  # ratio of largest to smallest perplexity above which its axis is logarithmic


def draw(study: Study, title: str) -> list[Drawing]:
    """A figure of each main measure; their names begin with `title` in letters, digits and hyphens.
    None of a single point.
    """
    name = slug(title) or "model"
    drawings = []
    for suite, measure in main_columns(study):
        number = study.suites.index(suite) + 1
        lines = curves(study, suite, measure)
        if sum(len(curve.dots) for curve in lines) > 1:
            of = name if number == 1 else f"{name}-suite{number}"
            drawings.append(_figure(study, suite, measure, lines, of))
    return drawings


def _figure(
    study: Study, suite: StudySuite, measure: str, lines: list[Curve], name: str
) -> Drawing:
    """A measure against sparsity, a line for each method; of a single sparsity, a bar for each
    point.
    """
    dots = [dot for curve in lines for dot in curve.dots]
    low, high = (100 * end(dot.sparsity for dot in dots) for end in (min, max))
    styles = _styles(lines)
    dense = suite.dense.get(measure)
    unit = f"{measure}, %" if in_percent(measure) else measure
    one = high - low <= 1 + 1e-6
    with new_figure(1.6 + 0.32 * len(dots) if one else 3.9) as figure:
        axes = figure.subplots()
        names: list[str] = []
        for curve, style in zip(lines, styles, strict=True):
            places = range(len(names), len(names) + len(curve.dots))
            names += [style["label"]] * len(curve.dots)
            values = [dot.value for dot in curve.dots]
            errors = [2 * (dot.stderr or 0.0) for dot in curve.dots]
            if one:
                bars = axes.barh(places, values, xerr=errors, color=style["color"], height=0.6)
                axes.bar_label(bars, fmt="%.4g", padding=4)
            else:
                at = [100 * dot.sparsity for dot in curve.dots]
                axes.errorbar(at, values, yerr=errors, elinewidth=0.8, **style)
        if dense is not None and math.isfinite(dense.value):
            line = axes.axvline if one else axes.axhline
            label = f"dense model, {dense.value:.4g}"
            line(dense.value, color=GREY, linewidth=1.2, label=label)
        if one:
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.margins(x=0.12)  # for the numbers
            axes.set_xlabel(unit)
        else:
            axes.set_xlabel("weights removed, % of the targets")
            axes.set_ylabel(unit)
            _log_scale(axes, measure, [dot.value for dot in dots])
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=3.2)
        values_here = [point.values_of(suite.key).get(measure) for point in study.points]
        partial = any(value is not None and value.partial for value in values_here)
        title = f"{study.title}: {measure}, suite {suite.name}{' (partial)' * partial}"
        against = (
            f"at {high:.0f} % of weights removed" if one else "against the share of weights removed"
        )
        of = "" if in_percent(measure) else " of the change from the dense model"
        caption = f"{measure[:1].upper()}{measure[1:]} {against}; ±: two standard errors{of}."
        return render(figure, f"{name}-{slug(measure)}", title, caption)


def _styles(lines: list[Curve]) -> list[dict[str, Any]]:
    """Colour by criterion, and by order if there are several; line and marker by the allocation
    of the zeros.
    """
    points = [curve.point for curve in lines]
    orders = {point.recipe.counts.order for point in points if point.recipe.adaptive}
    keys = [
        (point.recipe.name, point.recipe.counts.order if len(orders) > 1 else None)
        for point in points
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    styles = []
    for point, key in zip(points, keys, strict=True):
        number = numbers[key] % len(COLOURS)
        emp = point.recipe.adaptive
        by_matrix = point.match == "matrix"
        line = ":" if by_matrix else "--"
        styles.append(
            {
                "color": COLOURS[number],
                "marker": "x" if by_matrix else MARKERS[number],
                "markerfacecolor": COLOURS[number] if emp else "white",
                "linestyle": "-" if emp else line,
                "label": printable(point.label, LABEL),
                "zorder": 3 if emp else 2.5,
            }
        )
    return styles


def _log_scale(axes: Any, measure: str, values: list[float]) -> None:
    """A logarithmic axis with plain numbers, for perplexities that differ by more than _LOG_FROM
    times.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    if "perplexity" not in measure or min(values) <= 0 or max(values) / min(values) < _LOG_FROM:
        return
    axes.set_yscale("log")
    ticks = (1, 1.5, 2, 3, 5, 7) if max(values) / min(values) < 30 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


# The files of a report: a page of Markdown, its figures, and points.csv.


FIGURES = "figures"


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
        texts += ["## Speed and memory", *points_markdown(speed_rows(benches), [SPEED_NOTE])]
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
    texts = [f"## {markdown_text(study.title)}", "\n".join(lines)]
    if study.points or study.suites:
        compared = study.against and any(point.recipe.adaptive for point in study.points)
        texts.append("### Is EMP better at the same sparsity?" if compared else "### All points")
        texts += points_markdown(*point_rows(study, main_columns(study)))
    for drawing in drawings:
        texts += [
            f"![{markdown_text(drawing.title)}]({FIGURES}/{drawing.name}.svg)",
            markdown_text(drawing.caption),
        ]
    return texts


SUMMARY = "report.json"


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
    points: Sequence[Point],
    benches: Sequence[Bench],
    title: str,
    plots: bool,
    against: str | None = None,
) -> tuple[dict[str, bytes], str]:
    """A report in memory.

    Args:
        points, benches: from `studies.read_inputs`.
        title: heading of the page.
        plots: whether to draw figures; UserError if matplotlib is missing.
        against: method or name of the baseline; None: the first.

    Returns:
        All files by their relative names; the tables of points, for a terminal.
    """
    files: dict[str, bytes] = {}
    drawn = []
    lines = []
    all_studies = studies(points, against)
    for number, study in enumerate(all_studies, 1):
        title_of_study = f"{number}-{study.title}" if len(all_studies) > 1 else study.title
        drawings = draw(study, title_of_study) if plots else []
        drawn.append((study, drawings))
        for drawing in drawings:
            files |= {
                f"{FIGURES}/{drawing.name}.svg": drawing.svg,
                f"{FIGURES}/{drawing.name}.png": drawing.png,
            }
        lines += [study.title, points_text(study)]
    title = printable(title)
    files["report.md"] = page_text(title, drawn, benches).encode()
    csv_lines = [line for study in all_studies for line in csv_rows(study)]
    if csv_lines:
        files["points.csv"] = f"{csv_table([CSV_HEAD, *csv_lines])}\n".encode()
    files[SUMMARY] = ReportPage(title=title, files=sorted(files)).encoded()
    return files, "\n".join(lines)
