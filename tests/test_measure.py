"""Measures: the effective numbers of a model's rows are those of prune and of the oracle, and no
weights are written.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import oracle
import pytest
from conftest import Run
from safetensors.torch import load_file, save_file

from emp_llm import measure, prune
from emp_llm.records.run_report import Measure
from emp_llm.reporting.run_tables import measure_table

Models = Callable[[str], Path]
Record = dict[str, Any]


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_measures_are_what_prune_reports(
    models: Models, norms: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """Bit for bit for every criterion and order, also for experts that are scored by magnitude."""
    source = models(family)
    before = oracle.digest(models(family))
    common = {"targets": "all-linear", "activations": norms(family)}
    record = measure(source, output=tmp_path / "m.json", orders="1,2", **common)
    assert json.loads((tmp_path / "m.json").read_text()) == record.as_dict()
    assert oracle.digest(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
    found = {(entry["criterion"], entry["order"]): entry for entry in record["measures"]}
    assert list(found) == [
        (criterion, order) for criterion in ("magnitude", "wanda") for order in (1.0, 2.0)
    ]
    for (criterion, order), entry in found.items():
        method = f"emp-{criterion}"
        report = prune(
            source, output=tmp_path / "out", method=method, order=order, overwrite=True, **common
        )  # type: ignore[arg-type]
        for key in ("targets", "matrices", "warnings"):
            assert entry[key] == report[key], (criterion, order, key)


def test_numbers_are_the_oracles(tiny_llama: Path, llama_norms: Path, tmp_path: Path) -> None:
    source = tiny_llama
    record = measure(source, output=tmp_path / "m.json", orders="1,2", activations=llama_norms)
    held = oracle.load_norms(llama_norms)
    for entry in record["measures"]:
        for layer, matrix in entry["matrices"].items():
            weights = oracle.weight(source, matrix["tensor"])
            scores = oracle.scores(weights, held[layer] if entry["criterion"] == "wanda" else None)
            numbers = [oracle.effective(row, entry["order"]) for row in scores]
            assert list(matrix["n_eff"].values) == pytest.approx(
                list(np.quantile(numbers, [0, 0.25, 0.5, 0.75, 1]))
            )
            assert matrix["n_eff_mean"] == pytest.approx(np.mean(numbers))
            if entry["order"] == 2:
                assert matrix["s_eff_mean"] == pytest.approx(
                    np.mean([oracle.mass(row) for row in scores])
                )
                assert matrix["s_eff_bound"]["min"] == pytest.approx(
                    min(oracle.mass_bound(row) for row in scores)
                )
            else:
                assert matrix["s_eff_bound"] is None


def test_deep_models_fit_the_table() -> None:
    """Thirty blocks in eight columns; each is the mean over the rows of its blocks."""
    spread = {"min": 10.0, "q1": 20.0, "median": 25.0, "q3": 30.0, "max": 40.0}
    matrices = {
        f"{block}.{role}": {
            **{
                "role": role,
                "block": block,
                "rows": 4,
                "columns": 100,
                "kept": 200,
                "kept_fraction": spread,
            },
            **{"group_size": 100, "n_eff": spread, "n_eff_mean": float(block), "s_eff_mean": 0.8},
        }
        for block in range(30)
        for role in ("up", "down")
    }
    targets = {"sparsity_of_targets": 0.5, "weights": 1000}
    entry = {"criterion": "wanda", "order": 1.0, "matrices": matrices, "targets": targets}
    record = msgspec.convert(
        {"source": {"model": "m", "revision": None}, "measures": [entry]}, Measure
    )
    table = measure_table(record)
    head, _, up, down, last = table.splitlines()
    assert head.split()[-16:-8] == [
        "0-3",
        "4-7",
        "8-11",
        "12-15",
        "16-19",
        "20-23",
        "24-26",
        "27-29",
    ]
    shares = ["1.50", "5.50", "9.50", "13.50", "17.50", "21.50", "25.00", "28.00"]
    assert up.split() == [
        "up",
        "x",
        "30",
        *shares,
        "14.50",
        "10.00",
        "25.00",
        "40.00",
        "0.800",
        "-",
    ]
    assert down.split()[3:] == up.split()[3:]
    assert "50.00 %" in last


def test_from_the_command_line(tiny_llama: Path, text: Path, command: Run, tmp_path: Path) -> None:
    line = [
        f"measure --samples 4 --seqlen 64 --output m.json --model {tiny_llama} "
        f"--calibration {text}",
    ]
    done = command(*line)
    for words in ("wanda, order 2", "mlp.down_proj x 2", "wanda, order 2: removed % at beta"):
        assert words in done.stdout
    before = (tmp_path / "m.json").read_bytes()
    record = json.loads(before)
    assert (record["format"], record["calibration"]["tokens"]) == ("emp-llm measure 3", 256)
    again = command(*line, code=2)
    assert "it exists; name another file, or add --overwrite" in again.stderr
    assert (tmp_path / "m.json").read_bytes() == before
    magnitude = measure(
        tiny_llama,
        output=tmp_path / "m2.json",
        criteria="magnitude",
        calibration="no such text",
    )
    assert magnitude.calibration is None
    assert [entry.criterion for entry in magnitude.measures] == ["magnitude"]


def with_a_row_of_zeros(source: Path, folder: Path) -> Path:
    """A copy of the tiny Llama; a row of zeros keeps all its weights at any beta."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("1.mlp.up_proj.weight"):
                tensors[name][3] = 0
        save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_curve_is_what_prune_removes(
    models: Models, norms: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """To the weight, for every group and order, in measures and in dry runs; with experts scored
    by magnitude.
    """
    source = (
        with_a_row_of_zeros(models(family), tmp_path / "model")
        if family == "llama"
        else models(family)
    )
    common = {"activations": norms(family)}
    betas, orders = ("1.7,0.02,1,40,1", "1,2") if family == "llama" else ("0.8", "2")
    record = measure(source, output=tmp_path / "m.json", orders=orders, betas=betas, **common)
    assert [point.beta for point in record.measures[0].curve] == (
        [0.02, 1, 1.7, 40] if family == "llama" else [0.8]
    )
    recipes = [
        ({"method": f"emp-{entry.criterion}", "order": entry.order}, entry.curve)
        for entry in record.measures
    ]
    recipe: Record
    for recipe in (
        {"method": "emp-wanda"},
        {"method": "emp-wanda", "group": "matrix"},
        {"method": "emp-magnitude", "group": "matrix", "order": 0.5},
        {"method": "emp-magnitude", "group": "all"},
        {"method": "emp-magnitude", "neff_dtype": "bfloat16"},
    )[: 5 if family == "llama" else 1]:
        plan = prune(source, beta=1.7, dry_run=True, **recipe, **common)
        assert [point.beta for point in plan.curve if point.beta > 1.5] == [1.7, 1.75, 2]
        recipes.append((recipe, [point for point in plan.curve if point.beta in (0.5, 1.7)]))
    for recipe, curve in recipes:
        for point in curve:
            report = prune(
                source, beta=point.beta, output=tmp_path / "out", overwrite=True, **recipe, **common
            )
            for name in ("kept", "sparsity_of_targets", "sparsity_of_all_parameters"):
                assert point[name] == report.targets[name], (recipe, point.beta)
