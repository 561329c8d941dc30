"""Tables of a run, a measure and a bench, as the commands print them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, count_of, format_bytes, printable
from emp_llm.common.paths import shown_name
from emp_llm.common.tables import Rows, number_cell, percent_cell, table
from emp_llm.evaluation.comparison import (
    Value,
    advice,
    change_of,
    change_text,
    losses_of,
)
from emp_llm.options.recipe import Share
from emp_llm.records.base import record_of, version_of
from emp_llm.records.evaluation import Bench, CheckRecord, Speed
from emp_llm.records.run_report import (
    REPORT_LIMIT,
    CurvePoint,
    FitRecord,
    LossRecord,
    MatrixRecord,
    Measure,
    MeasureEntry,
    RunReport,
    StructureRecord,
    TargetsRecord,
    UnitsRecord,
)

if TYPE_CHECKING:
    from emp_llm.pruning.dry_run import DryRun, Needs


_SHOWN = 5  # columns of `pruning_rows` that a run prints: how much stays


def pruning_table(report: RunReport) -> str:
    """What a run prints: a line for each role (such as down_proj of all blocks), and totals. The
    effective numbers and masses are in the report.
    """
    structure = report.structure
    if structure is not None:
        return "\n".join([table(structure_rows(structure)), *structure_lines(report, structure)])
    rows = [row[:_SHOWN] for row in pruning_rows(report)]
    return "\n".join([table(rows), *pruning_lines(report)])


def pruning_rows(report: RunReport) -> Rows:
    """One row for each role (such as down_proj of all blocks)."""
    rows = [
        [
            "layers",
            "kept %",
            "min row",
            "median",
            "max row",
            "N_eff/N %",
            "s_eff",
            "bound",
            "kept mass",
        ]
    ]
    for role, entries in _by_role(report.matrices).items():
        fractions = [entry.kept_fraction for entry in entries]
        shares = (
            sum(entry.kept for entry in entries)
            / sum(entry.rows * entry.columns for entry in entries),
            min(fraction.min for fraction in fractions),
            sorted(fraction.median for fraction in fractions)[len(fractions) // 2],
            max(fraction.max for fraction in fractions),
            row_mean(entries, effective_share),
        )
        mass = number_cell(row_mean(entries, lambda entry: entry.kept_mass))
        rows.append(
            [f"{role} x {len(entries)}", *map(percent_cell, shares), *mass_cells(entries), mass]
        )
    return rows


def _by_role(matrices: dict[str, MatrixRecord]) -> dict[str, list[MatrixRecord]]:
    by_role: dict[str, list[MatrixRecord]] = defaultdict(list)
    for entry in matrices.values():
        by_role[entry.role].append(entry)
    return by_role


def pruning_lines(report: RunReport) -> list[str]:
    """Lines on the total sparsity, the targets' share of the model, and the sizes of the weights
    in each form.
    """
    targets = report.targets
    sizes = report.sizes
    asked = ""
    counts = report.recipe.counts
    sparsity = counts.sparsity
    if sparsity is not None and percent_cell(sparsity) != percent_cell(targets.sparsity_of_targets):
        by_cost = isinstance(counts, Share) and counts.shares is not None
        group = "matrix" if by_cost else report.recipe.group
        why = f"each {group} loses a whole number of weights, rounded down"
        if report.fits and targets.sparsity_of_targets > sparsity:
            why = "some of the weights that were kept and fitted are zero"
        asked = f" ({100 * sparsity:g} % asked; {why})"
    lines = [
        f"sparsity {percent_cell(targets.sparsity_of_targets)} % of the targets{asked}, "
        f"{percent_cell(targets.sparsity_of_all_parameters)} % of all {targets.parameters or 0:,} "
        "parameters",
        f"{covered(targets)}, {percent_cell(targets.share_of_all_parameters)} % of all parameters",
        *dense_lines(targets.dense_towers),
    ]
    if targets.n_eff is not None:
        bound = (
            "" if targets.s_eff_bound is None else f" (at least {number_cell(targets.s_eff_bound)})"
        )
        lines.append(
            f"all targets as one group: N_eff {targets.n_eff:,.0f}, s_eff "
            f"{number_cell(targets.s_eff)}{bound}"
        )
    if sizes is not None:
        lines.append(
            f"weights: {format_bytes(sizes.dense)} dense, {format_bytes(sizes.packed)} packed "
            "(emp-llm pack)" + (f", {format_bytes(sizes.mask)} as a mask" if sizes.mask else "")
        )
        eight = _eight_bits(report)
        if eight is not None and eight < sizes.packed > _LITTLE * sizes.dense:
            lines.append(
                f"Packing gains little here: these targets in 8 bits would take "
                f"{format_bytes(eight)}, and usually lose less (docs/prune-or-quantise.md)"
            )
    return lines


_LITTLE = 0.9  # of the dense size: a packed size above it is hardly worth the zeros


def _eight_bits(report: RunReport) -> int | None:
    """Bytes of the weights with the targets in 8 bits; None if the report does not say."""
    targets = report.targets
    if report.sizes is None or not targets.parameters or targets.weights is None:
        return None
    each = report.sizes.dense / targets.parameters
    return round(report.sizes.dense - targets.weights * max(each - 1, 0))


def covered(targets: TargetsRecord) -> str:
    """The targets' share of the decoder blocks."""
    inside = targets.matrices - targets.matrices_outside
    outside = f" and {targets.matrices_outside} outside" if targets.matrices_outside else ""
    return (
        f"targets: {inside} of {count_of(targets.matrices_in_blocks, 'matrix', 'matrices')} in "
        f"blocks{outside}, {percent_cell(targets.share_of_blocks)} % of the weights there"
    )


