"""The tables and the figures of `study_methods.py`: increases of the perplexity over the dense
model, with paired errors.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from emp_llm.common.tables import Rows, markdown_table

Entry = dict[str, Any]
_NAMES = {
    "magnitude": "magnitude, uniform rows",
    "wanda": "Wanda, uniform rows",
    "ria": "RIA, uniform rows",
    "wanda+owl": "Wanda, OWL shares",
    "sparsegpt": "SparseGPT",
    "relative": "relative score, uniform rows",
    "emp-magnitude": "EMP-magnitude",
    "emp-wanda": "EMP-Wanda",
    "emp-wanda+magnitude": "EMP, Wanda's score, counts from |W|",
    "emp-relative+own": "EMP, relative score and counts",
    "emp-relative": "**emp-relative** (relative score, counts from |W|)",
    "admm": "ADMM, uniform rows",
    "emp-admm": "**emp-admm** (ADMM, counts from |W|)",
}
_REFITS = {"": "", "equal": "refit", "relative": "refit, relative weights"}
_DRAWN = {
    ("wanda", ""): "Wanda",
    ("sparsegpt", ""): "SparseGPT",
    ("wanda", "equal"): "Wanda, refit",
    ("emp-admm", "equal"): "emp-admm, refit",
}
# The models of the figures.
_MLP = "the demo model"
_ALL_LINEAR = "wiki-llama-5m"
_ENOUGH = 3  # points of a column of which the best is marked


def write_tables(folder: Path, results: list[Path]) -> None:
    """Write `tables.md` and the figures of docs/methods.md into a folder.

    Args:
        folder: created if missing.
        results: files of `study_methods.py`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        json.loads(line)
        for path in results
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    parts = []
    for (model, text), own in _grouped(entries, "model", "text").items():
        dense = next(entry for entry in own if "method" not in entry)
        parts.append(
            f"## {model}\n\nDense perplexity on {text}: {math.exp(_mean(dense['losses'])):.3f}."
        )
        points = [entry for entry in own if "method" in entry]
        for (scope, calibration, samples), members in _grouped(
            points, "scope", "calibration", "samples"
        ).items():
            about = (
                f"{'MLP layers' if scope == 'mlp' else 'All linear layers'}, {samples} "
                f"sequences of {calibration}"
            )
            parts.append(
                f"### {about}\n\n{markdown_table(_rows(members, dense), as_markdown=True)}"
            )
        if model == _MLP:
            title = f"{model}: damage of pruning its MLP layers"
            _draw(folder / "the-demo-model.svg", title, points, "mlp", dense, _DRAWN, log=True)
        if model == _ALL_LINEAR:
            title = "A Llama of 5 M weights on WikiText-2, all its linear layers pruned"
            _draw(folder / "front.svg", title, points, "all-linear", dense, _DRAWN, log=False)
    (folder / "tables.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def increase(entry: Entry, dense: Entry) -> tuple[float, float]:
    """The increase of the perplexity over the dense model in percent, and its paired standard
    error.
    """
    changes = [one - other for one, other in zip(entry["losses"], dense["losses"], strict=True)]
    mean = _mean(changes)
    count = len(changes)
    error = math.sqrt(sum((change - mean) ** 2 for change in changes) / (count - 1) / count)
    return 100 * math.expm1(mean), 100 * math.exp(mean) * error


def _rows(points: list[Entry], dense: Entry) -> Rows:
    """One row for each method and refit, one column for each budget. The smallest increase of a
    column is bold.
    """
    budgets = sorted({p["budget"] for p in points}, key=lambda b: (":" in b, _removed(points, b)))
    found = {(p["method"], p["refit"], p["budget"]): increase(p, dense) for p in points}
    by_budget = {
        b: [value for (_, _, budget), (value, _) in found.items() if budget == b] for b in budgets
    }
    best = {b: min(values) for b, values in by_budget.items() if len(values) >= _ENOUGH}
    rows = [["method", "weights", *(_title(points, budget) for budget in budgets)]]
    for refit, words in _REFITS.items():
        for method, name in _NAMES.items():
            cells = []
            for budget in budgets:
                value = found.get((method, refit, budget))
                cell = "" if value is None else f"{value[0]:+.2f} ± {value[1]:.2f} %"
                cells.append(
                    f"**{cell}**" if value is not None and value[0] == best.get(budget) else cell
                )
            if any(cells):
                rows.append([name, words or "kept", *cells])
    return rows


def _removed(points: list[Entry], budget: str) -> float:
    return next(float(p["sparsity"]) for p in points if p["budget"] == budget)


def _title(points: list[Entry], budget: str) -> str:
    return budget if ":" in budget else f"{100 * _removed(points, budget):.1f} % removed"


def _draw(
    path: Path,
    title: str,
    points: list[Entry],
    scope: str,
    dense: Entry,
    lines: dict[tuple[str, str], str],
    log: bool,
) -> None:
    """The increase against the sparsity of some methods, labelled at the ends of their lines.

    Only points with the calibration set of most points are drawn, so that a line joins nothing but
    sparsities.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "study"  # the same file for the same results
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    main = max(_grouped(points, "calibration", "samples").values(), key=len)
    for (method, refit), label in lines.items():
        own = [
            p
            for p in main
            if (p["method"], p["refit"], p["scope"]) == (method, refit, scope)
            and ":" not in p["budget"]
        ]
        line = sorted((100 * p["sparsity"], *increase(p, dense)) for p in own)
        drawn = axes.errorbar(
            *zip(*[(x, y) for x, y, _ in line], strict=True),
            [e for *_, e in line],
            fmt="o-",
            markersize=4,
        )
        end = line[-1][:2]
        axes.annotate(
            label,
            end,
            (8, 0),
            textcoords="offset points",
            va="center",
            color=drawn[0].get_color(),
            weight="bold",
        )
    axes.set(
        xlabel="weights set to zero, %",
        ylabel="increase of the perplexity, %",
        title=title,
        yscale="log" if log else "linear",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.22 if log else 0.18)
    axes.set_xticks([40, 50, 60, 70])
    if not log:
        axes.set_ylim(0)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _grouped(entries: list[Entry], *keys: str) -> dict[tuple[Any, ...], list[Entry]]:
    groups: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[tuple(entry[key] for key in keys)].append(entry)
    return groups


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
