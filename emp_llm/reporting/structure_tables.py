"""Tables of structured runs: heads and neurons that stay, and the size and speed of the model."""

from collections import defaultdict
from collections.abc import Callable

from emp_llm.common.errors import format_bytes
from emp_llm.common.tables import Rows, number_cell, percent_cell
from emp_llm.records.run_report import CostRecord, RunReport, StructureRecord, UnitsRecord


def structure_rows(structure: StructureRecord) -> Rows:
    """One row for each role (such as down_proj of all blocks)."""
    by_role: dict[tuple[str, str], list[UnitsRecord]] = defaultdict(list)
    for entry in structure.layers.values():
        by_role[entry.kind, entry.role].append(entry)
    rows = [["layers", "units", "of", "stay", "by the rule", "least", "most", "N_eff/N %", "s_eff", "bound"]]
    for (kind, role), entries in by_role.items():
        total, kept = sum(entry.units for entry in entries), sum(entry.kept for entry in entries)
        bounds = [entry.s_eff_bound for entry in entries if entry.s_eff_bound is not None]
        rows.append(
            [
                f"{role} x {len(entries)}",
                kind,
                f"{total:,}",
                f"{kept:,}",
                f"{sum(entry.rule for entry in entries):,}",
                f"{min(entry.kept for entry in entries):,}",
                f"{max(entry.kept for entry in entries):,}",
                percent_cell(sum(entry.n_eff for entry in entries) / total),
                number_cell(sum(entry.s_eff for entry in entries) / len(entries)),
                number_cell(sum(bounds) / len(bounds) if len(bounds) == len(entries) else None),
            ]
        )
    return rows


def cost_rows(structure: StructureRecord) -> Rows:
    """Size and speed of the dense and of the pruned model, and their ratio."""
    dense, pruned = structure.dense, structure.pruned
    rows = [["", "dense", "pruned", "ratio"]]

    def add(name: str, value: Callable[[CostRecord], float | None], cell: Callable[[float], str]) -> None:
        before, after = value(dense), value(pruned)
        if before is not None and after is not None:
            rows.append([name, cell(before), cell(after), f"{after / before:.3f}"])

    add("parameters", lambda cost: cost.parameters, lambda number: f"{number:,.0f}")
    add("weights", lambda cost: cost.bytes, format_bytes)
    add("FLOPs per token", lambda cost: cost.flops_per_token, lambda number: f"{number / 1e6:,.2f} M")
    add("tokens/s", lambda cost: cost.tokens_per_second, lambda number: f"{number:,.0f}")
    return rows


def speed_notes(structure: StructureRecord) -> list[str]:
    """How the speed was measured, if it was."""
    if structure.prompt_tokens is None:
        return []
    return [f"speed: a prompt of {structure.prompt_tokens} tokens, batch 1, both models in turn"]


def structure_lines(report: RunReport) -> list[str]:
    """Lines on the removed share of the model, its size and speed, and the changes of config.json."""
    structure, targets = report.structure, report.targets
    assert structure is not None
    done = "removed" if structure.config else "set to zero"
    lines = [
        f"{done}: {percent_cell(targets.sparsity_of_targets)} % of the weights of these layers, "
        f"{percent_cell(targets.sparsity_of_all_parameters)} % of all {targets.parameters or 0:,} parameters"
    ]
    for name, before, after, ratio in cost_rows(structure)[1:]:
        if structure.config:
            lines.append(f"{name}: {before} -> {after} ({ratio} x)")
    lines += speed_notes(structure)
    if structure.difference is not None:
        lines.append(
            f"checked: the logits are those of the dense model without these parts (difference {structure.difference:.1e})"
        )
    if structure.config:
        lines.append(f"config.json: {', '.join(f'{name} {value}' for name, value in structure.config.items())}")
    return lines
