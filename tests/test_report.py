"""The report: series against numbers worked out by other means, files that open, and input that cannot be."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from PIL import Image
from safetensors.torch import load_file

from emp_llm import effective_mass, effective_number
from emp_llm.models.errors import UserError
from emp_llm.prune import prune
from emp_llm.report import report
from emp_llm.services.comparison import Value
from emp_llm.services.records import Spread, by_role_and_block, pooled
from emp_llm.services.runs import read_points
from emp_llm.services.series import (
    boxes,
    change_of,
    curves,
    differences,
    grids,
    masses,
    paired_stderr,
)
from emp_llm.services.studies import Study, studies

HOSTILE = "<script>alert('x')</script> $\\frac{$ & |a|_b_\x00\u202e\"quoted\""


@pytest.fixture(scope="module")
def runs(models: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the tiny Llama: EMP by both criteria, at two β by magnitude, and uniform baselines of the same totals."""
    folder = tmp_path_factory.mktemp("runs")
    suite = folder / "suite.toml"
    (folder / "judge.txt").write_text(text.read_text()[:3000])
    suite.write_text('[perplexity]\nfile = "judge.txt"\nseqlen = 64\n')
    common: dict[str, Any] = {"model": str(models("llama")), "device_map": "cpu", "evaluate": f"{suite}"}
    given = {"calibration": str(text), "samples": 4, "seqlen": 64}
    prune(**common, output=folder / "emp", method="emp-magnitude")
    prune(**common, output=folder / "emp-0.5", method="emp-magnitude", beta=0.5)
    prune(**common, output=folder / "uniform", method="magnitude", match=folder / "emp")
    prune(**common, output=folder / "uniform-0.5", method="magnitude", match=folder / "emp-0.5")
    prune(**common, output=folder / "half", method="magnitude", sparsity=0.5)
    prune(**common, **given, output=folder / "wanda", method="emp-wanda")
    return folder


NAMES = ("emp", "emp-0.5", "uniform", "uniform-0.5", "half", "wanda")


def study_of(runs: Path, *names: str) -> Study:
    (study,) = studies(read_points([runs / name for name in names or NAMES]))
    return study


def report_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "emp_report.json").read_text())
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def test_heat_map_boxes_and_masses_are_those_of_the_weights(runs: Path, models: Callable[[str], Path]) -> None:
    study = study_of(runs, "emp")
    dense, pruned = weights_of(models("llama")), weights_of(runs / "emp")
    ((grid,), (kept,), (held,)) = grids(study), boxes(study), masses(study)
    assert grid.label == "Magnitude"
    assert grid.roles == ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert grid.blocks == (0, 1)
    for row, role in enumerate(grid.roles):
        for column, block in enumerate(grid.blocks):
            name = f"model.layers.{block}.{role}.weight"
            expected = float(effective_number(dense[name]).mean()) / dense[name].shape[1]
            assert grid.values[row][column] == pytest.approx(expected, rel=1e-12)
            fractions = (pruned[name] != 0).double().mean(1)
            quarters = torch.quantile(fractions, torch.tensor([0, 0.25, 0.5, 0.75, 1]).double())
            assert kept.spreads[role, block].values == pytest.approx(quarters.tolist())
            (cell,) = (m for m in held.matrices if (m.role, m.block) == (role, block))
            assert cell.s_eff_mean == pytest.approx(float(effective_mass(dense[name]).mean()), rel=1e-12)
            assert cell.bound is not None
            assert cell.bound < cell.s_eff_mean


def test_curves_hold_each_method_and_the_baseline_stands_at_the_beta_of_its_match(runs: Path) -> None:
    study = study_of(runs)
    (suite,) = study.suites
    (measure,) = suite.measures
    found = {curve.label: curve for curve in curves(study, suite, measure)}
    assert set(found) == {"EMP-magnitude", "magnitude, uniform rows", "EMP-Wanda"}
    uniform = found["magnitude, uniform rows"].dots
    assert [dot.name for dot in uniform] == sorted(
        ("uniform", "half", "uniform-0.5"), key=lambda n: report_of(runs / n)["targets"]["sparsity_of_targets"]
    )
    assert {dot.name: dot.beta for dot in uniform} == {"uniform": 1.0, "half": None, "uniform-0.5": 0.5}
    for curve in found.values():
        for dot in curve.dots:
            told = report_of(runs / dot.name)
            assert dot.value == told["evaluation"]["pruned"]["perplexity"]["perplexity"]
            assert dot.sparsity == told["targets"]["sparsity_of_targets"]
    assert suite.dense is not None
    assert suite.dense.values[measure].value == report_of(runs / "emp")["evaluation"]["dense"]["perplexity"]["perplexity"]


