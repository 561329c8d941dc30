"""The figures of a report as SVG and PNG: the same data give the same bytes. Only this file imports matplotlib."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from emp_llm.common.errors import UserError, printable, reason
from emp_llm.evaluation.values import in_percent
from emp_llm.reporting.run_tables import effective_share
from emp_llm.reporting.studies import (
    Curve,
    Difference,
    Grid,
    Study,
    StudySuite,
    boxes,
    curves,
    differences,
    grids,
    lower_is_better,
    main_measures,
    masses,
    ordered_blocks,
)
from emp_llm.selection.effective import effective_mass_bound

WIDTH = 8.0  # inches
_DPI = 150
# Okabe and Ito, "Color universal design" (2008): distinct for all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
ON_DARK, ON_BRIGHT = "#fefefe", "#111111"  # on a map's colours, which are the same on a dark page: unlike white and black
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
        answers: whether it compares EMP with its baselines.
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes
    answers: bool = False


def check_matplotlib() -> None:
    """Raise UserError, which names the extra, if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"Plots need matplotlib ({reason(error)}). Install it: pip install 'emp-llm[plots]', or add --no-plots."
        ) from error


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style of figures while one is drawn; the user's matplotlib settings have no effect."""
    check_matplotlib()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in other scripts: boxes, in the PNG only
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float) -> Any:
    """An empty figure of the common width for Agg, with no window and no global state; height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def drawn(figure: Any, name: str, title: str, caption: str, answers: bool = False) -> Drawing:
    """Render a finished figure as SVG and PNG, without dates or versions; call it within `styled`."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = name  # distinct ids for the figures of one page
    figure.suptitle(printable(title, 76), x=0.01, ha="left", fontsize=11, weight="bold")
    svg, png = BytesIO(), BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return Drawing(name, title, caption, svg.getvalue(), png.getvalue(), answers)


def slug(text: str) -> str:
    """Text as part of a file name: its ASCII letters and digits in lower case, joined by hyphens."""
    words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower()).split()
    return "-".join(words)[:60]


_LINES = {"emp": "-", "total": "--", "matrix": ":"}
_LOG_FROM = 3.0  # ratio of largest to smallest perplexity above which its axis is logarithmic
_Style = dict[str, Any]


def sparsity_figures(study: Study, suite: StudySuite, measure: str, name: str) -> list[Drawing]:
    """One figure of all methods; if there are several orders, one for each criterion. None for a single sparsity."""
    found = curves(study, suite, measure)
    if len({dot.sparsity for curve in found for dot in curve.dots}) < 2:
        return []  # nothing to draw a curve through: the tables say it all
    gaps = [each for each in differences(study, suite) if each.measure == measure and math.isfinite(each.change.value)]
    if len({curve.order for curve in found if curve.allocation == "emp"}) <= 1:
        return [_figure(study, suite, measure, found, gaps, name)]
    drawings = []
    for criterion in dict.fromkeys(curve.criterion for curve in found):
        own = [curve for curve in found if curve.criterion == criterion]
        own_gaps = [each for each in gaps if each.point.criterion == criterion]
        drawings.append(_figure(study, suite, measure, own, own_gaps, f"{name}-{criterion}"))
    return drawings