def dense_lines(towers: dict[str, float]) -> list[str]:
    """The parts of a multimodal model that stay dense, each with its share of the parameters."""
    named = [f"{name} ({percent_cell(share)} %)" for name, share in towers.items()]
    return [f"stay dense, of all parameters: {', '.join(named)}"] if named else []


def effective_share(entry: MatrixRecord) -> float | None:
    """The mean of N_eff / N over the groups of a matrix; None if a group is larger than the
    matrix.
    """
    return (
        None
        if entry.n_eff_mean is None or entry.group_size is None
        else entry.n_eff_mean / entry.group_size
    )


def curve_table(title: str, curve: list[CurvePoint]) -> str:
    """A column for each beta: the percentage that EMP removes, of the targets and of all
    parameters.
    """
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
    coverage = plan.coverage
    lines = [
        table(rows),
        f"{covered(coverage)}, {coverage.weights:,} of {coverage.parameters:,} parameters "
        f"({percent_cell(coverage.share_of_all_parameters)} %)",
        *dense_lines(coverage.dense_towers),
        f"disk: {format_bytes(plan.disk_bytes)} at {plan.output}"
        + (
            " (it exists: name another --output, or add --overwrite)"
            if plan.needs_overwrite
            else ""
        ),
        *_needs_lines(plan.needs),
    ]
    if plan.minutes is not None:
        long = f"{plan.minutes:.0f} min" if plan.minutes < 90 else f"{plan.minutes / 60:.0f} hours"
        lines.append(f"time: {'under a minute' if plan.minutes < 1 else f'about {long}'}")
    if plan.resume_bytes is not None:
        lines.append(
            f"disk while calibrating block by block: {format_bytes(2 * plan.resume_bytes)} of "
            "hidden states beside the output, for resuming an interrupted run (none with "
            "--no-resumable-calibration)"
        )
    if plan.fit_disk_bytes is not None:
        lines.append(
            f"updated weights: {format_bytes(plan.fit_disk_bytes)} of disk beside the output until "
            "it is written"
        )
    if plan.push_to_hub is not None:
        lines.append(f"push: {format_bytes(plan.disk_bytes)} to {plan.push_to_hub}")
    lines += plan.notes
    if plan.curve:
        lines.append(curve_table(plan.recipe, plan.curve))
    if plan.no_curve:
        lines.append(f"sparsity against beta: {plan.no_curve}")
    return "\n".join(lines)


