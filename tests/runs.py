"""Runs for the tests of reports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emp_llm import prune, verify
from emp_llm.checkpoint.files import own_line
from emp_llm.reporting.studies import Point, Study, read_inputs, studies


def make_runs(models: Callable[[str], Path], text: Path, folder: Path) -> Path:
    """Runs of the tiny Llama: EMP by both criteria, by magnitude at two β, and uniform baselines
    with the same totals.
    """
    suite = folder / "suite.toml"
    (folder / "heldout.txt").write_text(text.read_text()[:3000])
    suite.write_text('[perplexity]\nfile = "heldout.txt"\nseqlen = 64\n')
    common = {"model": models("llama"), "device_map": "cpu", "evaluate": f"{suite}"}
    given = {"calibration": str(text), "samples": 4, "seqlen": 64}
    prune(**common, output=folder / "emp", method="emp-magnitude")
    common["baseline"] = folder / "emp"  # the dense model is measured once
    prune(**common, output=folder / "emp-0.5", method="emp-magnitude", beta=0.5)
    prune(**common, output=folder / "uniform", method="magnitude", match=folder / "emp")
    prune(**common, output=folder / "uniform-0.5", method="magnitude", match=folder / "emp-0.5")
    prune(**common, output=folder / "half", method="magnitude", sparsity=0.5)
    prune(**common, **given, output=folder / "wanda", method="emp-wanda")
    return folder


NAMES = ("emp", "emp-0.5", "uniform", "uniform-0.5", "half", "wanda")


def read_points(paths: list[Path]) -> list[Point]:
    return read_inputs(paths)[0]


def study_of(runs: Path, *names: str, against: str | None = None) -> Study:
    (study,) = studies(read_points([runs / name for name in names or NAMES]), against)
    return study


def report_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "emp_report.json").read_text())


def save_run(folder: Path, values: dict[str, Any]) -> Path:
    """A run with this report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "emp_report.json").write_text(json.dumps(values))
    return folder


def results_of(report: dict[str, Any], perplexity: float) -> dict[str, Any]:
    """A results file for the checkpoint of a run, with a suite of its own: "mine"."""
    measured = report["evaluation"]["pruned"]["perplexity"] | {
        "perplexity": perplexity,
        "block_losses": [],
    }
    sparsity = report["targets"]["sparsity_of_targets"]
    return {
        "format": "emp-llm results 4",
        "model": "pruned",
        "revision": None,
        "pruned": {
            "of": report["source"]["model"],
            "recipe": report["recipe"],
            "sparsity_of_targets": sparsity,
        },
        "suite": "mine",
        "made_by": {"model": {}, "text": {"file": "x"}, "dtype": "auto"},
        "perplexity": measured,
        "complete": True,
    }


def make_sweep(runs: Path, folder: Path) -> Path:
    """The folder of a sweep, as `sweep` writes it, built from finished runs."""
    report = report_of(runs / "emp")
    first = {"format": "emp-llm sweep 4", "suite": "mine", "made_by": {"model": {}}}
    lines = [first | {"source": report["source"], "dense": report["evaluation"]["dense"]}]
    links = {"uniform": ("emp", "total"), "uniform-0.5": ("emp-0.5", "matrix")}
    for name in ("emp", "emp-0.5", "uniform", "uniform-0.5", "wanda"):
        point = report_of(runs / name)
        of, match = links.get(name, (None, None))
        if of is not None:
            point["recipe"]["counts"] = {"match": {"run": "elsewhere", "by": match}}
        about = {"name": name, "recipe": point["recipe"], "baseline_of": of}
        lines.append(point | {"point": about, "masks": ""})
    folder.mkdir()
    (folder / "sweep.jsonl").write_bytes(b"".join(map(own_line, lines)))
    return folder


def check_verified(folder: Path, source: object) -> None:
    """`verify` finds what the recipe makes of the source, and nothing else."""
    assert verify(folder, source=str(source)).differences == []
