"""The figures of a report as SVG and PNG: the same data give the same bytes. Only this file
imports matplotlib.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from emp_llm.common.errors import UserError, printable, reason
from emp_llm.evaluation.comparison import in_percent
from emp_llm.records.run_report import UnitsRecord
from emp_llm.reporting.run_tables import effective_share, main_measures
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
from emp_llm.selection.effective import effective_mass_bound

WIDTH = 8.0  # inches
_DPI = 150
# Okabe and Ito, "Color universal design" (2008): distinct for all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
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


@contextmanager
def new_figure(height: float) -> Iterator[Any]:
    """An empty figure of the common width; height in inches. The user's matplotlib settings have no
    effect in this context.

    Raises:
        UserError: matplotlib is not installed; it names the extra.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"Plots need matplotlib ({reason(error)}): pip install 'emp-llm[plots]', or add "
            "--no-plots."
        ) from error
    with style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # names in other scripts: boxes, in the PNG only
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def drawn(figure: Any, name: str, title: str, caption: str, answers: bool = False) -> Drawing:
    """Render a finished figure as SVG and PNG, without dates or versions; call it within the
    context of `new_figure`.
    """
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = name  # the same ids in every run
    figure.suptitle(printable(title, 76), x=0.01, ha="left", fontsize=11, weight="bold")
    svg = BytesIO()
    png = BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(
        png, format="png", dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True}
    )
    return Drawing(name, title, caption, svg.getvalue(), png.getvalue(), answers)


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
_GAUSSIAN = (2 / math.pi, 0.894428)  # N_eff / N of independent normal weights, and their s_eff
_MOST_PANELS = 24  # in one figure; more would exceed the height of an image
_MOST_ROWS = 48  # of a heat map, for the same reason
_KEPT_WIDTH = 480.0  # points, of all blocks of the figure of kept weights


def draw(study: Study, title: str) -> list[Drawing]:
    """All figures for which a study has data; their names begin with `title` in letters, digits
    and hyphens.
    """
    name = slug(title) or "model"
    drawings = []
    for number, suite in enumerate(study.suites, 1):
        for measure in main_measures(suite.measures):
            drawings += _sparsity_figures(
                study, suite, measure, name if number == 1 else f"{name}-suite{number}"
            )
    if study.measured:
        drawings.append(_heat_maps(study, study.measured[:_MOST_PANELS], f"{name}-n-eff"))
    if study.kept:
        drawings.append(_kept_rows(study, study.kept, f"{name}-kept"))
    bounded = [
        grid
        for grid in study.measured
        if any(cell.s_eff_bound_mean is not None for cell in grid.cells.values())
    ]
    if bounded:
        drawings.append(_masses(study, bounded, f"{name}-s-eff"))
    if any(point.healing is not None for point in study.points):
        drawings.append(_healing(study, f"{name}-healing"))
    for point in study.points:
        layers = (
            []
            if point.structure is None
            else [each for each in point.structure.layers.values() if each.scores]
        )
        if layers:
            title = f"{study.title}: experts of {label_of(point)} ({point.name})"
            drawings.append(
                _experts(layers[:_MOST_ROWS], title, f"{name}-experts-{slug(point.name)}")
            )
    return drawings


def _sparsity_figures(study: Study, suite: StudySuite, measure: str, name: str) -> list[Drawing]:
    """One figure of all methods; if there are several orders, one for each criterion. None for a
    single sparsity.
    """
    found = curves(study, suite, measure)
    if len({dot.sparsity for curve in found for dot in curve.dots}) < 2:
        return []  # nothing to draw a curve through: the tables say it all
    gaps = [
        each
        for each in differences(study, suite)
        if each.measure == measure and math.isfinite(each.change.value)
    ]
    if len({curve.order for curve in found if curve.allocation == "emp"}) <= 1:
        return [_sparsity_figure(study, suite, measure, found, gaps, name)]
    drawings = []
    for criterion in dict.fromkeys(curve.criterion for curve in found):
        own = [curve for curve in found if curve.criterion == criterion]
        own_gaps = [each for each in gaps if each.point.recipe.name == criterion]
        drawings.append(
            _sparsity_figure(study, suite, measure, own, own_gaps, f"{name}-{slug(criterion)}")
        )
    return drawings


