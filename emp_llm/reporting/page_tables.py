"""The tables of a report: as rows of cells for the page, and with all digits for the CSV files."""

from typing import Any

import msgspec

from emp_llm.common.tables import Rows, number_cell, percent_cell
from emp_llm.evaluation.comparison import UNPAIRED, Value, change_text, in_percent, shown_change, signed, value_cell
from emp_llm.reporting.points import by_role_and_block
from emp_llm.reporting.run_tables import FIT_ERRORS, effective_share, main_measures, mass_cells, mean_error, row_mean
from emp_llm.reporting.studies import Difference, Study, StudySuite, differences, label_of

_MATCHES = {"total": "as many weights in total", "matrix": "as many weights in every matrix"}


def point_rows(study: Study) -> Rows:
    """Every point: recipe, sparsity, and the main measures of every suite with their change from the dense model."""
    measured = [(suite, measure) for suite in study.suites for measure in main_measures(suite.measures)]
    rows = [["point", "method", "β", "order", "removed of targets %", "of all parameters %"]]
    for suite, measure in measured:
        rows[0] += [_of_suite(study, suite, measure), "change"]
    if any(suite.dense for suite in study.suites):
        dense = [cell for suite, measure in measured for cell in (value_cell(measure, suite.dense.get(measure)), "")]
        rows.append(["dense", "", "", "", "0.00", "0.00", *dense])
    for point in study.points:
        method = label_of(point) if point.pruned else f"{label_of(point)}: measured, not pruned"
        row = [point.name, method, _short(point.recipe.beta), _short(point.recipe.order)]
        row += [percent_cell(point.sparsity), percent_cell(point.sparsity_of_all)]
        for suite, measure in measured:
            value = point.values_of(suite.key).get(measure)
            row += [value_cell(measure, value), shown_change(measure, suite.dense.get(measure), value)]
        rows.append(row)
    return rows


def difference_rows(study: Study, suite: StudySuite) -> Rows:
    """EMP points and their baselines with as many removed weights; the heading alone if there are none."""
    rows = [
        ["EMP", "β", "baseline", "removed of targets %", "measure", "EMP value", "baseline value", "EMP − baseline", "better"]
    ]
    for each in differences(study, suite):
        if each.measure in main_measures(suite.measures):
            values = [value_cell(each.measure, Value(value)) for value in (each.value, each.base)]
            baseline = label_of(each.baseline) + (f", {_MATCHES['total']}" if each.match == "total" else "")
            start = [label_of(each.point), _short(each.point.recipe.beta), baseline, percent_cell(each.point.sparsity)]
            rows.append([*start, each.measure, *values, change_text(each.measure, each.change), each.verdict])
    return rows


def verdict_rows(study: Study) -> Rows:
    """For each EMP method, kind of baseline and main measure, the number of points at which EMP is better."""
    rows = [["EMP", "uniform baseline", "measure", "EMP better", "EMP worse", "equal", "difference"]]
    for suite in study.suites:
        groups: dict[tuple[str, str, str], list[Difference]] = {}
        for each in differences(study, suite):
            if each.measure in main_measures(suite.measures) and each.better is not None:
                groups.setdefault((label_of(each.point), each.match, each.measure), []).append(each)
        for (method, match, measure), members in groups.items():
            better = [each for each in members if each.better]
            worse = [each for each in members if not each.better and each.change.value]
            least, most = (signed(end(each.change.value for each in members)) for end in (min, max))
            span = f"{least} to {most}" if len(members) > 1 else least
            unit = "points" if in_percent(measure) else "%"
            counts = [_counted(better, members), _counted(worse, members), str(len(members) - len(better) - len(worse))]
            rows.append([method, _MATCHES[match], _of_suite(study, suite, measure), *counts, f"{span} {unit}"])
    return rows


def _counted(chosen: list[Difference], members: list[Difference]) -> str:
    """ "2 of 3, 1 clearly": by more than two standard errors, if these are known of all."""
    text = f"{len(chosen)} of {len(members)}"
    if not chosen or any(each.clear is None for each in members):
        return text
    mark = f" {UNPAIRED}" if any(each.change.unpaired for each in members) else ""
    return f"{text}, {sum(1 for each in chosen if each.clear)} clearly{mark}"


