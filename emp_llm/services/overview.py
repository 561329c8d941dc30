"""Tables over many recipes: the points of a sweep, and how redundant a model is by several measures."""

import itertools
from collections import defaultdict
from typing import Any

from emp_llm.services.comparison import Value, in_percent, shown_change, values_of
from emp_llm.services.tables import Rows, percent_cell, table
from emp_llm.services.terminal import size

Entry = dict[str, Any]
_DEPTHS = 8  # columns of the table of measures that blocks are shared out to, at most


def sweep_table(record: dict[str, Any]) -> str:
    """All points by their sparsity, the dense model on top.

    Args:
        record: as of sweep.json.
    """
    dense = values_of(record["dense"])
    names = _shown(list(dense))
    heads = [head for name in names for head in (name, "change")]
    rows: Rows = [["point", "removed %", "of all %", *heads], ["dense", "0.00", "0.00", *_cells(names, dense, None)]]
    points = sorted(record["points"], key=lambda point: point["sparsity_of_targets"])
    for point in points:
        removed = [f"{100 * point[key]:.2f}" for key in ("sparsity_of_targets", "sparsity_of_all_parameters")]
        rows.append([point["name"], *removed, *_cells(names, values_of(point["evaluation"]), dense)])
    notes = [f"suite {record['suite']}; removed: of the targets, and of all parameters"]
    same = [(point["name"], point["evaluation"].get("same_masks_as")) for point in points]
    notes += [f"{name} has the same masks as {other}, and its figures" for name, other in same if other is not None]
    if any(in_percent(name) for name in names):
        notes.append("accuracies in percent, their changes in points")
    if any(value.partial for value in dense.values()):
        notes.append("partial: not all examples, or not all of the text, were taken")
    return "\n".join([table(rows), *notes])


def sweep_plan(plan: dict[str, Any]) -> str:
    """What a sweep would measure: the names of the points, the targets, and the disk that kept checkpoints need."""
    coverage = plan["coverage"]
    lines = [point["name"] for point in plan["points"]]
    lines.append(f"{len(lines)} points to measure, and the dense model")
    lines.append(f"targets: {coverage['targets']} of {coverage['matrices']} matrices in blocks")
    return "\n".join(lines + ([f"disk: {size(plan['disk_bytes'])} for the checkpoints"] if plan["disk_bytes"] else []))


def measure_table(record: dict[str, Any]) -> str:
    """N_eff/N by role and depth, a table for every criterion and order.

    Args:
        record: as `measure` writes it.
    """
    return "\n\n".join(_measure(entry) for entry in record["measures"])


def _measure(measure: Entry) -> str:
    by_role: dict[str, list[Entry]] = defaultdict(list)
    for entry in measure["matrices"].values():
        by_role[entry["role"]].append(entry)
    blocks = sorted({entry["block"] for entry in measure["matrices"].values() if entry["block"] is not None})
    depths = _depths(blocks)
    heads = [str(depth[0]) if len(depth) == 1 else f"{depth[0]}-{depth[-1]}" for depth in depths]
    ends = ["all", "min row", "median", "max row", "s_eff", "bound"]
    rows: Rows = [[f"{measure['criterion']}, order {measure['order']:g}: N_eff/N % in blocks", *heads, *ends]]
    for role, entries in by_role.items():
        shares = [_share([entry for entry in entries if entry["block"] in depth]) for depth in depths]
        whole = _share(entries)
        least, most = (
            pick(entry["n_eff"][key] / entry["group_size"] for entry in entries) for pick, key in ((min, "min"), (max, "max"))
        )
        medians = sorted(entry["n_eff"]["median"] / entry["group_size"] for entry in entries)
        spread = [percent_cell(least), percent_cell(medians[len(medians) // 2]), percent_cell(most)]
        rows.append([f"{role} x {len(entries)}", *map(percent_cell, shares), percent_cell(whole), *spread, *_masses(entries)])
    targets = measure["targets"]
    last = f"EMP at beta 1 would remove {100 * targets['sparsity_of_targets']:.2f} % of these {targets['weights']:,} weights"
    return f"{table(rows)}\n{last}"


def _shown(names: list[str]) -> list[str]:
    """The measures that fit into a table of many points: the perplexity, and the mean of the tasks if there are several."""
    means = [name for name in names if name.startswith("mean acc of ")]
    return [name for name in names if name.startswith("perplexity")] + (
        means or [name for name in names if not name.startswith("perplexity")]
    )


def _cells(names: list[str], values: dict[str, Value], dense: dict[str, Value] | None) -> list[str]:
    cells = []
    for name in names:
        value, before = values.get(name), dense.get(name) if dense is not None else None
        cells.append("-" if value is None else f"{value.value:.{2 if in_percent(name) else 3}f}")
        cells.append("" if value is None or before is None else shown_change(name, before, value))
    return cells


def _depths(blocks: list[int]) -> list[list[int]]:
    """Consecutive blocks in at most _DEPTHS ranges of about equal length."""
    count = min(len(blocks), _DEPTHS)
    cuts = [round(number * len(blocks) / count) for number in range(count + 1)] if count else []
    return [blocks[first:last] for first, last in itertools.pairwise(cuts)]


def _share(entries: list[Entry]) -> float | None:
    """The mean N_eff/N of all rows of some matrices."""
    rows = sum(entry["rows"] for entry in entries)
    return sum(entry["n_eff_mean"] / entry["group_size"] * entry["rows"] for entry in entries) / rows if rows else None


def _masses(entries: list[Entry]) -> list[str]:
    """s_eff and its lower bound in the mean."""
    rows = sum(entry["rows"] for entry in entries)
    bounded = all(entry["s_eff_bound"] is not None for entry in entries)
    means = [
        sum(entry[key] * entry["rows"] for entry in entries) / rows for key in ("s_eff_mean", *["s_eff_bound_mean"] * bounded)
    ]
    return [f"{mean:.3f}" for mean in means] + ([] if bounded else ["-"])