def test_differences_are_of_equal_totals_with_the_error_of_paired_blocks(runs: Path) -> None:
    study = study_of(runs)
    found = {each.point.name: each for each in differences(study, study.suites[0])}
    assert {name: each.baseline.name for name, each in found.items()} == {"emp": "uniform", "emp-0.5": "uniform-0.5"}
    for name, each in found.items():
        first, second = (report_of(runs / n)["evaluation"]["pruned"]["perplexity"] for n in (name, each.baseline.name))
        ratio = first["perplexity"] / second["perplexity"]
        assert each.change == pytest.approx(100 * (ratio - 1))
        assert each.better == (ratio < 1)
        losses = [torch.tensor(entry["block_losses"], dtype=torch.float64) for entry in (first, second)]
        assert math.exp(
            float(losses[0][:-1].sum() * 64 + losses[0][-1] * (first["tokens"] - 64 * (len(losses[0]) - 1))) / first["tokens"]
        ) == pytest.approx(first["perplexity"], rel=1e-6)
        whole = losses[0][:-1] - losses[1][:-1]  # the last block is a fragment: of little weight
        assert each.stderr == pytest.approx(100 * ratio * float(whole.std()) / math.sqrt(len(whole)), rel=0.1)


def test_paired_error_by_hand() -> None:
    first, second = ((1.0, 10), (2.0, 10), (4.0, 10)), ((1.0, 10), (1.0, 10), (2.0, 10))
    # differences 0, 1, 2: mean 1, standard deviation 1, error 1 / sqrt(3)
    assert paired_stderr(first, second) == pytest.approx(1 / math.sqrt(3))
    assert paired_stderr(first, second[:2]) is None
    assert paired_stderr(first[:1], second[:1]) is None
    assert change_of("t acc", Value(50, 3.0), Value(48, 4.0)) == (2, 5.0)
    assert change_of("t acc", Value(50, 3.0), Value(48)) == (2, None)
    assert change_of("word_perplexity", Value(11), Value(10)) == (pytest.approx(10), None)


def test_the_mean_of_tasks_has_the_error_of_their_means(runs: Path, tmp_path: Path) -> None:
    told = report_of(runs / "emp")
    counts = {"original": 10, "effective": 10}
    for which in ("dense", "pruned"):
        told["evaluation"][which]["tasks"] = {
            name: {"results": {name: {"acc,none": 0.5, "acc_stderr,none": error}}, "n-samples": {name: counts}}
            for name, error in (("first", 0.03), ("second", 0.04))
        }
    (tmp_path / "emp_report.json").write_text(json.dumps(told))
    (study,) = studies(read_points([tmp_path]))
    assert study.points[0].judgements[0].values["mean acc of 2"] == Value(50.0, pytest.approx(2.5))  # type: ignore[arg-type]


def test_populations_are_pooled() -> None:
    flat = Spread(0.0, 0.25, 0.5, 0.75, 1.0)
    assert pooled([flat], [3]) is flat
    assert pooled([flat, flat], [1, 5]).values == pytest.approx(flat.values, abs=0.01)
    low, high = Spread(0.0, 0.1, 0.2, 0.3, 0.4), Spread(0.6, 0.7, 0.8, 0.9, 1.0)
    both = pooled([low, high], [1, 1])
    assert (both.min, both.max) == (0.0, 1.0)
    assert both.q1 == pytest.approx(0.2, abs=0.01)  # a quarter of both is half of the lower one
    assert both.q3 == pytest.approx(0.8, abs=0.01)
    assert pooled([low, high], [9, 1]).median == pytest.approx(0.4 * 5 / 9, abs=0.01)


