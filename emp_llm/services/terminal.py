"""What a run shows on the terminal: tables one screen long."""

from collections import defaultdict
from typing import Any

from emp_llm.models.norms import NormsDifference
from emp_llm.services.comparison import compare
from emp_llm.services.results import evaluation_records
from emp_llm.services.tables import Rows, number_cell, percent_cell, table


def show_pruning(report: dict[str, Any]) -> None:
    """Print what a pruning run did, or what a dry run would do."""
    if report.get("dry_run"):
        print(plan_table(report))
        return
    print(pruning_table(report))
    if "evaluation" in report:
        print(evaluation_table(report))
    if "push" in report:
        show_push(report["push"])


def show_difference(difference: NormsDifference) -> None:
    """Print by how much the norms of two activations files differ: the worst ten layers, and all together."""
    rows = [["layer", "largest", "mean"]]
    rows += [[name, f"{largest:.3g}", f"{mean:.3g}"] for name, (largest, mean) in list(difference.layers.items())[:10]]
    if difference.layers:
        print(table(rows))
    print(
        f"relative differences of the norms of {len(difference.layers)} layers: {difference.largest:.3g} at most, "
        f"{difference.mean:.3g} in the mean"
    )
    if difference.only:
        print(f"{len(difference.only)} layers are not in both, or of other sizes: {', '.join(difference.only[:3])} ...")
    for field, first, second in difference.about:
        print(f"{field}: {first[:60]} | {second[:60]}")


def show_push(pushed: dict[str, Any]) -> None:
    """Print what was pushed, or would be."""
    if pushed.get("dry_run"):
        rows = [["file", "size"], *([path, size(count)] for path, count in sorted(pushed["files"].items()))]
        branch = f", branch {pushed['branch']}" if pushed["branch"] else ""
        print(f"{table(rows)}\n{len(rows) - 1} files, {size(pushed['bytes'])}, would go to {pushed['repository']}{branch}")
        return
    there = len(pushed["files"]) - len(pushed["uploaded"])
    print(
        f"{pushed['url']} holds {pushed['folder']}: {len(pushed['uploaded'])} files pushed, {there} were there already"
        + (f", {len(pushed['deleted'])} of other weights deleted" if pushed["deleted"] else "")
        + f" (commit {str(pushed['commit'])[:10]})"
    )


def plan_table(plan: dict[str, Any]) -> str:
    """The layers a run would prune, how much of the model they are, and what the run needs."""
    rows = [["layers", "shape", "weights"]]
    for role, entry in plan["layers"].items():
        shape = " x ".join(str(length) for length in entry["shape"])
        rows.append([f"{role} x {entry['count']}", shape, f"{entry['weights']:,}"])
    coverage, memory = plan["coverage"], "1 GB"
    if plan["model_bytes_to_calibrate"]:
        memory += f", and {size(plan['model_bytes_to_calibrate'])} to calibrate (less with --device-map disk)"
    share, of_blocks = (coverage["target_parameters"] / (coverage[of] or 1) for of in ("parameters", "block_parameters"))
    return "\n".join(
        [
            table(rows),
            f"targets: {coverage['targets']} of {coverage['matrices']} matrices in blocks, "
            f"{percent_cell(of_blocks)} % of the weights there, "
            f"{coverage['target_parameters']:,} of {coverage['parameters']:,} parameters ({percent_cell(share)} %)",
            f"disk: {size(plan['disk_bytes'])} at {plan['output']}",
            f"memory: {memory}",
            *([f"push: {size(plan['disk_bytes'])} to {plan['push_to_hub']}"] if plan.get("push_to_hub") else []),
        ]
    )


def pruning_table(report: dict[str, Any]) -> str:
    """One line for each role (down_proj of all blocks), and the whole below."""
    return "\n".join([table(pruning_rows(report)), *pruning_lines(report)])


def pruning_rows(report: dict[str, Any]) -> Rows:
    """One row for each role (down_proj of all blocks)."""
    by_role: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in report["matrices"].values():
        by_role[entry["role"]].append(entry)
    rows = [["layers", "kept %", "min row", "median", "max row", "N_eff/N %", "s_eff", "bound", "kept mass"]]
    for role, entries in by_role.items():
        weights = sum(entry["rows"] * entry["columns"] for entry in entries)
        fractions = [entry["kept_fraction"] for entry in entries]
        medians = sorted(fraction["median"] for fraction in fractions)
        rows.append(
            [
                f"{role} x {len(entries)}",
                percent_cell(sum(entry["kept"] for entry in entries) / weights),
                percent_cell(min(fraction["min"] for fraction in fractions)),
                percent_cell(medians[len(medians) // 2]),
                percent_cell(max(fraction["max"] for fraction in fractions)),
                percent_cell(_mean(entries, lambda e: e["n_eff_mean"] / e["group_size"] if e["n_eff"] else None)),
                number_cell(_mean(entries, lambda e: e["s_eff_mean"] if e["s_eff"] else None)),
                number_cell(_mean(entries, lambda e: e["s_eff_bound_mean"] if e["s_eff_bound"] else None)),
                number_cell(_mean(entries, lambda e: e["kept_mass"])),
            ]
        )
    return rows


def pruning_lines(report: dict[str, Any]) -> list[str]:
    """The sparsity in all, what share of the model the targets are, and how small the weights can be shipped."""
    targets, sizes = report["targets"], report["sizes"]
    return [
        f"sparsity {percent_cell(targets['sparsity_of_targets'])} % of the targets, "
        f"{percent_cell(targets['sparsity_of_all_parameters'])} % of all {targets['parameters']:,} parameters",
        f"targets: {targets['matrices']} of {targets['matrices_in_blocks']} matrices in blocks, "
        f"{percent_cell(targets['share_of_blocks'])} % of the weights there, "
        f"{percent_cell(targets['share_of_all_parameters'])} % of all parameters",
        f"weights: {size(sizes['dense'])} dense, {size(sizes['packed'])} packed (emp-llm pack), "
        f"{size(sizes['mask'])} as a mask",
    ]


def evaluation_table(report: dict[str, Any]) -> str:
    """Dense and pruned side by side; one line where the suite has a perplexity only."""
    evaluation = report["evaluation"]
    dense, pruned = evaluation["dense"], evaluation["pruned"]
    if "tasks" in evaluation:
        return compare(evaluation_records(report), labels=["dense", "pruned"])
    before, after = dense["perplexity"], pruned["perplexity"]
    change = after["perplexity"] / before["perplexity"] - 1
    cells = [f"{before['perplexity']:.3f}", f"{after['perplexity']:.3f}", f"{100 * change:+.2f} %"]
    where = f"suite {evaluation['suite']}: {after['tokens']:,} tokens in blocks of {after['block_length']}"
    return f"{table([['', 'dense', 'pruned', 'change'], ['perplexity', *cells]])}\n{where}"


def size(count: float) -> str:
    """A number of bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.2f} TB"


def _mean(entries: list[dict[str, Any]], value: Any) -> float | None:
    values = [value(entry) for entry in entries]
    return None if any(v is None for v in values) else sum(values) / len(values)
