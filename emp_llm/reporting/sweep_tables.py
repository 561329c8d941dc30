"""Tables over many recipes: the points of a sweep, and the effective numbers of a measure."""

import itertools
from collections import defaultdict
from collections.abc import Callable

from emp_llm.common.tables import Rows, number_cell, percent_cell, table
from emp_llm.evaluation.comparison import change_notes
from emp_llm.evaluation.values import Value, formatted, in_percent, shown_change, values_of
from emp_llm.records.evaluation import Measures
from emp_llm.records.measure import Measure, MeasureEntry
from emp_llm.records.run_report import MatrixRecord
from emp_llm.records.sweep import Sweep
from emp_llm.reporting.run_tables import curve_table, effective_share

_DEPTHS = 8  # largest number of block columns in the table of measures


def sweep_table(record: Sweep) -> str:
    """The dense model, then all points by sparsity."""
    dense = values_of(record.dense or Measures())
    names = _shown(list(dense))
    heads = [head for name in names for head in (name, "change")]
    rows: Rows = [["point", "removed %", "of all %", *heads], ["dense", "0.00", "0.00", *_cells(names, dense, None)]]
    points = sorted(record.points, key=lambda point: point.sparsity_of_targets)
    for point in points:
        removed = [percent_cell(share) for share in (point.sparsity_of_targets, point.sparsity_of_all_parameters)]
        rows.append([point.name, *removed, *_cells(names, values_of(point.evaluation), dense)])
    notes = [f"suite {record.suite}; removed: percent of the targets, and of all parameters"]
    same = [(point.name, point.evaluation.same_masks_as) for point in points]
    notes += [f"{name}: the same masks as {other}, so the same values" for name, other in same if other is not None]
    if any(in_percent(name) for name in names):
        notes.append("accuracies in percent; their changes in points")
    notes += change_notes(names, dense, [values_of(point.evaluation) for point in points])
    if any(value.partial for value in dense.values()):
        notes.append("partial: only some of the examples or of the text")
    return "\n".join([table(rows), *notes])


def measure_table(record: Measure) -> str:
    """N_eff / N by role and depth, and the sparsity at many betas: two tables for every criterion and order."""
    return "\n\n".join(_measure(entry) for entry in record.measures)


def _measure(measure: MeasureEntry) -> str:
    by_role: dict[str, list[MatrixRecord]] = defaultdict(list)
    for entry in measure.matrices.values():
        by_role[entry.role].append(entry)
    blocks = sorted({entry.block for entry in measure.matrices.values() if entry.block is not None})
    depths = _depths(blocks)
    heads = [str(depth[0]) if len(depth) == 1 else f"{depth[0]}-{depth[-1]}" for depth in depths]
    ends = ["all", "min row", "median", "max row", "s_eff", "bound"]
    rows: Rows = [[f"{measure.criterion}, order {measure.order:g}: N_eff/N % in blocks", *heads, *ends]]
    for role, entries in by_role.items():
        shares = [_share([entry for entry in entries if entry.block in depth]) for depth in depths]
        spreads = [(entry.n_eff, entry.group_size) for entry in entries]
        known = [(n_eff, size) for n_eff, size in spreads if n_eff is not None and size is not None]
        medians = sorted(n_eff.median / size for n_eff, size in known)
        spread = [
            min((n_eff.min / size for n_eff, size in known), default=None),
            medians[len(medians) // 2] if medians else None,
            max((n_eff.max / size for n_eff, size in known), default=None),
        ]
        cells = [percent_cell(share) for share in (*shares, _share(entries), *spread)]
        rows.append([f"{role} x {len(entries)}", *cells, *_masses(entries)])
    targets = measure.targets
    removed = f"{100 * targets.sparsity_of_targets:.2f} % of these {targets.weights or 0:,} weights"
    text = f"{table(rows)}\nEMP at beta 1 would remove {removed}"
    name = f"{measure.criterion}, order {measure.order:g}"
    return f"{text}\n{curve_table(name, measure.curve)}" if measure.curve else text


def _shown(names: list[str]) -> list[str]:
    """The measures for a table of many points: the perplexity, and the mean accuracy or, without one, every task."""
    means = [name for name in names if name.startswith("mean acc of ")]
    return [name for name in names if name.startswith("perplexity")] + (
        means or [name for name in names if not name.startswith("perplexity")]
    )


def _cells(names: list[str], values: dict[str, Value], dense: dict[str, Value] | None) -> list[str]:
    cells = []
    for name in names:
        value, before = values.get(name), dense.get(name) if dense is not None else None
        cells.append("-" if value is None else formatted(value.value, 2 if in_percent(name) else 3))
        cells.append("" if value is None or before is None else shown_change(name, before, value))
    return cells


def _depths(blocks: list[int]) -> list[list[int]]:
    """Consecutive blocks in at most _DEPTHS ranges of about equal length."""
    count = min(len(blocks), _DEPTHS)
    cuts = [round(number * len(blocks) / count) for number in range(count + 1)] if count else []
    return [blocks[first:last] for first, last in itertools.pairwise(cuts)]


def _share(entries: list[MatrixRecord]) -> float | None:
    """The mean of N_eff / N over all rows of some matrices."""
    return _row_mean(entries, effective_share)


def _masses(entries: list[MatrixRecord]) -> list[str]:
    """The means of s_eff and its lower bound."""
    means = (_row_mean(entries, lambda entry: entry.s_eff_mean), _row_mean(entries, lambda entry: entry.s_eff_bound_mean))
    return [number_cell(mean) for mean in means]


def _row_mean(entries: list[MatrixRecord], value: Callable[[MatrixRecord], float | None]) -> float | None:
    """A mean over all rows of some matrices; None if it is unknown for one of them."""
    values = [(value(entry), entry.rows) for entry in entries]
    known = [(found, rows) for found, rows in values if found is not None]
    if not known or len(known) < len(values):
        return None
    return sum(found * rows for found, rows in known) / sum(rows for _, rows in known)
