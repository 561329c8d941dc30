"""Tables of a pruning run, one screen long: kept weights and effective numbers by layer, and the evaluation."""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from emp_llm.common.errors import count_of, format_bytes
from emp_llm.common.tables import Rows, number_cell, percent_cell, table
from emp_llm.evaluation.comparison import change_notes, compare
from emp_llm.evaluation.results import models_of_report
from emp_llm.evaluation.values import formatted, shown_change, values_of
from emp_llm.records.measure import CurvePoint
from emp_llm.records.run_report import MatrixRecord, RunReport, TargetsRecord
from emp_llm.reporting.structure_tables import structure_lines, structure_rows

if TYPE_CHECKING:
    from emp_llm.pruning.dry_run import DryRun


def pruning_table(report: RunReport) -> str:
    """A table with a line for each role (such as down_proj of all blocks), and totals below it."""
    if report.structure is not None:
        return "\n".join([table(structure_rows(report.structure)), *structure_lines(report)])
    return "\n".join([table(pruning_rows(report)), *pruning_lines(report)])


def pruning_rows(report: RunReport) -> Rows:
    """One row for each role (such as down_proj of all blocks)."""
    by_role: dict[str, list[MatrixRecord]] = defaultdict(list)
    for entry in report.matrices.values():
        by_role[entry.role].append(entry)
    rows = [["layers", "kept %", "min row", "median", "max row", "N_eff/N %", "s_eff", "bound", "kept mass"]]
    for role, entries in by_role.items():
        weights = sum(entry.rows * entry.columns for entry in entries)
        fractions = [entry.kept_fraction for entry in entries]
        medians = sorted(fraction.median for fraction in fractions)
        rows.append(
            [
                f"{role} x {len(entries)}",
                percent_cell(sum(entry.kept for entry in entries) / weights),
                percent_cell(min(fraction.min for fraction in fractions)),
                percent_cell(medians[len(medians) // 2]),
                percent_cell(max(fraction.max for fraction in fractions)),
                percent_cell(_mean(entries, effective_share)),
                number_cell(_mean(entries, lambda entry: entry.s_eff_mean)),
                number_cell(_mean(entries, lambda entry: entry.s_eff_bound_mean)),
                number_cell(_mean(entries, lambda entry: entry.kept_mass)),
            ]
        )
    return rows


def pruning_lines(report: RunReport) -> list[str]:
    """Lines on the total sparsity, the targets' share of the model, and the sizes of the weights in each form."""
    targets, sizes = report.targets, report.sizes
    lines = [
        f"sparsity {percent_cell(targets.sparsity_of_targets)} % of the targets, "
        f"{percent_cell(targets.sparsity_of_all_parameters)} % of all {targets.parameters or 0:,} parameters",
        targets_line(targets),
        *dense_lines(targets.dense_towers),
    ]
    if targets.n_eff is not None:
        bound = "" if targets.s_eff_bound is None else f" (at least {number_cell(targets.s_eff_bound)})"
        lines.append(f"all targets as one group: N_eff {targets.n_eff:,.0f}, s_eff {number_cell(targets.s_eff)}{bound}")
    if sizes is not None:
        lines.append(
            f"weights: {format_bytes(sizes.dense)} dense, {format_bytes(sizes.packed)} packed (emp-llm pack)"
            + (f", {format_bytes(sizes.mask)} as a mask" if sizes.mask else "")
        )
    return lines


def targets_line(targets: TargetsRecord) -> str:
    """The targets' share of the model."""
    inside = targets.matrices - targets.matrices_outside
    outside = f" and {targets.matrices_outside} outside" if targets.matrices_outside else ""
    return (
        f"targets: {inside} of {count_of(targets.matrices_in_blocks, 'matrix', 'matrices')} in blocks{outside}, "
        f"{percent_cell(targets.share_of_blocks)} % of the weights there, "
        f"{percent_cell(targets.share_of_all_parameters)} % of all parameters"
    )


def dense_lines(towers: dict[str, float]) -> list[str]:
    """The parts of a multimodal model that stay dense, each with its share of the parameters."""
    named = [f"{name} ({percent_cell(share)} %)" for name, share in towers.items()]
    return [f"stay dense, of all parameters: {', '.join(named)}"] if named else []


def evaluation_table(report: RunReport) -> str:
    """The dense and the pruned model side by side; empty if they were not evaluated."""
    evaluation = report.evaluation
    if evaluation is None or evaluation.dense is None or evaluation.pruned is None:
        return ""
    dense, pruned, measured = values_of(evaluation.dense), values_of(evaluation.pruned), evaluation.pruned.perplexity
    if evaluation.tasks or measured is None or list(dense) != list(pruned):
        return compare(models_of_report(report), labels=["dense", "pruned"])
    ((name, before),), ((_, after),) = dense.items(), pruned.items()
    cells = [formatted(before.value), formatted(after.value), shown_change(name, before, after)]
    where = f"suite {evaluation.suite}: {measured.tokens:,} tokens in blocks of {measured.block_length}"
    rows = [["", "dense", "pruned", "change"], ["perplexity", *cells]]
    return "\n".join([table(rows), where, *change_notes([name], dense, [pruned])])


def effective_share(entry: MatrixRecord) -> float | None:
    """The mean of N_eff / N over the groups of a matrix; None if a group is larger than the matrix."""
    return None if entry.n_eff_mean is None or entry.group_size is None else entry.n_eff_mean / entry.group_size


def _mean(entries: list[MatrixRecord], value: Callable[[MatrixRecord], float | None]) -> float | None:
    values = [value(entry) for entry in entries]
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def curve_table(title: str, curve: list[CurvePoint]) -> str:
    """A column for each beta: the percentage that EMP removes, of the targets and of all parameters."""
    rows: Rows = [
        [f"{title}: removed % at beta", *(f"{point.beta:g}" for point in curve)],
        ["of the targets", *(percent_cell(point.sparsity_of_targets) for point in curve)],
        ["of all parameters", *(percent_cell(point.sparsity_of_all_parameters) for point in curve)],
    ]
    return table(rows)


def dry_run_table(plan: "DryRun") -> str:
    """The layers to prune, their share of the model, and the memory and disk needed."""
    rows = [["layers", "shape", "weights"]]
    for role, entry in plan.layers.items():
        shape = " x ".join(str(length) for length in entry.shape)
        rows.append([f"{role} x {entry.count}", shape, f"{entry.weights:,}"])
    coverage, memory = plan.coverage, "1 GB"
    if plan.model_bytes is not None:
        memory += f", and {format_bytes(plan.model_bytes)} to calibrate (less with --device-map disk)"
    inside = coverage.targets - coverage.targets_outside
    outside = f" and {coverage.targets_outside} outside" if coverage.targets_outside else ""
    lines = [
        table(rows),
        f"targets: {inside} of {count_of(coverage.matrices, 'matrix', 'matrices')} in blocks{outside}, "
        f"{percent_cell(coverage.share_of_blocks)} % of the weights there, "
        f"{coverage.target_parameters:,} of {coverage.parameters:,} parameters "
        f"({percent_cell(coverage.target_parameters / (coverage.parameters or 1))} %)",
        *dense_lines(coverage.dense_shares),
        f"disk: {format_bytes(plan.disk_bytes)} at {plan.output}"
        + (" (it exists: name another --output, or add --overwrite)" if plan.needs_overwrite else ""),
        f"memory: {memory}",
    ]
    if plan.resume_bytes is not None:
        lines.append(
            f"disk while calibrating block by block: {format_bytes(2 * plan.resume_bytes)} of hidden states beside the output, "
            "for resuming an interrupted run (none with --no-resumable-calibration)"
        )
    if plan.fit_bytes is not None and plan.fit_disk_bytes is not None:
        lines.append(
            f"refit: up to {format_bytes(plan.fit_bytes)} more memory, beside two sets of hidden states and a block's inputs; "
            f"{format_bytes(plan.fit_disk_bytes)} of disk beside the output until it is written"
        )
    if plan.push_to_hub is not None:
        lines.append(f"push: {format_bytes(plan.disk_bytes)} to {plan.push_to_hub}")
    lines += plan.notes
    if plan.curve:
        lines.append(curve_table(plan.recipe, plan.curve))
    if plan.no_curve:
        lines.append(f"sparsity against beta: {plan.no_curve}")
    return "\n".join(lines)