def _needs_lines(needs: "Needs | None") -> list[str]:
    """Lines on the memory that a run takes."""
    if needs is None:
        return ["memory: 1 GB"]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.parts.items())
    lines = [
        f"memory: {format_bytes(sum(needs.parts.values()))} on {needs.device}, where "
        f"{format_bytes(needs.free)} are free ({parts}); and 1 GB for the program"
    ]
    if needs.hidden:
        where = "on disk" if needs.place == "disk" else "in main memory"
        lines.append(f"hidden states: {format_bytes(needs.hidden)} {where}")
    return lines


# The error is sum_t ||What xhat_t - W x_t||^2 / sum_t ||W x_t||^2, with the inputs xhat in the
# pruned and x in the dense model. The sequences held out guard against fitting the calibration
# text: weights are not fitted to them.
FIT_ERRORS = ("error_before", "error_after", "held_out_before", "held_out_after")


def healing_lines(report: RunReport) -> list[str]:
    """One line: the distance from the dense model on the sequences that chose the step, before and
    after; none without healing. They do not judge: they lie between those of the training.
    """
    healing = report.healing
    if healing is None:
        return []
    curve = {step: math.inf if loss is None else loss for step, loss in healing.curve}
    by_model = healing.by == "model"
    stage = report.stages.get("heal")  # none of a model in memory
    time = "" if stage is None else f" in {stage.seconds / 60:.1f} min"
    steps = count_of(healing.steps, "step") + ("" if by_model else " for each block")
    what, unit = (
        ("divergence", " nats per token") if by_model else ("mean error of a block's outputs", "")
    )
    heal = report.recipe.heal
    if heal is not None and heal.labels:
        what += f" from labels ({heal.labels:g}) and the dense model"
    return [
        f"healed: {steps}, {healing.tokens:,} tokens{time}; {what} "
        f"{curve[0]:.4f} to {curve[healing.best]:.4f}{unit} on the sequences that chose step "
        f"{healing.best}"
    ]


def check_lines(report: RunReport) -> list[str]:
    """The perplexity of held-out text, dense and pruned, and what would cost less if it rises much;
    or what a check needs. A budget of --loss is the user's word.
    """
    if report.check is None:
        return [] if report.unchecked is None else [f"damage not measured: {report.unchecked}"]
    dense, pruned, change, tokens = describe_check(report.check)
    line = f"held-out text, {tokens}: perplexity {dense} to {pruned} ({change})"
    values = report.check.dense.value, report.check.pruned.value
    return [line, *([] if report.loss else advice(report.recipe, *values))]


def describe_check(check: CheckRecord) -> tuple[str, str, str, str]:
    """The perplexities of the dense and the pruned model on held-out text, the change, and the
    extent of the text.
    """
    dense, pruned = (
        Value(perplexity.value, losses=losses_of(perplexity))
        for perplexity in (check.dense, check.pruned)
    )
    change = change_text("perplexity", change_of("perplexity", pruned, dense))
    tokens = f"{check.dense.blocks} x {check.dense.block_length} tokens"
    return f"{dense.value:.4g}", f"{pruned.value:.4g}", change, tokens


def loss_lines(report: RunReport) -> list[str]:
    """The curve of --loss, and the point that was taken; none without it."""
    loss = report.loss
    if loss is None:
        return []
    return [
        f"perplexity of {loss.sequences} x {loss.length} held-out tokens, {loss.dense:.4g} dense:",
        table(loss_rows(loss, report.structure is not None)),
        chosen_line(loss),
    ]