def _sparsity_figure(
    study: Study,
    suite: StudySuite,
    measure: str,
    found: list[Curve],
    gaps: list[Difference],
    name: str,
) -> Drawing:
    """A measure against β and against sparsity; below them, the differences between EMP and its
    baselines.
    """
    styles = _styles(found)
    dense = suite.dense.get(measure)
    by_beta = len({dot.beta for curve in found for dot in curve.dots if dot.beta is not None}) > 1
    with new_figure(6.4 if gaps else 3.9) as figure:
        grid = figure.add_gridspec(2 if gaps else 1, 2, height_ratios=(3, 2) if gaps else (1,))
        main = figure.add_subplot(grid[0, 1] if by_beta else grid[0, :])
        for curve in found:
            main.plot(
                [100 * dot.sparsity for dot in curve.dots],
                [dot.value for dot in curve.dots],
                **styles[curve],
            )
        main.set_xlabel("weights removed, % of the targets")
        panels = [main]
        if by_beta:
            panels.append(figure.add_subplot(grid[0, 0], sharey=main))
            panels[1].set_xlabel(f"β  (EMP keeps β {N_EFF} of each row)", parse_math=True)
            for curve in found:
                dots = sorted((dot.beta, dot.value) for dot in curve.dots if dot.beta is not None)
                betas = [beta for beta, _ in dots]
                shared = (
                    {"linestyle": "none"} if len(set(betas)) < len(betas) else {}
                )  # by EMP points of several orders
                panels[1].plot(betas, [value for _, value in dots], **styles[curve] | shared)
            main.tick_params(labelleft=False)
        panels[-1].set_ylabel(f"{measure}, %" if in_percent(measure) else measure)
        if dense is not None and math.isfinite(dense.value):
            for panel in panels:
                panel.axhline(
                    dense.value, color=GREY, linewidth=1.2, label=f"dense model, {dense.value:.4g}"
                )
        _log_scale(main, measure, [dot.value for curve in found for dot in curve.dots])
        if gaps:
            below = figure.add_subplot(grid[1, :])
            _difference_panel(below, measure, gaps, {curve.label: styles[curve] for curve in found})
            below.set_xlim(main.get_xlim())
        figure.legend(
            *main.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=3.2
        )
        values = [point.values_of(suite.key).get(measure) for point in study.pruned]
        partial = (
            " (partial)" if any(value is not None and value.partial for value in values) else ""
        )
        title = f"{study.title}: {measure}, suite {suite.name}{partial}"
        return drawn(
            figure, f"{name}-{slug(measure)}", title, _caption(measure, by_beta, gaps), answers=True
        )