def role_rows(study: Study) -> Rows:
    """N_eff / N by role for every criterion and order, over the blocks; one row for all targets if they were one group."""
    rows = [["criterion", "layers", "N_eff/N % mean", "lowest block", "highest block", "s_eff", "bound", "least margin"]]
    for grid in study.measured:
        for role in grid.roles:
            cells = [cell for (name, _), cell in grid.cells.items() if name == role and effective_share(cell) is not None]
            if cells:
                shares = [effective_share(cell) or 0.0 for cell in cells]
                margins = [m for cell in cells if (m := cell.least_margin_over_bound) is not None]
                percents = map(percent_cell, (row_mean(cells, effective_share), min(shares), max(shares)))
                margin = number_cell(min(margins, default=None))
                rows.append([grid.label, f"{role} x {len(cells)}", *percents, *mass_cells(cells), margin])
    for point in study.points:
        whole = point.targets
        if whole is not None and whole.n_eff is not None and whole.weights:
            least = None if whole.s_eff_bound is None or whole.s_eff is None else whole.s_eff - whole.s_eff_bound
            numbers = map(number_cell, (whole.s_eff, whole.s_eff_bound, least))
            share = percent_cell(whole.n_eff / whole.weights)
            row = [label_of(point), "all targets as one group", share, "-", "-", *numbers]
            rows += [row] if row not in rows else []  # one for all β
    return rows


def fit_rows(study: Study) -> Rows:
    """The mean output error of each role's layers before and after the fit, and the largest one held out, for each point."""
    rows = [["method", "layers", "before %", "after %", "held out before %", "held out after %", "largest held out after %"]]
    for point in study.points:
        roles = {name: point.matrices[name].role if name in point.matrices else name for name in point.fits}
        for role in dict.fromkeys(roles.values()):
            fits = [fit for name, fit in point.fits.items() if roles[name] == role]
            largest = max((fit.held_out_after for fit in fits if fit.held_out_after is not None), default=None)
            errors = [*(mean_error(fits, name) for name in FIT_ERRORS), largest]
            rows.append([label_of(point), f"{role} x {len(fits)}", *map(percent_cell, errors)])
    return rows


def _of_suite(study: Study, suite: StudySuite, measure: str) -> str:
    """The heading of a measure: with its suite if there are several."""
    return f"{measure} ({suite.name})" if len(study.suites) > 1 else measure


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


# CSV files: a dictionary for each row, from column to value.

Record = dict[str, Any]


def value_records(study: Study) -> list[Record]:
    """All measures of every point and of the dense model."""
    names = {point.id: point.name for point in study.points}
    records = []
    for suite in study.suites:
        dense: Record = {"point": "dense", "method": "dense", "sparsity_of_targets": 0, "sparsity_of_all_parameters": 0}
        results = [(dense, suite.dense)]
        for point in study.pruned:
            recipe: Record = {
                "point": point.name,
                "method": point.recipe.method,
                "beta": point.recipe.beta,
                "order": point.recipe.order,
            }
            recipe |= {"match": point.match, "baseline_of": names.get(point.baseline_of or "")}
            recipe |= {"sparsity_of_targets": point.sparsity, "sparsity_of_all_parameters": point.sparsity_of_all}
            results.append((recipe, point.values_of(suite.key)))
        for start, values in results:
            for measure, value in values.items():
                numbers = {"measure": measure, "value": value.value, "stderr": value.stderr, "partial": value.partial}
                records.append({"study": study.title, "suite": suite.name} | start | numbers)
    return records


def difference_records(study: Study) -> list[Record]:
    """All differences between EMP and its baselines."""
    return [
        {
            "study": study.title,
            "suite": suite.name,
            "point": each.point.name,
            "baseline": each.baseline.name,
            "method": each.point.recipe.method,
            "beta": each.point.recipe.beta,
            "order": each.point.recipe.order,
            "match": each.match,
            "sparsity_of_targets": each.point.sparsity,
            "measure": each.measure,
            "value": each.value,
            "baseline_value": each.base,
            "change": each.change.value,
            "unit": "points" if in_percent(each.measure) else "percent",
            "stderr": each.change.stderr,
            "paired": each.change.paired if each.change.stderr is not None else None,
            "better": each.verdict,
        }
        for suite in study.suites
        for each in differences(study, suite)
    ]


def matrix_records(study: Study) -> list[Record]:
    """The figures of every role and block of every point."""
    return [
        {"study": study.title, "point": point.name, "method": point.recipe.method, "beta": point.recipe.beta}
        | {"order": point.recipe.order, "n_eff_over_n": effective_share(cell)}
        | flat(msgspec.to_builtins(cell))
        for point in study.points
        for cell in by_role_and_block(point.matrices).values()
    ]


def fit_records(study: Study) -> list[Record]:
    """The output errors of every fitted layer."""
    return [
        {"study": study.title, "point": point.name, "method": point.recipe.method, "layer": name} | msgspec.structs.asdict(fit)
        for point in study.points
        for name, fit in point.fits.items()
    ]


def flat(values: Record, prefix: str = "") -> Record:
    """A nested dictionary as one: the key of an inner value is the outer key, an underscore and its own."""
    flattened: Record = {}
    for name, value in values.items():
        flattened |= flat(value, f"{prefix}{name}_") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flattened