def test_experts_are_one_cell_a_block_and_role(models: Callable[[str], Path], tmp_path: Path) -> None:
    prune(str(models("mixtral")), tmp_path / "run", "emp-magnitude", device_map="cpu")
    entries = report_of(tmp_path / "run")["matrices"].values()
    (study,) = studies(read_points([tmp_path / "run"]))
    ((grid,), (kept,)) = grids(study), boxes(study)
    assert len(entries) == 24
    assert len(grid.roles) * len(grid.blocks) == 6
    for row, role in enumerate(grid.roles):
        for column, block in enumerate(grid.blocks):
            own = [e for e in entries if (e["role"], e["block"]) == (role, block)]
            assert len(own) == 4
            assert grid.values[row][column] == pytest.approx(sum(e["n_eff_mean"] / e["group_size"] for e in own) / 4)
            assert kept.spreads[role, block].min == min(e["kept_fraction"]["min"] for e in own)
            assert kept.spreads[role, block].max == max(e["kept_fraction"]["max"] for e in own)
    cells = by_role_and_block(study.points[0].matrices)
    assert sum(cell.weights for cell in cells.values()) == sum(e["rows"] * e["columns"] for e in entries)


def test_models_and_targets_are_never_in_one_curve(runs: Path, models: Callable[[str], Path], tmp_path: Path) -> None:
    prune(str(models("qwen2")), tmp_path / "other", "emp-magnitude", device_map="cpu")
    prune(str(models("llama")), tmp_path / "attention", "emp-magnitude", device_map="cpu", targets="attention")
    found = studies(read_points([runs / "emp", tmp_path / "other", tmp_path / "attention", runs / "uniform"]))
    assert [(study.title, [point.name for point in study.points]) for study in found] == [
        ("llama, mlp", ["emp", "uniform"]),
        ("llama, attention", ["attention"]),
        ("qwen2", ["other"]),
    ]


def test_a_sweep_a_measure_and_results_are_read(runs: Path, tmp_path: Path) -> None:
    whole = study_of(runs)
    sweep = make_sweep(runs, tmp_path / "sweep")
    (study,) = studies(read_points([sweep]))
    assert [point.name for point in study.points] == ["emp", "emp-0.5", "uniform", "uniform-0.5", "wanda"]
    of = {point.id: point.name for point in study.points}
    assert {p.name: (of[p.baseline_of or ""], p.match) for p in study.points if p.baseline_of} == {
        "uniform": ("emp", "total"),
        "uniform-0.5": ("emp-0.5", "matrix"),
    }
    assert {curve.label for curve in curves(study, study.suites[0], study.suites[0].measures[0])} == {
        "EMP-magnitude",
        "magnitude, uniform rows",
        "magnitude, same total per matrix",
        "EMP-Wanda",
    }
    changes = [sorted(each.change for each in differences(s, s.suites[0])) for s in (study, whole)]
    assert changes[0] == changes[1]
    told = report_of(runs / "emp")
    measures = {"format": "emp-llm measure 1", "source": told["source"], "measures": []}
    measures["measures"] = [{"criterion": "magnitude", "order": 1.0, "matrices": told["matrices"], "targets": told["targets"]}]
    (tmp_path / "measure.json").write_text(json.dumps(measures))
    (study,) = studies(read_points([sweep, tmp_path / "measure.json"]))
    assert [grid.label for grid in grids(study)] == ["Magnitude", "Wanda", "Magnitude, order 1"]
    assert len(study.pruned) == 5


def test_results_join_the_run_they_judge(runs: Path, tmp_path: Path) -> None:
    told = report_of(runs / "emp")
    pruned = {"of": told["source"]["model"], **told["recipe"], "sparsity_of_targets": told["targets"]["sparsity_of_targets"]}
    entry = told["evaluation"]["pruned"]["perplexity"] | {"perplexity": 123.0, "block_losses": []}
    result = {
        "model": "emp",
        "revision": None,
        "pruned": pruned,
        "suite": "mine",
        "made_by": {"text": {"file": "x"}, "dtype": "auto"},
    }
    dense = result | {"model": told["source"]["model"], "pruned": None, "perplexity": entry | {"perplexity": 100.0}}
    made_of = {"sha256_of_samples": told["source"]["sha256_of_samples"], "sha256_of_config_and_tokenizer": "0"}
    dense["made_by"] = result["made_by"] | {"model": made_of}
    for name, record in (("pruned", result | {"perplexity": entry}), ("dense", dense)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record | {"complete": True}))
    (study,) = studies(read_points([tmp_path / "dense.json", runs / "emp", tmp_path / "pruned.json"]))
    assert [point.name for point in study.points] == ["emp"]
    (mine,) = (suite for suite in study.suites if suite.name == "mine")
    judged = study.points[0].judged(mine.key)
    assert judged is not None
    assert mine.dense is not None
    assert [next(iter(each.values.values())).value for each in (judged, mine.dense)] == [123.0, 100.0]
    (alone,) = studies(read_points([tmp_path / "pruned.json"]))
    assert [(point.name, point.sparsity, point.matrices) for point in alone.points] == [
        ("pruned", pruned["sparsity_of_targets"], ())
    ]


