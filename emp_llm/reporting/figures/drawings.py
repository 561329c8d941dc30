"""The figures of a report: measures against sparsity, effective numbers by layer, kept fractions, and s_eff above its bound."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from emp_llm.common.errors import printable
from emp_llm.reporting.figures.sparsity import sparsity_figures
from emp_llm.reporting.figures.style import (
    COLOURS,
    LABEL,
    MARKERS,
    N_EFF,
    ON_BRIGHT,
    ON_DARK,
    Drawing,
    drawn,
    new_figure,
    styled,
)
from emp_llm.reporting.studies.curves import Boxes, Grid, Masses, boxes, grids, main_measures, masses, ordered_blocks
from emp_llm.reporting.studies.study import Study
from emp_llm.selection.effective import effective_mass_bound

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
        heats = [replace(heat, roles=heat.roles[:_MOST_ROWS], values=heat.values[:_MOST_ROWS]) for heat in heats]
        heights = [0.55 + 0.32 * len(heat.roles) for heat in heats]
        figure = new_figure(1.2 + sum(heights))
        every = [value for heat in heats for row in heat.values for value in row if value is not None]
        low, high = math.floor(20 * min(every)) / 20, math.ceil(20 * max(every)) / 20
        panels = figure.subplots(len(heats), 1, squeeze=False, height_ratios=heights)[:, 0]
        image = None
        for axes, heat in zip(panels, heats, strict=True):
            cells = np.array([[np.nan if value is None else value for value in row] for row in heat.values])
            axes.set_facecolor("#eeeeee")
            axes.grid(visible=False)
            high = max(high, low + 0.05)
            edges = [np.arange(length + 1) - 0.5 for length in (cells.shape[1], cells.shape[0])]
            image = axes.pcolormesh(*edges, cells, cmap="viridis", vmin=low, vmax=high, edgecolors="white", linewidth=0.3)
            axes.invert_yaxis()
            axes.set_title(printable(heat.label, 2 * LABEL), loc="left")
            axes.set_yticks(range(len(heat.roles)), [printable(role, LABEL) for role in heat.roles])
            _block_ticks(axes, heat.blocks)
            if len(heat.blocks) <= _MOST_NUMBERS:
                _numbers(axes, cells, low + 0.6 * (high - low))
            axes.tick_params(labelbottom=axes is panels[-1] or heat.blocks != heats[-1].blocks)
        panels[-1].set_xlabel("block")
        _colour_bar(figure, image, list(panels), low < _GAUSSIAN < high)
        caption = (
            "Effective number of weights of a row, N_eff, as a share of the row's N weights, by layer and block. Dark: few "
            "weights carry the row's importance. Independent Gaussian weights have 2/π = 0.637."
        )
        return drawn(figure, name, f"{study.title}: effective number of weights", caption)


def _colour_bar(figure: Any, image: Any, panels: list[Any], marked: bool) -> None:
    """A colour bar below the maps, as long as its label needs, with the value of Gaussian weights marked above it."""
    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.6, aspect=36, pad=0.02)
    bar.set_label(f"{N_EFF} / N, mean over the rows", parse_math=True)
    bar.outline.set_visible(False)
    if marked:
        bar.ax.axvline(_GAUSSIAN, color=ON_DARK, linewidth=1.5)
        bar.ax.annotate("2/π", (_GAUSSIAN, 1), (0, 2), ("data", "axes fraction"), textcoords="offset points",
                        ha="center", va="bottom", fontsize=8)  # fmt: skip


def _block_ticks(axes: Any, blocks: tuple[int | None, ...]) -> None:
    """Label the axis with the number of every block, or of evenly spaced blocks if there are many."""
    step = max(1, math.ceil(len(blocks) / 24))
    at = list(range(0, len(blocks), step))
    axes.set_xticks(at, ["none" if blocks[number] is None else str(blocks[number]) for number in at])


def _numbers(axes: Any, cells: Any, bright: float) -> None:
    for (row, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            colour = ON_DARK if value < bright else ON_BRIGHT
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)


def _box_rows(study: Study, kept: list[Boxes], name: str) -> Drawing:
    """Kept fractions of the rows of each matrix: a panel for each role, with the methods side by side in every block."""
    with styled():
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        roles = list(dict.fromkeys(role for boxes_ in kept for role in boxes_.roles))[:_MOST_PANELS]
        blocks = ordered_blocks(cell for boxes_ in kept for cell in boxes_.spreads)
        figure = new_figure(0.9 + 1.6 * len(roles))
        most = max(spread.max for boxes_ in kept for spread in boxes_.spreads.values())
        panels = figure.subplots(len(roles), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        as_bands = len(blocks) * len(kept) > _MOST_BOXES
        for axes, role in zip(panels, roles, strict=True):
            for number, boxes_ in enumerate(kept):
                spreads = [boxes_.spreads.get((role, block)) for block in blocks]
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


def _mass_panels(study: Study, held: list[Masses], name: str) -> Drawing:
    """s_eff against N_eff / N with the curve of its lower bound; a point for each role and block."""
    with styled():
        columns = min(2, len(held))
        lines = math.ceil(len(held) / columns)
        figure = new_figure(0.9 + 2.9 * lines)
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        roles = list(dict.fromkeys(matrix.role for masses_ in held for matrix in masses_.matrices))
        for axes, masses_ in zip(panels, held, strict=False):
            sizes = sorted({matrix.group_size or 2 for matrix in masses_.matrices})
            for number, size in enumerate(sizes):
                numbers = np.unique(np.linspace(2, size, 300).astype(int))
                bound = effective_mass_bound(numbers, size).numpy()  # type: ignore[arg-type]
                line = ("-", "--", "-.", ":")[number % 4]
                axes.plot(
                    numbers / size, bound, color="black", linewidth=1.1, linestyle=line, label=f"lower bound, N = {size:,}"
                )
            for number, role in enumerate(roles):
                _mass_points(axes, [matrix for matrix in masses_.matrices if matrix.role == role], number, role)
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
    xs = [matrix.effective_share for matrix in matrices]
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


def _mass_caption(held: list[Masses]) -> str:
    margins = [matrix.margin for masses_ in held for matrix in masses_.matrices if matrix.margin is not None]
    least = f" The smallest margin of a row is {min(margins):.3f}." if margins else ""
    return (
        "s_eff, the share of a row's importance that its ⌊N_eff⌋ largest scores hold, and the lower bound of theorem 4.2 "
        f"(order 2). A mark is the mean of a matrix; each row lies above the bound for its own N_eff.{least}"
    )
