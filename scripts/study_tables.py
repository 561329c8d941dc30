"""The tables and the figures of `study_methods.py`: increases of the perplexity over the dense model, with paired errors."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
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
_DRAWN = (
    *((method, refit) for refit in ("", "equal") for method in ("wanda", "sparsegpt", "emp-relative")),
    ("emp-admm", "equal"),
)
_ENOUGH = 3  # points of a column of which the best is marked


def write_tables(folder: Path, results: list[Path]) -> None:
    """Write `tables.md` and one figure for each model into a folder.

    Args:
        folder: created if missing.
        results: files of `study_methods.py`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = [json.loads(line) for path in results for line in path.read_text(encoding="utf-8").splitlines()]
    parts = []
    for (model, text), own in _grouped(entries, "model", "text").items():
        dense = next(entry for entry in own if "method" not in entry)
        parts.append(f"## {model}\n\nDense perplexity on {text}: {math.exp(_mean(dense['losses'])):.3f}.")
        points = [entry for entry in own if "method" in entry]
        for (scope, calibration, samples), members in _grouped(points, "scope", "calibration", "samples").items():
            about = f"{'MLP layers' if scope == 'mlp' else 'All linear layers'}, {samples} sequences of {calibration}"
            parts.append(f"### {about}\n\n{markdown_table(_rows(members, dense))}")
        _draw(folder / f"{_slug(model)}.svg", model, [p for p in points if p["scope"] == "mlp"], dense)
    (folder / "tables.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def increase(entry: Entry, dense: Entry) -> tuple[float, float]:
    """The increase of the perplexity over the dense model in percent, and its paired standard error."""
    changes = [one - other for one, other in zip(entry["losses"], dense["losses"], strict=True)]
    mean, count = _mean(changes), len(changes)
    error = math.sqrt(sum((change - mean) ** 2 for change in changes) / (count - 1) / count)
    return 100 * math.expm1(mean), 100 * math.exp(mean) * error


def _rows(points: list[Entry], dense: Entry) -> Rows:
    """One row for each method and refit, one column for each budget. The smallest increase of a column is bold."""
    budgets = sorted({p["budget"] for p in points}, key=lambda b: (":" in b, _removed(points, b)))
    found = {(p["method"], p["refit"], p["budget"]): increase(p, dense) for p in points}
    by_budget = {b: [value for (_, _, budget), (value, _) in found.items() if budget == b] for b in budgets}
    best = {b: min(values) for b, values in by_budget.items() if len(values) >= _ENOUGH}
    rows = [["method", "weights", *(_title(points, budget) for budget in budgets)]]
    for refit, words in _REFITS.items():
        for method, name in _NAMES.items():
            cells = []
            for budget in budgets:
                value = found.get((method, refit, budget))
                cell = "" if value is None else f"{value[0]:+.2f} ± {value[1]:.2f} %"
                cells.append(f"**{cell}**" if value is not None and value[0] == best.get(budget) else cell)
            if any(cells):
                rows.append([name, words or "kept", *cells])
    return rows


def _removed(points: list[Entry], budget: str) -> float:
    return next(float(p["sparsity"]) for p in points if p["budget"] == budget)


def _title(points: list[Entry], budget: str) -> str:
    return budget if ":" in budget else f"{100 * _removed(points, budget):.1f} % removed"


def _draw(path: Path, model: str, points: list[Entry], dense: Entry) -> None:
    """The increase against the sparsity, for the main methods."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "study"  # the same file for the same results
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for method, refit in _DRAWN:
        own = [p for p in points if (p["method"], p["refit"]) == (method, refit) and ":" not in p["budget"]]
        line = sorted((100 * p["sparsity"], *increase(p, dense)) for p in own)
        if line:
            style = "--" if refit else "-"
            label = f"{method}, {_REFITS[refit]}" if refit else method
            axes.errorbar(*zip(*[(x, y) for x, y, _ in line], strict=True), [e for *_, e in line], fmt=f"o{style}", label=label)
    axes.set(xlabel="weights of the MLP layers removed, %", ylabel="increase of the perplexity, %", title=model, yscale="log")
    axes.legend()
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


def _slug(name: str) -> str:
    return "".join(_characters(name.lower())).strip("-")


def _characters(name: str) -> Iterator[str]:
    return (character if character.isalnum() else "-" for character in name)