def _figure(study: Study, suite: StudySuite, measure: str, found: list[Curve], gaps: list[Difference], name: str) -> Drawing:
    with styled():
        betas = _betas(found)
        figure = new_figure(6.4 if gaps else 3.9)
        grid = figure.add_gridspec(2 if gaps else 1, 2, height_ratios=(3, 2) if gaps else (1,))
        styles = _styles(found)
        by_sparsity = figure.add_subplot(grid[0, 1] if len(betas) > 1 else grid[0, :])
        panels = [by_sparsity]
        if len(betas) > 1:
            by_beta = figure.add_subplot(grid[0, 0], sharey=by_sparsity)
            by_beta.set_xlabel(f"β  (EMP keeps β {N_EFF} of each row)", parse_math=True)
            by_beta.set_ylabel(_unit(measure))
            by_sparsity.tick_params(labelleft=False)
            panels.insert(0, by_beta)
            for curve in found:
                dots = sorted((dot.beta, dot.value) for dot in curve.dots if dot.beta is not None)
                several = len({beta for beta, _ in dots}) < len(dots)  # a baseline shared by EMP points of several orders
                by_beta.plot(*_columns(dots), **styles[curve] | ({"linestyle": "none"} if several else {}))
        else:
            by_sparsity.set_ylabel(_unit(measure))
        by_sparsity.set_xlabel("weights removed, % of the targets")
        for curve in found:
            by_sparsity.plot(*_columns([(100 * dot.sparsity, dot.value) for dot in curve.dots]), **styles[curve])
        _scale(by_sparsity, measure, found)
        dense = suite.dense.values.get(measure) if suite.dense else None
        if dense is not None and math.isfinite(dense.value):
            for panel in panels:
                panel.axhline(dense.value, color=GREY, linewidth=1.2)
            left = len(panels) > 1  # away from the curves: these are far from the dense line at small β and high sparsity
            where = ((0.02 if left else 0.98), dense.value)
            panels[0].annotate(f"dense {dense.value:.4g}", where, (0, 3), ("axes fraction", "data"), textcoords="offset points",
                               ha="left" if left else "right", color=GREY)  # fmt: skip
        by_sparsity.margins(y=0.08)
        if gaps:
            below = figure.add_subplot(grid[1, :])
            _difference_panel(below, measure, gaps, found, styles)
            below.set_xlim(by_sparsity.get_xlim())
        _legend(figure, by_sparsity, found)
        results = [result for point in study.pruned if (result := point.result_of(suite.key))]
        partial = any(result.values[measure].partial for result in results if measure in result.values)
        title = f"{study.title}: {measure}, suite {suite.name}" + (" (partial)" if partial else "")
        return drawn(figure, f"{name}-{slug(measure)}", title, _caption(measure, found, gaps, dense is not None), answers=True)


def _styles(found: list[Curve]) -> dict[Curve, _Style]:
    """Colour by criterion and order; line and marker by the allocation of the zeros."""
    keys = list(dict.fromkeys((curve.criterion, curve.order) for curve in found if curve.allocation == "emp"))
    keys += [key for key in dict.fromkeys((curve.criterion, None) for curve in found) if key[0] not in {k[0] for k in keys}]
    styles = {}
    for curve in found:
        own = [number for number, key in enumerate(keys) if key == (curve.criterion, curve.order)]
        of_criterion = [number for number, key in enumerate(keys) if key[0] == curve.criterion]
        shared = not own and len(of_criterion) != 1  # a baseline shared by points of several orders
        number = (own or of_criterion)[0] % len(COLOURS)
        filled = curve.allocation == "emp"
        styles[curve] = {
            "color": "black" if shared else COLOURS[number],
            "marker": "x" if curve.allocation == "matrix" else "D" if shared else MARKERS[number],
            "markerfacecolor": COLOURS[number] if filled else "white",
            "linestyle": _LINES[curve.allocation],
            "label": curve.label,
            "zorder": 3 if filled else 2.5,
        }
    return styles


def _columns(dots: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in dots], [y for _, y in dots]