def loss_rows(loss: LossRecord, of_units: bool) -> Rows:
    """The curve of --loss: a row for each sparsity, and a column each for the masks alone and for
    a run that moves the weights. Of units, every point is a whole run.
    """
    cells: dict[float, dict[bool, str]] = defaultdict(dict)
    for point in loss.points:
        cells[point.sparsity][point.whole_run] = point.rise_text
    updated = any(point.whole_run for point in loss.points)
    alone = any(not point.whole_run for point in loss.points)
    rows: Rows = [["removed"]]
    rows[0] += ["masks alone"] * alone
    rows[0] += ["rise" if of_units else "weights moved"] * updated
    for sparsity, texts in sorted(cells.items()):
        row = [f"{100 * sparsity:.1f} %"]
        row += [texts.get(False, "")] * alone
        row += [texts.get(True, "")] * updated
        rows.append(row)
    return rows


def chosen_line(loss: LossRecord) -> str:
    """Which point of the curve --loss took, and why."""
    allowed = loss.flag.removeprefix("--loss ")
    unit = "" if allowed.endswith("%") else " nats"
    return (
        f"chosen: {100 * loss.sparsity:.1f} %, the most with rise + error <= "
        f"{allowed.replace('%', ' %')}{unit}"
    )


def fit_lines(report: RunReport) -> list[str]:
    """One line: the mean output error over the fitted layers, before and after; none without a
    fit.
    """
    before, after, held_before, held_after = (
        mean_error(report.fits.values(), name) for name in FIT_ERRORS
    )
    if before is None or after is None:
        return []
    held = ""
    if held_before is not None and held_after is not None:
        held = f", held out {percent_cell(held_before)} % to {percent_cell(held_after)} %"
    fitted = sum(fit.error_after is not None for fit in report.fits.values())
    return [
        f"output error, mean of {count_of(fitted, 'layer')}: calibration text "
        f"{percent_cell(before)} % to {percent_cell(after)} %{held}"
    ]


def mean_error(fits: Iterable[FitRecord | UnitsRecord], name: str) -> float | None:
    """The mean of an error or a loss over the layers for which it is known."""
    values = (getattr(fit, name) for fit in fits)
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def structure_rows(structure: StructureRecord) -> Rows:
    """One row for each role, such as down_proj of all blocks."""
    by_role: dict[tuple[str, str], list[UnitsRecord]] = defaultdict(list)
    for entry in structure.layers.values():
        by_role[entry.kind, entry.role].append(entry)
    routed = any(entry.tokens_lost is not None for entry in structure.layers.values())
    rows = [
        [
            "layers",
            "units",
            "of",
            "stay",
            "by the rule",
            "least",
            "most",
            "N_eff/N %",
            "s_eff",
            "bound",
        ]
    ]
    rows[0] += ["tokens lost %", "mass lost %"] * routed
    for (units, role), entries in by_role.items():
        total = sum(entry.units for entry in entries)
        kept = sum(entry.kept for entry in entries)
        bounds = [entry.s_eff_bound for entry in entries if entry.s_eff_bound is not None]
        rows.append(
            [
                f"{role} x {len(entries)}" if len(entries) > 1 else role,
                units,
                f"{total:,}",
                f"{kept:,}",
                f"{sum(entry.rule for entry in entries):,}",
                f"{min(entry.kept for entry in entries):,}",
                f"{max(entry.kept for entry in entries):,}",
                percent_cell(sum(entry.n_eff for entry in entries) / total),
                number_cell(sum(entry.s_eff for entry in entries) / len(entries)),
                number_cell(sum(bounds) / len(bounds) if len(bounds) == len(entries) else None),
                *[
                    percent_cell(mean_error(entries, name))
                    for name in ("tokens_lost", "mass_lost") * routed
                ],
            ]
        )
    return rows


def cost_rows(structure: StructureRecord) -> Rows:
    """Size of the dense and of the pruned model, and their ratio."""
    rows = [["", "dense", "pruned", "ratio"]]
    for name, field, cell in (
        ("parameters", "parameters", "{:,.0f}".format),
        ("active parameters per token", "active_parameters", "{:,.0f}".format),
        ("weights", "bytes", format_bytes),
    ):
        before = getattr(structure.dense, field)
        after = getattr(structure.pruned, field)
        if before is not None and after is not None:
            rows.append([name, cell(before), cell(after), f"{after / before:.3f}"])
    return rows


