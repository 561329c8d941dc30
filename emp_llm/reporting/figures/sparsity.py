"""Figures of a measure against β and sparsity, with the differences between EMP and its baselines at the same sparsity."""

import math
from typing import Any

from emp_llm.common.errors import printable
from emp_llm.evaluation.values import in_percent
from emp_llm.reporting.figures.style import COLOURS, GREY, LABEL, MARKERS, N_EFF, Drawing, drawn, new_figure, slug, styled
from emp_llm.reporting.studies.curves import Curve, Difference, curves, differences, lower_is_better
from emp_llm.reporting.studies.study import Study, StudySuite

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
            _differences(below, measure, gaps, found, styles)
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


def _differences(axes: Any, measure: str, gaps: list[Difference], found: list[Curve], styles: dict[Curve, _Style]) -> None:
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
