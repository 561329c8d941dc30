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
from typing import Any

import numpy as np

from emp_llm.common.errors import UserError, printable, reason
from emp_llm.evaluation.comparison import in_percent
from emp_llm.reporting.run_tables import main_measures
from emp_llm.reporting.studies import (
    Curve,
    Difference,
    Grid,
    Study,
    StudySuite,
    curves,
    differences,
    label_of,
    lower_is_better,
)

WIDTH = 8.0  # inches
_DPI = 150
# Okabe and Ito, "Color universal design" (2008): distinct for all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
_TITLE = 76  # characters of a line of a title
LABEL = 36  # characters of a name that fit beside a panel
N_EFF = r"$N_\mathrm{eff}$"  # for labels with parse_math=True
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
        suite: key of the suite on which it compares methods; empty: it compares none.
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes
    suite: str = ""


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


def drawn(figure: Any, name: str, title: str, caption: str, suite: str = "") -> Drawing:
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
    return Drawing(name, title, caption, svg.getvalue(), png.getvalue(), suite)


def slug(text: str) -> str:
    """Text as part of a file name: its ASCII letters and digits in lower case, joined by
    hyphens.
    """
    words = "".join(
        letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower()
    ).split()
    return "-".join(words)[:60]


_LINES = {"emp": "-", "total": "--", "matrix": ":"}
_LOG_FROM = 3.0  # ratio of largest to smallest perplexity above which its axis is logarithmic
# More would exceed the height of an image.
_MOST_MAPS = 24
_MOST_ROWS = 48


def draw(study: Study, title: str) -> list[Drawing]:
    """All figures for which a study has data; their names begin with `title` in letters, digits
    and hyphens.
    """
    name = slug(title) or "model"
    drawings = []
    for number, suite in enumerate(study.suites, 1):
        for measure in main_measures(suite.measures):
            drawing = _sparsity_figure(
                study, suite, measure, name if number == 1 else f"{name}-suite{number}"
            )
            drawings += [] if drawing is None else [drawing]
    if study.measured:
        drawings.append(_heat_maps(study, study.measured[:_MOST_MAPS], f"{name}-n-eff"))
    return drawings


def _sparsity_figure(study: Study, suite: StudySuite, measure: str, name: str) -> Drawing | None:
    """A measure against sparsity; below it, the differences between EMP and its baselines. None for
    a single sparsity: the tables say it all.
    """
    lines = curves(study, suite, measure)
    if len({dot.sparsity for curve in lines for dot in curve.dots}) < 2:
        return None
    gaps = [
        difference
        for difference in differences(study, suite)
        if difference.measure == measure and math.isfinite(difference.change.value)
    ]
    styles = _styles(lines)
    dense = suite.dense.get(measure)
    with new_figure(6.4 if gaps else 3.9) as figure:
        heights = (3, 2) if gaps else (1,)
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        main = panels[0]
        for curve in lines:
            main.errorbar(
                [100 * dot.sparsity for dot in curve.dots],
                [dot.value for dot in curve.dots],
                yerr=[2 * (dot.stderr or 0.0) for dot in curve.dots],
                elinewidth=0.8,
                **styles[curve],
            )
        main.set_ylabel(f"{measure}, %" if in_percent(measure) else measure)
        if dense is not None and math.isfinite(dense.value):
            label = f"dense model, {dense.value:.4g}"
            main.axhline(dense.value, color=GREY, linewidth=1.2, label=label)
        _log_scale(main, measure, [dot.value for curve in lines for dot in curve.dots])
        if gaps:
            styles_of = {curve.label: styles[curve] for curve in lines}
            _difference_panel(panels[1], measure, gaps, styles_of)
        panels[-1].set_xlabel("weights removed, % of the targets")
        figure.legend(
            *main.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=3.2
        )
        values = [point.values_of(suite.key).get(measure) for point in study.pruned]
        partial = (
            " (partial)" if any(value is not None and value.partial for value in values) else ""
        )
        title = f"{study.title}: {measure}, suite {suite.name}{partial}"
        caption = _caption(measure, gaps)
        return drawn(figure, f"{name}-{slug(measure)}", title, caption, suite.key)


def _styles(lines: list[Curve]) -> dict[Curve, dict[str, Any]]:
    """Colour by criterion, and by order if there are several; line and marker by the allocation
    of the zeros.
    """
    several = len({curve.order for curve in lines if curve.allocation == "emp"}) > 1
    keys = [(curve.criterion, curve.order if several else None) for curve in lines]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    styles = {}
    for curve, key in zip(lines, keys, strict=True):
        number = numbers[key] % len(COLOURS)
        emp = curve.allocation == "emp"
        styles[curve] = {
            "color": COLOURS[number],
            "marker": "x" if curve.allocation == "matrix" else MARKERS[number],
            "markerfacecolor": COLOURS[number] if emp else "white",
            "linestyle": _LINES[curve.allocation],
            "label": printable(curve.label, LABEL),
            "zorder": 3 if emp else 2.5,
        }
    return styles