def structure_lines(report: RunReport, structure: StructureRecord) -> list[str]:
    """Lines on the removed share of the model, its size, and the changes of config.json."""
    targets = report.targets
    done = "removed" if structure.config else "set to zero"
    lines = [
        f"{done}: {percent_cell(targets.sparsity_of_targets)} % of the weights of these layers, "
        f"{percent_cell(targets.sparsity_of_all_parameters)} % of all {targets.parameters or 0:,} "
        "parameters"
    ]
    if structure.config:
        lines += [
            f"{name}: {before} -> {after} ({ratio} x)"
            for name, before, after, ratio in cost_rows(structure)[1:]
        ]
    if any(entry.kind == "layers" for entry in structure.layers.values()):
        lines.append("layers: their removal costs more in long generations than a perplexity shows")
    if structure.difference is not None:
        trained = report.healing is not None or report.trained
        fitted = any(fit.error_after is not None for fit in report.fits.values())
        lines.append(
            f"checked{' before it was trained' * trained}: the logits are those of the dense model "
            f"without these parts{' and with the fitted weights' * fitted} (difference "
            f"{structure.difference:.1e})"
        )
    if structure.config:
        lines.append(
            "config.json: "
            f"{', '.join(f'{name} {value}' for name, value in structure.config.items())}"
        )
    return lines


_DEPTHS = 8  # largest number of block columns in the table of measures


def measure_table(record: Measure) -> str:
    """N_eff / N by role and depth, and the sparsity at many betas: two tables for every
    criterion and order.
    """
    tables = [_measure(entry) for entry in record.measures]
    if record.losses:
        tables.append(losses_table(record))
    return "\n\n".join(tables)


def losses_table(record: Measure) -> str:
    """How much each method removes within each budget of --loss."""
    flags = [budget.flag.removeprefix("--loss ") for budget in record.losses[0].budgets]
    rows: Rows = [["removed % of the targets within", *flags, "packed"]]
    for measured in record.losses:
        order = "" if measured.order in (None, 2.0) else f", order {measured.order:g}"
        cells = []
        size = ""
        for entry in measured.budgets:
            cells.append("0" if entry.point is None else percent_cell(entry.point.sparsity))
            size = size if entry.packed_bytes is None else format_bytes(entry.packed_bytes)
        rows.append([f"{measured.method}{order}", *cells, size])
    first = record.losses[0]
    return (
        f"{table(rows)}\nrise of the perplexity on {first.sequences} held-out sequences of "
        f"{first.length} tokens, {first.dense:.3f} dense, with its standard error on top; packed: "
        "the size at the last budget"
    )