def _scale(axes: Any, measure: str, found: list[Curve]) -> None:
    """A logarithmic axis with plain numbers, for perplexities that differ by more than _LOG_FROM times."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [dot.value for curve in found for dot in curve.dots]
    if lower_is_better(measure) and min(values) > 0 and max(values) / min(values) > _LOG_FROM:
        axes.set_yscale("log")
        ratio = max(values) / min(values)
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8) if ratio < 10 else (1, 2, 5) if ratio < 100 else (1,))
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _difference_panel(axes: Any, measure: str, gaps: list[Difference], found: list[Curve], styles: dict[Curve, _Style]) -> None:
    """The difference between EMP and each baseline, ± two standard errors; the side of zero where EMP is better is shaded."""
    emp = {dot.name: styles[curve] for curve in found if curve.allocation == "emp" for dot in curve.dots}
    lines: dict[tuple[str, str], list[Difference]] = {}
    for each in gaps:
        lines.setdefault((emp[each.point.name]["label"], each.match), []).append(each)
    reach = max(100 * (each.point.sparsity or 0.0) for each in gaps)
    for number, ((_, match), members) in enumerate(lines.items()):
        members = sorted(members, key=lambda each: each.point.sparsity or 0.0)
        aside = 0.006 * reach * (number - (len(lines) - 1) / 2)  # so that bars do not cover each other
        xs = [100 * (each.point.sparsity or 0.0) + aside for each in members]
        style = {key: emp[members[0].point.name][key] for key in ("color", "marker", "zorder")}
        style |= {"linestyle": _LINES[match], "markerfacecolor": "white"} | ({"marker": "x"} if match == "matrix" else {})
        ys = [each.change.value for each in members]
        errors = [each.change.stderr for each in members]
        if None in errors:
            axes.plot(xs, ys, **style)
        else:
            axes.errorbar(xs, ys, yerr=[2 * (error or 0.0) for error in errors], capsize=2, elinewidth=0.8, **style)
    axes.axhline(0, color="black", linewidth=0.9)
    largest = max(abs(each.change.value) for each in gaps)
    if largest > 30:
        axes.set_yscale("symlog", linthresh=5)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = axes.get_ylim()
    better = lower_is_better(measure)
    if better is not None:
        low, high = min(low, -0.25 * high), max(high, -0.25 * low)
        axes.set_ylim(low, high)
        axes.axhspan(low if better else 0, 0 if better else high, color="#009E73", alpha=0.09, linewidth=0)
        where = {"x": 0.01, "y": 0.03 if better else 0.97, "va": "bottom" if better else "top"}
        axes.text(s="EMP better", transform=axes.transAxes, color="#00664b", weight="bold", **where)
        where = {"x": 0.01, "y": 0.97 if better else 0.03, "va": "top" if better else "bottom"}
        axes.text(s="baseline better", transform=axes.transAxes, color=GREY, weight="bold", **where)
    axes.set_xlabel("weights removed, % of the targets (the same for both)")
    unit = "points" if in_percent(measure) else "%"
    known = any(each.change.stderr is not None for each in gaps)
    axes.set_ylabel(f"EMP − baseline, {unit}" + ("\n(bars: ± 2 standard errors)" if known else ""))


def _legend(figure: Any, axes: Any, found: list[Curve]) -> None:
    """The legend: a column for EMP and one for each kind of baseline."""
    from matplotlib.lines import Line2D

    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = [[curve.label for curve in found if curve.allocation == allocation] for allocation in _LINES]
    columns = [column for column in columns if column]
    longest = max(len(column) for column in columns)
    blank = Line2D([], [], linestyle="none")
    entries = [
        entry
        for column in columns
        for entry in [*((handles[label], label) for label in column), *[(blank, "")] * (longest - len(column))]
    ]
    figure.legend(
        *zip(*((handle, printable(label, LABEL)) for handle, label in entries), strict=True),
        loc="outside lower center",
        ncols=len(columns),
        handlelength=3.2,
    )


def _unit(measure: str) -> str:
    return f"{measure}, %" if in_percent(measure) else measure


def _betas(found: list[Curve]) -> set[float]:
    return {dot.beta for curve in found for dot in curve.dots if dot.beta is not None}


def _caption(measure: str, found: list[Curve], gaps: list[Difference], dense: bool) -> str:
    against = "β and against the share" if len(_betas(found)) > 1 else "the share"
    shown = ["uniform baselines of the same criterion"] if any(curve.allocation != "emp" for curve in found) else []
    shown += ["the dense model"] if dense else []
    others = f", with {' and '.join(shown)}" if shown else ""
    text = f"{measure[:1].upper()}{measure[1:]} against {against} of weights removed{others}."
    if gaps:
        text += (
            " Below: the difference between EMP and a baseline that removes as many weights, in total (dashed) or in every "
            "matrix (dotted)."
        )
    if any(each.change.stderr is not None for each in gaps):
        kind = "unpaired" if any(each.change.unpaired for each in gaps) else "paired"
        text += f" Its bars: ± two {kind} standard errors."
    return text


_GAUSSIAN = 2 / math.pi  # N_eff / N of independent normal weights
_GAUSSIAN_MASS = 0.894428  # s_eff of such weights: the share of sum |w| that the N_eff largest hold
_HATCHES = ("", "////", "....", "xxxx", "----")  # readable without colours
_MOST_BOXES = 40  # in one panel; more of them are drawn as bands
_MOST_PANELS = 24  # in one figure; more would exceed the height of an image
_MOST_ROWS = 48  # of a heat map, for the same reason
_MOST_NUMBERS = 16  # columns of a heat map with room for a number in each cell


def draw(study: Study, name: str) -> list[Drawing]:
    """All figures for which a study has data; their names begin with `name`."""
    drawings = []
    for number, suite in enumerate(study.suites, 1):
        for measure in main_measures(suite):
            drawings += sparsity_figures(study, suite, measure, name if number == 1 else f"{name}-suite{number}")
    if heats := grids(study)[:_MOST_PANELS]:
        drawings.append(_heat_maps(study, heats, f"{name}-n-eff"))
    if kept := boxes(study):
        drawings.append(_box_rows(study, kept, f"{name}-kept"))
    if held := masses(study)[:_MOST_PANELS]:
        drawings.append(_mass_panels(study, held, f"{name}-s-eff"))
    return drawings


def _heat_maps(study: Study, heats: list[Grid], name: str) -> Drawing:
    """N_eff / N by role and block: one map for each criterion and order, below each other, with one colour scale."""
    with styled():
        heights = [0.55 + 0.32 * len(heat.roles[:_MOST_ROWS]) for heat in heats]
        figure = new_figure(1.2 + sum(heights))
        maps = [_shares(heat) for heat in heats]
        low, high = (math.floor(20 * min(map(np.nanmin, maps))) / 20, math.ceil(20 * max(map(np.nanmax, maps))) / 20)
        panels = figure.subplots(len(heats), 1, squeeze=False, height_ratios=heights)[:, 0]
        image = None
        for axes, heat, cells in zip(panels, heats, maps, strict=True):
            axes.set_facecolor("#eeeeee")
            axes.grid(visible=False)
            high = max(high, low + 0.05)
            edges = [np.arange(length + 1) - 0.5 for length in (cells.shape[1], cells.shape[0])]
            image = axes.pcolormesh(*edges, cells, cmap="viridis", vmin=low, vmax=high, edgecolors="white", linewidth=0.3)
            axes.invert_yaxis()
            axes.set_title(printable(heat.label, 2 * LABEL), loc="left")
            axes.set_yticks(range(len(cells)), [printable(role, LABEL) for role in heat.roles[:_MOST_ROWS]])
            _block_ticks(axes, heat.blocks)
            if len(heat.blocks) <= _MOST_NUMBERS:
                _write_numbers(axes, cells, low + 0.6 * (high - low))
            axes.tick_params(labelbottom=axes is panels[-1] or heat.blocks != heats[-1].blocks)
        panels[-1].set_xlabel("block")
        _colour_bar(figure, image, list(panels), low < _GAUSSIAN < high)
        caption = (
            "Effective number of weights of a row, N_eff, as a share of the row's N weights, by layer and block. Dark: few "
            "weights carry the row's importance. Independent Gaussian weights have 2/π = 0.637."
        )
        return drawn(figure, name, f"{study.title}: effective number of weights", caption)


def _shares(heat: Grid) -> Any:
    """N_eff / N by role and block; NaN where it is unknown."""
    shares = [
        [effective_share(cell) if (cell := heat.cells.get((role, b))) else None for b in heat.blocks] for role in heat.roles
    ]
    return np.array(shares[:_MOST_ROWS], dtype=float)


def _colour_bar(figure: Any, image: Any, panels: list[Any], marked: bool) -> None:
    """A colour bar below the maps, as long as its label needs, with the value of Gaussian weights marked above it."""
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.6, aspect=36, pad=0.02)
    bar.set_label(f"{N_EFF} / N, mean over the rows", parse_math=True)
    bar.outline.set_visible(False)
    if marked:
        bar.ax.axvline(_GAUSSIAN, color=ON_DARK, linewidth=1.5)
        bar.ax.annotate("2/π", (_GAUSSIAN, 1), (0, 2), ("data", "axes fraction"), textcoords="offset points",
                        ha="center", va="bottom", fontsize=8)  # fmt: skip


def _block_ticks(axes: Any, blocks: list[int | None]) -> None:
    """Label the axis with the number of every block, or of evenly spaced blocks if there are many."""
    step = max(1, math.ceil(len(blocks) / 24))
    at = list(range(0, len(blocks), step))
    axes.set_xticks(at, ["none" if blocks[number] is None else str(blocks[number]) for number in at])


def _write_numbers(axes: Any, cells: Any, bright: float) -> None:
    for (row, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            colour = ON_DARK if value < bright else ON_BRIGHT
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)


def _box_rows(study: Study, kept: list[Grid], name: str) -> Drawing:
    """Kept fractions of the rows of each matrix: a panel for each role, with the methods side by side in every block."""
    with styled():
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        roles = list(dict.fromkeys(role for boxes_ in kept for role in boxes_.roles))[:_MOST_PANELS]
        blocks = ordered_blocks(cell for boxes_ in kept for cell in boxes_.cells)
        figure = new_figure(0.9 + 1.6 * len(roles))
        most = max(cell.kept_fraction.max for boxes_ in kept for cell in boxes_.cells.values())
        panels = figure.subplots(len(roles), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        as_bands = len(blocks) * len(kept) > _MOST_BOXES
        for axes, role in zip(panels, roles, strict=True):
            for number, boxes_ in enumerate(kept):
                spreads = [cell.kept_fraction if (cell := boxes_.cells.get((role, block))) else None for block in blocks]
                colour = COLOURS[number % len(COLOURS)]
                if as_bands:
                    _band(axes, spreads, colour, MARKERS[number % len(MARKERS)])
                else:
                    _boxes(axes, spreads, number, len(kept), colour)
            axes.set_title(printable(role, 2 * LABEL), loc="left")
            axes.set_ylim(0, 10 * math.ceil(10 * most) + 1)
            axes.set_ylabel("kept, % of a row")
            axes.grid(visible=False, axis="x")
        _block_ticks(panels[-1], blocks)
        panels[-1].set_xlim(-0.6, len(blocks) - 0.4)
        panels[-1].set_xlabel("block")
        handles: list[Any] = [
            Patch(**_filling(number), label=printable(boxes_.label, LABEL)) for number, boxes_ in enumerate(kept)
        ]
        if as_bands:
            handles = [
                Line2D(
                    [],
                    [],
                    color=COLOURS[n % len(COLOURS)],
                    marker=MARKERS[n % len(MARKERS)],
                    label=printable(boxes_.label, LABEL),
                )
                for n, boxes_ in enumerate(kept)
            ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)))
        return drawn(figure, name, f"{study.title}: kept weights of each row", _box_caption(study, as_bands))


def _box_caption(study: Study, as_bands: bool) -> str:
    pooled = any("*" in matrix.role for point in study.points for matrix in point.matrices)
    boxes_, bands = "median, quartiles, minimum and maximum", "median (line), quartiles (dark), minimum and maximum (light)"
    parts = bands if as_bands else boxes_
    experts = " The experts of a block are pooled." if pooled else ""
    return f"Share of weights kept in the rows of each matrix: {parts}.{experts}"


def _boxes(axes: Any, spreads: list[Any], number: int, count: int, colour: str) -> None:
    width = 0.8 / count
    at = [place + width * (number - (count - 1) / 2) for place, spread in enumerate(spreads) if spread is not None]
    stats = [
        {"whislo": 100 * s.min, "q1": 100 * s.q1, "med": 100 * s.median, "q3": 100 * s.q3, "whishi": 100 * s.max}
        for s in spreads
        if s is not None
    ]
    if stats:
        line = {"color": colour, "linewidth": 1}
        axes.bxp(
            stats,
            positions=at,
            widths=0.8 * width,
            showfliers=False,
            patch_artist=True,
            manage_ticks=False,
            boxprops=_filling(number),
            medianprops={"color": "black", "linewidth": 1},
            whiskerprops=line,
            capprops=line,
        )


def _filling(number: int) -> dict[str, Any]:
    """The filling of the boxes of a method, by its position."""
    colour = COLOURS[number % len(COLOURS)]
    return {"facecolor": "white" if number else colour, "edgecolor": colour, "hatch": _HATCHES[number % len(_HATCHES)]}


def _band(axes: Any, spreads: list[Any], colour: str, marker: str) -> None:
    """Spreads over many blocks: minimum to maximum as a light band, the quartiles as a darker one, the median as a line."""
    parts = np.array([[np.nan] * 5 if s is None else s.values for s in spreads]).T * 100
    places = np.arange(len(spreads))
    axes.fill_between(places, parts[0], parts[4], color=colour, alpha=0.15, linewidth=0)
    axes.fill_between(places, parts[1], parts[3], color=colour, alpha=0.35, linewidth=0)
    axes.plot(places, parts[2], color=colour, marker=marker, markersize=2.5, linewidth=1.2)


def _mass_panels(study: Study, held: list[Grid], name: str) -> Drawing:
    """s_eff against N_eff / N with the curve of its lower bound; a point for each role and block."""
    with styled():
        columns = min(2, len(held))
        lines = math.ceil(len(held) / columns)
        figure = new_figure(0.9 + 2.9 * lines)
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        roles = list(dict.fromkeys(matrix.role for masses_ in held for matrix in masses_.cells.values()))
        for axes, masses_ in zip(panels, held, strict=False):
            sizes = sorted({matrix.group_size or 2 for matrix in masses_.cells.values()})
            for number, size in enumerate(sizes):
                numbers = np.unique(np.linspace(2, size, 300).astype(int))
                bound = effective_mass_bound(numbers, size).numpy()  # type: ignore[arg-type]
                line = ("-", "--", "-.", ":")[number % 4]
                axes.plot(
                    numbers / size, bound, color="black", linewidth=1.1, linestyle=line, label=f"lower bound, N = {size:,}"
                )
            for number, role in enumerate(roles):
                _mass_points(axes, [matrix for matrix in masses_.cells.values() if matrix.role == role], number, role)
            axes.plot(_GAUSSIAN, _GAUSSIAN_MASS, marker="*", markersize=11, color="#F0E442", markeredgecolor="black",
                      linestyle="none", label="independent Gaussian weights", zorder=1.9)  # fmt: skip
            axes.set_title(printable(masses_.label, LABEL), loc="left")
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1.02)
            axes.set_xlabel(f"{N_EFF} / N", parse_math=True)
        for axes in panels[len(held) :]:
            axes.set_visible(False)
        for axes in panels[::columns]:
            axes.set_ylabel(r"$s_\mathrm{eff}$, share of Σ|s|", parse_math=True)
        handles: dict[str, Any] = {}
        for axes in panels[: len(held)]:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3)
        return drawn(figure, name, f"{study.title}: effective mass and its bound", _mass_caption(held))


def _mass_points(axes: Any, matrices: list[Any], number: int, role: str) -> None:
    if not matrices:
        return
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    xs = [effective_share(matrix) for matrix in matrices]
    ys = [matrix.s_eff_mean for matrix in matrices]
    axes.plot(
        xs,
        ys,
        marker=marker,
        color=colour,
        linestyle="none",
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.5,
        label=printable(role, LABEL),
    )


def _mass_caption(held: list[Grid]) -> str:
    margins = [
        matrix.least_margin_over_bound
        for masses_ in held
        for matrix in masses_.cells.values()
        if matrix.least_margin_over_bound is not None
    ]
    least = f" The smallest margin of a row is {min(margins):.3f}." if margins else ""
    return (
        "s_eff, the share of a row's importance that its ⌊N_eff⌋ largest scores hold, and the lower bound of theorem 4.2 "
        f"(order 2). A mark is the mean of a matrix; each row lies above the bound for its own N_eff.{least}"
    )