def _log_scale(axes: Any, measure: str, values: list[float]) -> None:
    """A logarithmic axis with plain numbers, for perplexities that differ by more than _LOG_FROM
    times.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    if not lower_is_better(measure) or min(values) <= 0 or max(values) / min(values) < _LOG_FROM:
        return
    axes.set_yscale("log")
    ticks = (1, 1.5, 2, 3, 5, 7) if max(values) / min(values) < 30 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _difference_panel(
    axes: Any, measure: str, gaps: list[Difference], styles: dict[str, dict[str, Any]]
) -> None:
    """The difference between EMP and each baseline, ± two standard errors where these are known."""
    lines: dict[tuple[str, str], list[Difference]] = {}
    for gap in sorted(gaps, key=lambda gap: gap.point.sparsity):
        lines.setdefault((label_of(gap.point), gap.match), []).append(gap)
    reach = max(100 * gap.point.sparsity for gap in gaps)
    for number, ((label, match), members) in enumerate(lines.items()):
        # So that bars do not cover each other.
        aside = 0.006 * reach * (number - (len(lines) - 1) / 2)
        style = {key: styles[label][key] for key in ("color", "marker", "zorder")}
        style |= {"linestyle": _LINES[match], "markerfacecolor": "white"}
        if match == "matrix":
            style["marker"] = "x"
        axes.errorbar(
            [100 * gap.point.sparsity + aside for gap in members],
            [gap.change.value for gap in members],
            yerr=[2 * (gap.change.stderr or 0.0) for gap in members],
            elinewidth=0.8,
            **style,
        )
    axes.axhline(0, color="black", linewidth=0.9)
    if max(abs(gap.change.value) for gap in gaps) > 30:
        axes.set_yscale("symlog", linthresh=5)
        axes.yaxis.set_major_formatter("{x:g}")
    lower = lower_is_better(measure)
    unit = "points" if in_percent(measure) else "%"
    side = ""
    if lower is not None:
        side = f"\n({'below' if lower else 'above'} 0: EMP is better)"
    axes.set_ylabel(f"EMP − baseline, {unit}{side}")


def _caption(measure: str, gaps: list[Difference]) -> str:
    of = "" if in_percent(measure) else " of the change from the dense model"
    text = (
        f"{measure[:1].upper()}{measure[1:]} against the share of weights removed; bars: ± two "
        f"standard errors{of}."
    )
    if gaps:
        text += (
            " Below: the difference between EMP and a baseline of the same criterion with uniform "
            "rows that removes as many weights, in total (dashed) or in every matrix (dotted)."
        )
    if any(gap.change.stderr is not None for gap in gaps):
        errors = "paired" if all(gap.change.paired for gap in gaps) else "unpaired"
        text += f" Its bars: ± two standard errors ({errors})."
    return text


def _heat_maps(study: Study, grids: list[Grid], name: str) -> Drawing:
    """N_eff / N by role and block: one map for each criterion and order, below each other, with
    one colour scale.
    """
    maps = []
    for grid in grids:
        rows = [
            [grid.shares.get((role, block)) for block in grid.blocks]
            for role in grid.roles[:_MOST_ROWS]
        ]
        maps.append(np.array(rows, dtype=float))  # NaN where it is unknown
    low = math.floor(20 * min(map(np.nanmin, maps))) / 20
    high = max(math.ceil(20 * max(map(np.nanmax, maps))) / 20, low + 0.05)
    heights = [0.55 + 0.32 * len(cells) for cells in maps]
    with new_figure(1.2 + sum(heights)) as figure:
        panels = figure.subplots(len(grids), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, grid, cells in zip(panels, grids, maps, strict=True):
            axes.set_facecolor("#eeeeee")
            axes.grid(visible=False)
            image = axes.pcolormesh(
                cells, cmap="viridis", vmin=low, vmax=high, edgecolors="white", linewidth=0.3
            )
            axes.invert_yaxis()
            axes.set_title(printable(grid.label, 2 * LABEL), loc="left")
            axes.set_yticks(
                np.arange(len(cells)) + 0.5,
                [printable(role, LABEL) for role in grid.roles[:_MOST_ROWS]],
            )
            _block_ticks(axes, grid.blocks)
        panels[-1].set_xlabel("block")
        bar = figure.colorbar(
            image, ax=list(panels), location="bottom", shrink=0.6, aspect=36, pad=0.02
        )
        bar.set_label(f"{N_EFF} / N, mean over the rows", parse_math=True)
        caption = (
            "Effective number of weights of a row, N_eff, as a share of the row's N weights, by "
            "layer and block. Dark: few weights carry the row's importance. Independent Gaussian "
            "weights have 2/π = 0.637."
        )
        return drawn(figure, name, f"{study.title}: effective number of weights", caption)


def _block_ticks(axes: Any, blocks: Sequence[int | None]) -> None:
    """Label the axis with the number of every block, or of evenly spaced blocks if there are
    many.
    """
    at = range(0, len(blocks), math.ceil(len(blocks) / 24))
    axes.set_xticks(
        [place + 0.5 for place in at],
        ["none" if blocks[place] is None else str(blocks[place]) for place in at],
    )