def _measure(measure: MeasureEntry) -> str:
    name = f"{measure.criterion}, order {measure.order:g}"
    blocks = sorted({entry.block for entry in measure.matrices.values() if entry.block is not None})
    depths = [group.tolist() for group in np.array_split(blocks, _DEPTHS) if len(group)]
    heads = [str(depth[0]) if len(depth) == 1 else f"{depth[0]}-{depth[-1]}" for depth in depths]
    rows: Rows = [
        [
            f"{name}: N_eff/N % in blocks",
            *heads,
            "all",
            "min row",
            "median",
            "max row",
            "s_eff",
            "bound",
        ]
    ]
    for role, entries in _by_role(measure.matrices).items():
        by_depth = [[entry for entry in entries if entry.block in depth] for depth in depths]
        shares = [row_mean(group, effective_share) for group in [*by_depth, entries]]
        known = [
            (entry.n_eff, entry.group_size)
            for entry in entries
            if entry.n_eff is not None and entry.group_size is not None
        ]
        medians = sorted(n_eff.median / size for n_eff, size in known)
        shares += [min(n_eff.min / size for n_eff, size in known), medians[len(medians) // 2]]
        shares += [max(n_eff.max / size for n_eff, size in known)]
        rows.append([f"{role} x {len(entries)}", *map(percent_cell, shares), *mass_cells(entries)])
    targets = measure.targets
    removed = f"{100 * targets.sparsity_of_targets:.2f} % of these {targets.weights or 0:,} weights"
    lines = [table(rows), f"EMP at beta 1 would remove {removed}"]
    return "\n".join(lines + ([curve_table(name, measure.curve)] if measure.curve else []))


def mass_cells(entries: list[MatrixRecord]) -> list[str]:
    """The means of s_eff and of its bound over all rows of some matrices, as cells."""
    means = (
        row_mean(entries, lambda entry: entry.s_eff_mean),
        row_mean(entries, lambda entry: entry.s_eff_bound_mean),
    )
    return [number_cell(mean) for mean in means]


def row_mean(
    entries: list[MatrixRecord], value: Callable[[MatrixRecord], float | None]
) -> float | None:
    """A mean over all rows of some matrices; None if it is unknown for one of them."""
    values = ((value(entry), entry.rows) for entry in entries)
    known = [(number, rows) for number, rows in values if number is not None]
    if not known or len(known) < len(entries):
        return None
    return sum(number * rows for number, rows in known) / sum(rows for _, rows in known)


SPEED_NOTE = (
    "The pruned model from packed weights (a bit for each weight, and the weights that are not "
    "zero), and the same model or a baseline dense. Both are measured in turn in one process: "
    "medians, and the range of the ratios of the rounds. Tokens: sequences x tokens of a prompt + "
    "new tokens. Memory is what the process grew by, with one batch of the smallest size."
)


def split_benches(paths: Sequence[Path]) -> tuple[list[Path], list[Bench]]:
    """The paths that are no output of `bench`, and the records of the others.

    Raises:
        UserError: an output of `bench` is wrong or of a newer version.
    """
    others = []
    benches = []
    for path in paths:
        try:
            values = read_json(path, True, REPORT_LIMIT) if path.is_file() else {}
        except UserError:  # the reader of the others says it with the name of its option
            values = {}
        if version_of(values, Bench) is None:
            others.append(path)
        else:
            benches.append(record_of(values, Bench, str(path)))
    return others, benches


def speed_rows(benches: Sequence[Bench]) -> Rows:
    """A row for each batch size of each bench."""
    rows = [
        [
            "model",
            "zeros in packed layers",
            "machine",
            "tokens",
            "prefill, tokens/s",
            "decode, tokens/s",
            "memory",
            "weights",
        ]
    ]
    for bench in benches:
        dense = bench.dense
        sparse = bench.sparse
        names = [shown_name(each) for each in dict.fromkeys((bench.model, dense.model))]
        threads = f", {bench.threads} threads" if bench.device == "cpu" else ""
        rows += [
            [
                printable(", dense: ".join(names)),
                f"{bench.sparsity:.1%}" if bench.layers else "",
                printable(bench.processor if bench.device == "cpu" else bench.device) + threads,
                f"{batch.batch_size} x {bench.prompt_tokens}{'' if bench.text else ' at random'} + "
                f"{bench.new_tokens}",
                _change(batch.prefill),
                _change(batch.decode),
                _smaller(dense.memory_bytes, sparse.memory_bytes),
                _smaller(dense.weight_bytes, sparse.weight_bytes),
            ]
            for batch in bench.batches
        ]
    return rows


def _change(speed: Speed) -> str:
    spread = f"{speed.lowest_ratio:.2f} to {speed.highest_ratio:.2f}"
    return f"{speed.dense:.1f} → {speed.sparse:.1f} ({speed.ratio:.2f} x, {spread})"


def _smaller(dense: int, sparse: int) -> str:
    return f"{format_bytes(dense)} → {format_bytes(sparse)} ({sparse / max(1, dense):.2f} x)"