def make_sweep(runs: Path, folder: Path) -> Path:
    """A sweep's folder of finished runs, as `sweep` writes it."""
    told = report_of(runs / "emp")
    links = {"uniform": ("emp", "total"), "uniform-0.5": ("emp-0.5", "matrix")}
    points = []
    for name in ("emp", "emp-0.5", "uniform", "uniform-0.5", "wanda"):
        (folder / "points" / name).mkdir(parents=True)
        point = report_of(runs / name)
        evaluation = point["evaluation"]["pruned"]
        point["recipe"] |= {"match": None} if name in links else {}
        (folder / "points" / name / "emp_report.json").write_text(json.dumps(point))
        of, match = links.get(name, (None, None))
        points.append({"name": name, "baseline_of": of, "match": match, "evaluation": evaluation})
    sweep = {"format": "emp-llm sweep 1", "suite": "mine", "dense": told["evaluation"]["dense"], "points": points}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


class Tags(HTMLParser):
    """Opens and closes what a page does, and notes what it would fetch or run."""

    VOID = ("meta", "br", "img", "use", "path", "link", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.seen: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:image/png;base64,")):
                self.fetched.append(value or "")
            assert not name.startswith("on")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def check_page(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert tags.open == []
    assert tags.fetched == []
    assert "script" not in tags.seen
    assert len(tags.ids) == len(set(tags.ids))
    return tags


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("page") / "report"
    report([runs / name for name in NAMES], output)
    return output


def test_files_open_and_the_page_needs_nothing_else(page: Path, runs: Path) -> None:
    figures = {path.stem for path in (page / "figures").iterdir()}
    assert figures == {"llama-perplexity-blocks-of-64", "llama-n-eff", "llama-kept", "llama-s-eff"}
    for name in figures:
        root = ElementTree.parse(page / "figures" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        with Image.open(page / "figures" / f"{name}.png") as image:
            image.load()
            assert image.width == 1200
            assert len(image.getcolors(1 << 24) or []) > 10
        for file in (page / "figures").glob(f"{name}.*"):
            assert file.stat().st_size < 150_000
        assert f"(figures/{name}.svg)" in (page / "report.md").read_text()
    tags = check_page(page / "report.html")
    assert {"svg", "table", "h1", "figure"} <= tags.seen
    assert (page / "report.html").stat().st_size < 1_000_000
    with (page / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    for row in rows[1:]:
        told = report_of(runs / row["point"])
        assert float(row["value"]) == told["evaluation"]["pruned"]["perplexity"]["perplexity"]
        assert float(row["sparsity_of_targets"]) == told["targets"]["sparsity_of_targets"]
    with (page / "matrices.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6 * 6
    with (page / "differences.csv").open() as file:
        gaps = list(csv.DictReader(file))
    assert [(row["point"], row["baseline"]) for row in gaps] == [("emp-0.5", "uniform-0.5"), ("emp", "uniform")]
    for row in gaps:
        assert float(row["change"]) == pytest.approx(100 * (float(row["value"]) / float(row["baseline_value"]) - 1))


def test_the_same_input_is_the_same_bytes(page: Path, runs: Path, run: Run, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "1234"}
    line = [sys.executable, "-m", "emp_llm.report", *(str(runs / name) for name in NAMES), "--output", "again"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "better at" in done.stdout
    files = sorted(path.relative_to(page) for path in page.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*") if path.is_file())
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (page / file).read_bytes(), file
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_hostile_names_are_shown_and_do_nothing(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    told = report_of(runs / "emp")
    told["source"]["model"] = told["evaluation"]["suite"] = HOSTILE
    told["recipe"]["targets"] = [HOSTILE]
    for entry in told["matrices"].values():
        entry["role"] = HOSTILE * 20 + entry["role"]
    (folder / "emp_report.json").write_text(json.dumps(told))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of matplotlib: no room, unknown letters
        report([folder], tmp_path / "out", title=HOSTILE)
    check_page(tmp_path / "out" / "report.html")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x00" not in page
    assert "\u202e" not in page
    for figure in (tmp_path / "out" / "figures").glob("*.svg"):
        ElementTree.parse(figure)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "<script" not in text.replace("\\<script", "")


def test_without_matplotlib_the_extra_is_named_and_tables_work(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'emp-llm\[plots\]'"):
        report([runs / "emp"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report([runs / "emp"], tmp_path / "out", no_plots=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "differences.csv",
        "matrices.csv",
        "points.csv",
        "report.html",
        "report.json",
        "report.md",
    ]


def test_an_older_report_is_replaced_only_when_asked(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report([runs / "emp"], out, no_plots=True)
    (out / "points.csv").write_text("older")
    with pytest.raises(UserError, match="--overwrite"):
        report([runs / "emp"], out, no_plots=True)
    assert (out / "points.csv").read_text() == "older"
    report([runs / "emp"], out, no_plots=True, overwrite=True)
    assert (out / "points.csv").read_text() != "older"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="something else is there"):
            report([runs / "emp"], mine, no_plots=True, overwrite=overwrite)
    assert (mine / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        told = report_of(folder)
        change(told)
        (folder / "emp_report.json").write_text(json.dumps(told))

    return apply


def first(told: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(iter(told["matrices"].values()))
    return entry


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        ("neither sweep.json nor emp_report.json", lambda folder: (folder / "emp_report.json").unlink()),
        ("cannot be read as JSON", lambda folder: (folder / "emp_report.json").write_text("{")),
        ("it is not the output of prune", lambda folder: (folder / "emp_report.json").write_text("{}")),
        ("kept_fraction: q1 must be a finite number", broken(lambda r: first(r)["kept_fraction"].update(q1="much"))),
        ("q1 must be a finite number, got NaN", broken(lambda r: first(r)["kept_fraction"].update(q1=math.nan))),
        ("kept_fraction must be quartiles in ascending", broken(lambda r: first(r)["kept_fraction"].update(q1=1.0))),
        ("max must be between 0 and 1", broken(lambda r: first(r)["kept_fraction"].update(max=7.0))),
        ("n_eff_mean must be between 0 and group_size", broken(lambda r: first(r).update(n_eff_mean=1e300))),
        ("rows must be a whole number", broken(lambda r: first(r).update(rows=-1))),
        ("group_size must be at least 1", broken(lambda r: first(r).update(group_size=0))),
        ("role must be text", broken(lambda r: first(r).update(role=None))),
        ("matrices: it must be a JSON object", broken(lambda r: r.update(matrices=[1]))),
        ("method must be text", broken(lambda r: r["recipe"].pop("method"))),
        ("sparsity_of_targets", broken(lambda r: r["targets"].pop("sparsity_of_targets"))),
        ("not what a suite measures", broken(lambda r: r["evaluation"]["pruned"]["perplexity"].pop("block_length"))),
        ("must be a number", broken(lambda r: r["evaluation"]["pruned"]["perplexity"].update(perplexity="low"))),
    ],
)
def test_bad_runs_are_a_sentence(runs: Path, tmp_path: Path, says: str, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(runs / "emp" / "emp_report.json", folder)
    spoil(folder)
    with pytest.raises(UserError, match=says) as caught:
        report([folder], tmp_path / "out", no_plots=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("name must be the name of a folder", lambda sweep: sweep["points"][0].update(name="../../etc")),
        ("its report is missing", lambda sweep: sweep["points"][0].update(name="elsewhere")),
        ("baseline_of must be null or the name", lambda sweep: sweep["points"][2].update(baseline_of="nobody")),
        ("match must be null or one of total, matrix", lambda sweep: sweep["points"][2].update(match="row")),
        ("points must be a list", lambda sweep: sweep.update(points={})),
    ],
)
def test_bad_sweeps_are_a_sentence(runs: Path, tmp_path: Path, says: str, change: Callable[[dict[str, Any]], None]) -> None:
    folder = make_sweep(runs, tmp_path / "sweep")
    sweep = json.loads((folder / "sweep.json").read_text())
    change(sweep)
    (folder / "sweep.json").write_text(json.dumps(sweep))
    with pytest.raises(UserError, match=says):
        report([folder], tmp_path / "out", no_plots=True)


def test_wrong_arguments_from_the_shell(run: Run) -> None:
    missing = run("report", "nowhere")
    assert missing.returncode == 2
    assert "nowhere: there is no such file or folder" in missing.stderr
    assert "Traceback" not in missing.stderr