def _styles(found: list[Curve]) -> dict[Curve, dict[str, Any]]:
    """Colour by criterion, or by order if there are several; line and marker by the allocation
    of the zeros.
    """
    several = len({curve.order for curve in found if curve.allocation == "emp"}) > 1
    keys = list(dict.fromkeys(curve.order if several else curve.criterion for curve in found))
    styles = {}
    for curve in found:
        number = keys.index(curve.order if several else curve.criterion)
        colour = COLOURS[number % len(COLOURS)]
        emp = curve.allocation == "emp"
        styles[curve] = {
            "color": colour,
            "marker": "x" if curve.allocation == "matrix" else MARKERS[number % len(MARKERS)],
            "markerfacecolor": colour if emp else "white",
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
    for each in sorted(gaps, key=lambda each: each.point.sparsity):
        lines.setdefault((label_of(each.point), each.match), []).append(each)
    reach = max(100 * each.point.sparsity for each in gaps)
    for number, ((label, match), members) in enumerate(lines.items()):
        aside = (
            0.006 * reach * (number - (len(lines) - 1) / 2)
        )  # so that bars do not cover each other
        style = {key: styles[label][key] for key in ("color", "marker", "zorder")}
        style |= {"linestyle": _LINES[match], "markerfacecolor": "white"} | (
            {"marker": "x"} if match == "matrix" else {}
        )
        axes.errorbar(
            [100 * each.point.sparsity + aside for each in members],
            [each.change.value for each in members],
            yerr=[2 * (each.change.stderr or 0.0) for each in members],
            elinewidth=0.8,
            **style,
        )
    axes.axhline(0, color="black", linewidth=0.9)
    if max(abs(each.change.value) for each in gaps) > 30:
        axes.set_yscale("symlog", linthresh=5)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("weights removed, % of the targets (the same for both)")
    lower = lower_is_better(measure)
    unit = "points" if in_percent(measure) else "%"
    side = ""
    if lower is not None:
        side = f"\n({'below' if lower else 'above'} 0: EMP is better)"
    axes.set_ylabel(f"EMP − baseline, {unit}{side}")


def _caption(measure: str, by_beta: bool, gaps: list[Difference]) -> str:
    against = "β and against the share" if by_beta else "the share"
    text = f"{measure[:1].upper()}{measure[1:]} against {against} of weights removed."
    if gaps:
        text += (
            " Below: the difference between EMP and a baseline of the same criterion with uniform "
            "rows that removes as many weights, in total (dashed) or in every matrix (dotted)."
        )
    if any(each.change.stderr is not None for each in gaps):
        kind = "paired" if all(each.change.paired for each in gaps) else "unpaired"
        text += f" Its bars: ± two {kind} standard errors."
    return text


def _heat_maps(study: Study, grids: list[Grid], name: str) -> Drawing:
    """N_eff / N by role and block: one map for each criterion and order, below each other, with
    one colour scale.
    """
    maps = []
    for grid in grids:
        shares = {key: effective_share(cell) for key, cell in grid.cells.items()}
        rows = [
            [shares.get((role, block)) for block in grid.blocks] for role in grid.roles[:_MOST_ROWS]
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
            _block_ticks(axes, grid.blocks, 0.5)
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


def _block_ticks(axes: Any, blocks: Sequence[int | None], offset: float = 0.0) -> None:
    """Label the axis with the number of every block, or of evenly spaced blocks if there are
    many.
    """
    at = range(0, len(blocks), math.ceil(len(blocks) / 24))
    axes.set_xticks(
        [place + offset for place in at],
        ["none" if blocks[place] is None else str(blocks[place]) for place in at],
    )


def _kept_rows(study: Study, grids: list[Grid], name: str) -> Drawing:
    """Kept fractions of the rows of each matrix: a panel for each role, with the methods side by
    side in every block.
    """
    every = Grid("", {key: cell for grid in grids for key, cell in grid.cells.items()})
    roles = every.roles[:_MOST_PANELS]
    blocks = every.blocks
    width = min(6.0, 0.5 * _KEPT_WIDTH / len(blocks) / len(grids))
    with new_figure(0.9 + 1.6 * len(roles)) as figure:
        panels = figure.subplots(len(roles), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axes, role in zip(panels, roles, strict=True):
            for number, grid in enumerate(grids):
                own = [
                    (place, grid.cells[role, block])
                    for place, block in enumerate(blocks)
                    if (role, block) in grid.cells
                ]
                at = [place + 0.8 * ((number + 0.5) / len(grids) - 0.5) for place, _ in own]
                low, q1, median, q3, high = (
                    100 * np.array([cell.kept_fraction.values for _, cell in own]).reshape(-1, 5).T
                )
                colour = COLOURS[number % len(COLOURS)]
                label = printable(grid.label, LABEL)
                axes.vlines(at, low, high, color=colour, linewidth=0.2 * width)
                axes.vlines(at, q1, q3, color=colour, linewidth=width, label=label)
                axes.plot(at, median, color="white", linestyle="none", marker="_", markersize=width)
            axes.set_title(printable(role, 2 * LABEL), loc="left")
            axes.set_ylim(bottom=0)
            axes.set_ylabel("kept, % of a row")
            axes.grid(visible=False, axis="x")
        _block_ticks(panels[-1], blocks)
        panels[-1].set_xlabel("block")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        caption = (
            "Share of weights kept in the rows of each matrix: minimum to maximum (thin), "
            "quartiles (thick), median (white)."
        )
        if any("*" in role for role in every.roles):
            caption += " Of the experts of a block, the mean of their quartiles."
        return drawn(figure, name, f"{study.title}: kept weights of each row", caption)


def _experts(layers: list[UnitsRecord], title: str, name: str) -> Drawing:
    """The scores of the experts of each layer: in colour where they stay, in grey where they
    were removed.
    """
    with new_figure(1.9 + 0.24 * len(layers)) as figure:
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable

        cells = np.ones((len(layers), max(each.units for each in layers), 4))
        for row, each in zip(cells, layers, strict=True):
            shares = np.array(each.scores) / (max(each.scores or [1]) or 1)
            row[: each.units] = colormaps["Greys"](0.1 + 0.5 * shares)
            row[each.kept_units] = colormaps["viridis"](shares[each.kept_units])
        axes = figure.subplots()
        axes.grid(visible=False)
        axes.pcolormesh(
            cells, edgecolors="white", linewidth=0.3, rasterized=True
        )  # thousands of cells
        axes.invert_yaxis()
        axes.set_yticks(
            np.arange(len(cells)) + 0.5,
            [f"block {each.block}: {each.kept} of {each.units}" for each in layers],
        )
        _block_ticks(axes, range(cells.shape[1]), 0.5)
        axes.set_xlabel("expert")
        bar = figure.colorbar(
            ScalarMappable(cmap="viridis"),
            ax=axes,
            location="bottom",
            shrink=0.6,
            aspect=36,
            pad=0.02,
        )
        bar.set_label("score of a kept expert / largest of its layer; grey: removed")
        caption = (
            "Experts by layer. Colour: they stay. Grey: they were removed; a darker grey is "
            "a higher score."
        )
        return drawn(figure, name, title, caption)


def _healing(study: Study, name: str) -> Drawing:
    """How far the models were from the dense one on held-out sequences, while they were healed."""
    with new_figure(3.4) as figure:
        axes = figure.subplots()
        healed = [(point, point.healing) for point in study.points if point.healing is not None]
        for number, (point, healing) in enumerate(healed):
            steps, losses = zip(*healing.curve, strict=True)
            style = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
            }
            axes.plot(steps, losses, label=printable(label_of(point), LABEL), **style)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("divergence, nats per token")
        figure.legend(loc="outside lower center", ncols=3)
        caption = (
            "Divergence of the next-token probabilities from the dense model's, on held-out "
            "sequences of the text."
        )
        if any(healing.by == "blocks" for _, healing in healed):
            caption += " Where healing went block by block: the error of a block's outputs."
        return drawn(figure, name, f"{study.title}: healing", caption)


def _masses(study: Study, grids: list[Grid], name: str) -> Drawing:
    """s_eff against N_eff / N of each role and block, with the curve of its lower bound."""
    found = [
        [cell for cell in grid.cells.values() if cell.s_eff_bound_mean is not None]
        for grid in grids
    ]
    sizes = sorted({cell.group_size or 2 for cells in found for cell in cells})
    margins = [
        cell.least_margin_over_bound
        for cells in found
        for cell in cells
        if cell.least_margin_over_bound is not None
    ]
    with new_figure(4.4) as figure:
        axes = figure.subplots()
        for number, size in enumerate(sizes):
            numbers = np.unique(np.linspace(2, size, 300).astype(int))
            bound = effective_mass_bound(numbers, size).numpy()  # type: ignore[arg-type]
            style = {
                "color": "black",
                "linewidth": 1.1,
                "linestyle": ("-", "--", "-.", ":")[number % 4],
            }
            axes.plot(numbers / size, bound, label=f"lower bound, N = {size:,}", **style)
        for number, (grid, cells) in enumerate(zip(grids, found, strict=True)):
            style = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
                "linestyle": "none",
            }
            style |= {
                "markersize": 6,
                "markeredgecolor": "white",
                "label": printable(grid.label, LABEL),
            }
            axes.plot(
                [effective_share(cell) for cell in cells],
                [cell.s_eff_mean for cell in cells],
                **style,
            )
        axes.plot(
            *_GAUSSIAN,
            marker="*",
            markersize=11,
            color="#F0E442",
            markeredgecolor="black",
            linestyle="none",
            label="independent Gaussian weights",
            zorder=1.9,
        )
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.set_xlabel(f"{N_EFF} / N", parse_math=True)
        axes.set_ylabel(r"$s_\mathrm{eff}$, share of Σ|s|", parse_math=True)
        figure.legend(loc="outside lower center", ncols=3)
        least = f" The smallest margin of a row is {min(margins):.3f}." if margins else ""
        caption = (
            "s_eff, the share of a row's importance that its ⌊N_eff⌋ largest scores hold, and the "
            "lower bound of theorem 4.2 (order 2). A mark is the mean of a matrix; each row lies "
            f"above the bound for its own N_eff.{least}"
        )
        return drawn(figure, name, f"{study.title}: effective mass and its bound", caption)
