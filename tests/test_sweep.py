"""Sweeps: every point equals the checkpoint that prune writes, measured alone; finished parts are not repeated."""

import gc
import json
import math
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import Run
from launch import launch
from safetensors.torch import load_file, save_file

from emp_llm.common.errors import UserError
from emp_llm.evaluation import evaluate
from emp_llm.evaluation.evaluate import measure, prepare_suite
from emp_llm.evaluation.suites import find_suite
from emp_llm.models import loading
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.options.recipe import Recipe
from emp_llm.options.sweep import SweepOptions, plan_points
from emp_llm.prune import prune
from emp_llm.pruning import loaded_model, outcome
from emp_llm.pruning.chosen import targets_of_folder
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.loaded_model import holds_stored_weights, pruned
from emp_llm.pruning.masks import Pruner
from emp_llm.pruning.scores import Scores
from emp_llm.records.base import record_of
from emp_llm.records.sweep import Sweep
from emp_llm.reporting.run_tables import sweep_table
from emp_llm.sweep import SweepFolder, show, sweep
from emp_llm.verify import verify

Models = Callable[[str], Path]
Record = dict[str, Any]


@pytest.fixture(scope="module")
def suite(text: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A suite of one text, 3,000 tokens."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "text.txt").write_text(text.read_text()[:3000])
    (folder / "short.toml").write_text('[perplexity]\nfile = "text.txt"\nseqlen = 100\n')
    return str(folder / "short.toml")


@pytest.fixture(scope="module")
def options(text: Path, suite: str) -> Record:
    """The options that the sweeps of these tests share."""
    calibration = {"calibration": str(text), "samples": 4, "seqlen": 64, "device_map": "cpu"}
    return {"methods": "emp-wanda,magnitude", "betas": "0.5,1", "sparsities": "0.4", "suite": suite} | calibration


def entries(record: Any) -> dict[str, Any]:
    """The points of a sweep as JSON, by name."""
    values = record.as_dict() if isinstance(record, Sweep) else record
    return {point["name"]: point for point in values["points"]}


def report_of(folder: Path, name: str) -> Record:
    report: Record = json.loads((folder / "points" / name / "emp_report.json").read_text())
    return report


def perplexity_of(folder: Path, suite: str, dtype: str = "auto") -> float:
    """The perplexity of a checkpoint that is loaded alone."""
    found = measure(load_model(folder, "cpu", dtype), prepare_suite(find_suite(suite), load_tokenizer(folder)))
    assert found.perplexity is not None
    return found.perplexity.value


def test_points_and_their_baselines() -> None:
    asked = {"methods": "emp-magnitude,wanda", "betas": "1,0.75,1", "orders": "2,1", "sparsities": "0.3", "patterns": "2:4"}
    points = plan_points(SweepOptions(**asked, matched_baselines=True), Recipe())
    assert [point.name for point in points][:4] == [
        "emp-magnitude-beta-1",
        "magnitude-total-as-emp-magnitude-beta-1",
        "magnitude-matrix-as-emp-magnitude-beta-1",
        "emp-magnitude-beta-0.75",
    ]
    assert [point.name for point in points][-2:] == ["wanda-0.3", "wanda-2of4"]
    assert len(points) == len({point.name for point in points}) == 2 * 2 * 3 + 2
    assert "emp-magnitude-order-1-beta-0.75" in {point.name for point in points}
    close = SweepOptions(methods="emp-wanda", betas="1.00000001,1.00000002")
    assert len({point.name for point in plan_points(close, Recipe())}) == 2


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "phi3"])
def test_a_point_measures_what_its_checkpoint_does(
    models: Models, options: Record, suite: str, tmp_path: Path, family: str
) -> None:
    """To the last bit, for experts, Conv1D and fused projections too; and the report is that of prune."""
    source, out = models(family), tmp_path / "sweep"
    before = oracle.digest(source)
    few = {"targets": "all-linear", "betas": "0.75", "patterns": "2:4", "matched_baselines": True}
    record = sweep(source, output=out, **(options | few))
    assert oracle.digest(source) == before
    norms = out / "activations.safetensors"
    assert record.as_dict() == json.loads((out / "sweep.json").read_text())
    assert record["dense"]["perplexity"]["perplexity"] == perplexity_of(source, suite)
    assert len(record["points"]) == 5
    for name, entry in entries(record).items():
        match = out / "points" / entry["baseline_of"] if entry["baseline_of"] else None
        own = {key: entry.get(key) for key in ("method", "beta", "order", "sparsity", "pattern")}
        common = {"targets": "all-linear", "activations": norms, "match": match, "match_by": entry["match"]}
        report = prune(source, output=tmp_path / name, **own, **common).as_dict()  # type: ignore[arg-type, union-attr]
        assert entry["evaluation"]["perplexity"]["perplexity"] == perplexity_of(tmp_path / name, suite), name
        written = report_of(out, name)
        for key in ("targets", "matrices", "warnings", "source"):
            assert written[key] == report[key], (name, key)
        assert written["recipe"] == report["recipe"]
        assert written["device_map"] == "cpu"
        assert written["point"] == {key: value for key, value in entry.items() if key in written["point"]}
        assert written["evaluation"]["pruned"] == entry["evaluation"]
        assert written["evaluation"]["dense"] == record.as_dict()["dense"]
        assert {path.name for path in (out / "points" / name).iterdir()} == {"emp_report.json"}


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"group": "matrix"}, {"group": "all"}])
def test_other_dtypes_and_groups(models: Models, options: Record, suite: str, tmp_path: Path, changes: Record) -> None:
    record = sweep(models("llama"), output=tmp_path / "sweep", **(options | changes))
    for name, entry in entries(record).items():
        own = {key: entry[key] for key in ("method", "beta", "order", "sparsity")} | {"group": changes.get("group", "row")}
        norms = tmp_path / "sweep" / "activations.safetensors"
        report = prune(models("llama"), output=tmp_path / name, activations=norms, **own)  # type: ignore[arg-type]
        assert report.as_dict()["matrices"] == report_of(tmp_path / "sweep", name)["matrices"]
        found = perplexity_of(tmp_path / name, suite, changes.get("dtype", "auto"))
        assert entry["evaluation"]["perplexity"]["perplexity"] == found


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
def test_weights_come_back_bit_for_bit(models: Models, family: str) -> None:
    model = load_model(models(family), "cpu")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    chosen = targets_of_folder(models(family), family, Recipe(targets="all-linear"))
    for recipe in (Recipe(method="magnitude", sparsity=0.9), Recipe(method="emp-magnitude", beta=1.5)):
        scores = Scores(chosen.checkpoint, chosen.targets, recipe)
        with pytest.raises(KeyError), pruned(model, Pruner(scores, counts_of(scores))):  # noqa: PT012
            assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
            assert not holds_stored_weights(model, chosen.checkpoint, chosen.targets)
            raise KeyError("any error ends the sweep")
        for name, weight in model.state_dict().items():
            assert torch.equal(weight.view(torch.int16), before[name].view(torch.int16)), name
        assert holds_stored_weights(model, chosen.checkpoint, chosen.targets)


def test_a_model_that_is_not_its_checkpoint_does_not_fit(models: Models) -> None:
    model = load_model(models("llama"), "cpu")
    chosen = targets_of_folder(models("llama"), "llama", Recipe(method="emp-magnitude"))
    stored = chosen.checkpoint, chosen.targets
    assert holds_stored_weights(model, *stored)
    assert not holds_stored_weights(load_model(models("llama"), "disk"), *stored)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1  # type: ignore[index, union-attr, operator]
    assert not holds_stored_weights(model, *stored)


@pytest.mark.parametrize("keep", [False, True])
def test_offloaded_models_go_through_checkpoints(models: Models, options: Record, tmp_path: Path, keep: bool) -> None:
    offloaded = sweep(models("llama"), output=tmp_path / "disk", **(options | {"device_map": "disk", "keep": keep}))
    loaded = entries(sweep(models("llama"), output=tmp_path / "cpu", **options))
    for name, entry in entries(offloaded).items():
        assert entry["sparsity_of_targets"] == loaded[name]["sparsity_of_targets"]
        found, expected = (e["evaluation"]["perplexity"]["perplexity"] for e in (entry, loaded[name]))
        assert found == pytest.approx(expected, rel=1e-6)
        assert (tmp_path / "disk" / "points" / name / "config.json").exists() == keep
    names = {path.name for path in (tmp_path / "disk").iterdir()}
    assert names == {"sweep.json", "dense.json", "activations.safetensors", "points"}


def test_one_model_at_a_time(models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If every point is loaded from a checkpoint, the model before it is freed first."""
    loaded: list[weakref.ref[Any]] = []

    def load(*given: Any) -> Any:
        assert [model() for model in loaded] == [None] * len(loaded)
        model = load_model(*given)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(loaded_model, "holds_stored_weights", lambda *_: False)
    gc.disable()  # only the sweep frees models
    try:
        sweep(models("llama"), output=tmp_path / "sweep", **(options | {"device_map": "disk"}))
    finally:
        gc.enable()
    assert len(loaded) == 4


def test_kept_checkpoints(models: Models, options: Record, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are complete and pass verify, also for points that were measured before, which are not measured again."""
    source, out = models("mixtral"), tmp_path / "sweep"
    first = sweep(source, output=out, **options)
    monkeypatch.setattr(evaluate, "perplexity", lambda *_, **__: pytest.fail("measured again"))
    assert entries(sweep(source, output=out, keep=True, **options)) == entries(first)
    monkeypatch.undo()
    for name, entry in entries(first).items():
        folder = out / "points" / name
        assert verify(folder, source=source).differences == []
        assert perplexity_of(folder, suite) == entry["evaluation"]["perplexity"]["perplexity"]
        assert report_of(out, name)["evaluation"]["pruned"] == entry["evaluation"]


def test_finished_parts_are_not_done_again(
    models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the calibration, nor the dense model, nor points; more betas add points."""
    source, out = models("llama"), tmp_path / "sweep"
    first = sweep(source, output=out, **options)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert entries(sweep(source, output=out, **options)) == entries(first)
    monkeypatch.undo()
    measured: list[int] = []
    whole = evaluate.perplexity
    monkeypatch.setattr(evaluate, "perplexity", lambda *given, **named: measured.append(1) or whole(*given, **named))
    second = sweep(source, output=out, **(options | {"methods": "emp-wanda", "betas": "2,1", "sparsities": None}))
    assert len(measured) == 1
    assert list(entries(second)) == ["emp-wanda-beta-2", "emp-wanda-beta-1", "emp-wanda-beta-0.5", "magnitude-0.4"]
    assert entries(second)["magnitude-0.4"] == entries(first)["magnitude-0.4"]
    assert second.stages.keys() == first.stages.keys() == {"load", "calibrate", "evaluate dense"}


def kill_at_the_third_measurement() -> None:
    left, whole = [3], evaluate.perplexity

    def counted(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*given, **named)

    evaluate.perplexity = counted


def test_a_killed_sweep_resumes(models: Models, options: Record, tmp_path: Path) -> None:
    source, out = models("llama"), tmp_path / "killed"
    expected = sweep(source, output=tmp_path / "whole", matched_baselines=True, **options)
    (tmp_path / "logs").mkdir()
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    line = ["--model", str(source), "--output", str(out), "--matched-baselines", *words]
    # It is killed while it measures the second point.
    done = launch(1, tmp_path, tmp_path / "logs", "sweep", *line, prepare=kill_at_the_third_measurement)
    assert done.codes == [-signal.SIGKILL], done.error
    assert len(json.loads((out / "sweep.json").read_text())["points"]) == 1
    found = sweep(source, output=out, matched_baselines=True, **options)
    for name, entry in entries(expected).items():
        same = entries(found)[name]
        assert same["masks"] == entry["masks"]
        assert same["evaluation"]["perplexity"]["perplexity"] == entry["evaluation"]["perplexity"]["perplexity"]
    assert not list(out.glob(".*"))
    assert not list((out / "points").glob(".*"))


def test_measurements_of_an_unfinished_point_are_kept(
    models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = models("llama"), tmp_path / "sweep"
    with monkeypatch.context() as patch:
        patch.setattr(outcome, "report_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sweep(source, output=out, **options)
    noted = json.loads((out / "points" / ".emp-wanda-beta-0.5.measures.json").read_text())
    measured = noted["measures"]["perplexity"]["perplexity"]
    seconds = noted["measures"]["perplexity"]["seconds"] = 123.0  # another measurement would change it
    (out / "points" / ".emp-wanda-beta-0.5.measures.json").write_text(json.dumps(noted))
    sweep(source, output=out, **options)
    found = report_of(out, "emp-wanda-beta-0.5")["evaluation"]["pruned"]["perplexity"]
    assert (found["perplexity"], found["seconds"]) == (measured, seconds)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"targets": "attention"}, r"recipe\.targets mlp, this one has attention"),
        ({"limit": 3}, r"limit None, this one has 3"),
        ({"samples": 3}, r"activations\."),
        ({"dtype": "float32"}, r"dtype auto, this one has float32"),
    ],
)
def test_another_sweep_is_refused(models: Models, options: Record, tmp_path: Path, change: Record, named: str) -> None:
    source, out = models("llama"), tmp_path / "sweep"
    first = sweep(source, output=out, **(options | {"methods": "magnitude", "betas": None}))
    sweep(source, output=out, **options)  # a sweep without a calibration can be extended by points that need one
    with pytest.raises(UserError, match=named):
        sweep(source, output=out, **(options | change))
    with pytest.raises(UserError, match=r"model\.identity"):
        sweep(models("gpt2"), output=out, **options)
    assert entries(json.loads((out / "sweep.json").read_text()))["magnitude-0.4"] == entries(first)["magnitude-0.4"]
    path = out / "points" / "magnitude-0.4" / "emp_report.json"
    stored = json.loads(path.read_text())
    stored["evaluation"]["pruned"]["perplexity"]["seconds"] = 123.0  # another measurement changes it
    path.write_text(json.dumps(stored))
    anew = sweep(source, output=out, overwrite=True, **(options | change))
    assert len(anew.points) == 3
    assert json.loads(path.read_text())["evaluation"]["pruned"]["perplexity"]["seconds"] != 123.0


def test_foreign_folders_are_left_alone(models: Models, options: Record, tmp_path: Path) -> None:
    for name, path in (("file", tmp_path / "file"), ("folder", tmp_path / "folder" / "notes.txt")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        with pytest.raises(UserError, match="it exists and is not the folder of a sweep"):
            sweep(models("llama"), output=tmp_path / name, overwrite=True, **options)
        assert path.read_text() == "mine"
    with pytest.raises(UserError, match="it is the input"):
        sweep(models("llama"), output=models("llama") / "sweep", **options)
    killed = tmp_path / "killed"  # while it wrote its first file
    killed.mkdir()
    (killed / ".sweep.json.partial").write_text("{")
    (killed / ".sweep.json.lock").touch()
    with SweepFolder(killed, models("llama"), []).locked():
        assert (killed / "points").is_dir()


def test_a_dry_run_touches_nothing(models: Models, options: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = sweep(models("llama"), output=tmp_path / "out", dry_run=True, keep=True, matched_baselines=True, **options)
    show(plan)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["emp-wanda-beta-0.5", "wanda-total-as-emp-wanda-beta-0.5", "wanda-matrix-as-emp-wanda-beta-0.5"]
    assert lines[7] == "7 points to measure, and the dense model"
    assert lines[8] == "targets: 6 of 14 matrices in blocks"
    assert lines[9].startswith("disk: ")
    assert not list(tmp_path.iterdir())


def test_equal_masks_are_measured_once(
    models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At order 0 all weights that are not zero are kept. With one matrix, both kinds of baseline are the same."""
    measured: list[int] = []
    whole = evaluate.perplexity
    monkeypatch.setattr(evaluate, "perplexity", lambda *given, **named: measured.append(1) or whole(*given, **named))
    only = {"methods": "emp-wanda", "betas": "1", "sparsities": None, "orders": "0,2", "matched_baselines": True}
    targets = {"targets": r"model\.layers\.1\.mlp\.down_proj"}
    record = sweep(models("llama"), output=tmp_path / "sweep", **(options | only | targets))
    found = {name: entry["evaluation"].get("same_masks_as") for name, entry in entries(record).items()}
    assert found == {
        "emp-wanda-order-0-beta-1": "dense",
        "wanda-total-as-emp-wanda-order-0-beta-1": "dense",
        "wanda-matrix-as-emp-wanda-order-0-beta-1": "dense",
        "emp-wanda-beta-1": None,
        "wanda-total-as-emp-wanda-beta-1": None,
        "wanda-matrix-as-emp-wanda-beta-1": "wanda-total-as-emp-wanda-beta-1",
    }
    assert len(measured) == 3


def test_matched_baselines_are_uniform(models: Models, options: Record, tmp_path: Path) -> None:
    """Each row of a matrix loses the same share, rounded down or up; the matrix, or the total, loses as much as by EMP."""
    source, out = models("mixtral"), tmp_path / "sweep"
    sweep(source, output=out, keep=True, matched_baselines=True, **(options | {"methods": "emp-wanda", "sparsities": None}))
    norms = oracle.load_norms(out / "activations.safetensors")
    adaptive = report_of(out, "emp-wanda-beta-1")
    for by in ("total", "matrix"):
        name = f"wanda-{by}-as-emp-wanda-beta-1"
        baseline = report_of(out, name)
        assert baseline["targets"]["kept"] == adaptive["targets"]["kept"]
        shares = set()
        for layer, entry in baseline["matrices"].items():
            if by == "matrix":
                assert entry["kept"] == adaptive["matrices"][layer]["kept"], layer
            kept = oracle.weight(out / "points" / name, entry["tensor"]) != 0
            share = (adaptive["matrices"][layer] if by == "matrix" else baseline["targets"])["kept"] / (
                kept.size if by == "matrix" else baseline["targets"]["weights"]
            )
            shares.add(share)
            assert (np.abs(kept.sum(1) - share * kept.shape[1]) < 1).all(), layer
            fallback = layer in baseline["targets"]["scored_by_magnitude"]
            scores = oracle.scores(oracle.weight(source, entry["tensor"]), None if fallback else norms[layer])
            expected = np.stack([oracle.keep(row, int(count)) for row, count in zip(scores, kept.sum(1), strict=True)])
            np.testing.assert_array_equal(kept, expected, err_msg=layer)
        assert (len(shares) > 1) == (by == "matrix")


def test_only_accuracies_change_by_points() -> None:
    """An infinite perplexity of a point is a word."""

    def measured(perplexity: float | None, accuracy: float) -> Record:
        counts = {"original": 10, "effective": 10}
        tasks = {"t": {"word_perplexity,none": perplexity}, "u": {"acc,none": accuracy, "acc_stderr,none": 0.03}}
        return {"tasks": {name: {"results": {name: each}, "n-samples": {name: counts}} for name, each in tasks.items()}}

    points = [
        {"name": name, "sparsity_of_targets": sparsity, "sparsity_of_all_parameters": 0.25, "evaluation": measured(*values)}
        for name, sparsity, *values in (("p", 0.5, 24, 0.4), ("q", 0.6, None, 0.5), ("r", 0.7, 16 * (1 - 1e-15), 0.5))
    ]
    record = {"format": "emp-llm sweep 2", "dense": measured(16, 0.5), "points": points, "suite": "s"}
    lines = sweep_table(record_of(record, Sweep, "sweep.json")).splitlines()
    error = ["±", f"{math.hypot(3, 3):.2f}", "‡"]  # older records hold no answers
    assert lines[3].split() == ["p", "50.00", "25.00", "24.000", "+50.00", "%", "40.00", "-10.00", *error]
    assert lines[4].split() == ["q", "60.00", "25.00", "infinite", "+inf", "%", "50.00", "0.00", *error]
    assert lines[5].split() == ["r", "70.00", "25.00", "16.000", "0.00", "%", "50.00", "0.00", *error]
    assert "‡ unpaired standard error" in lines[-1]


def test_infinite_perplexities_do_not_end_a_sweep(models: Models, options: Record, tmp_path: Path) -> None:
    """The ruined model's perplexities are null in JSON and words in the table, and all points are measured."""
    folder = Path(shutil.copytree(models("llama"), tmp_path / "ruined"))
    for shard in folder.glob("*.safetensors"):
        tensors = {name: tensor * (3e4 if "lm_head" in name else 1) for name, tensor in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})
    record = sweep(folder, output=tmp_path / "sweep", **(options | {"methods": "emp-magnitude", "sparsities": None}))
    values = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    found = [values["dense"]["perplexity"], *(point["evaluation"]["perplexity"] for point in values["points"])]
    assert [each["perplexity"] for each in found] == [None] * 3
    assert all(each["loss"] > 709 for each in found)
    assert sweep_table(record).count("infinite") == 3  # type: ignore[arg-type]
    again = sweep(folder, output=tmp_path / "sweep", **(options | {"methods": "emp-magnitude", "sparsities": None}))
    assert entries(again) == entries(record)


def test_from_the_command_line(models: Models, text: Path, suite: str, command: Run) -> None:
    line = ["--model", models("llama"), "--calibration", text, "--samples", 4, "--seqlen", 64, "--suite", suite]
    done = command("sweep", *line, "--methods", "emp-wanda,magnitude", "--betas", "0.5,1", "--limit", 5, "--output", "out")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["point", "removed"]
    assert lines[2].startswith("dense")
    removed = [float(line.split()[1]) for line in lines[2:6]]
    assert removed == sorted(removed)
    assert {line.split()[0] for line in lines[3:6]} == {"emp-wanda-beta-1", "magnitude-0.5", "emp-wanda-beta-0.5"}
    assert "partial" in lines[-1]
    assert "3 of 3" in done.stderr
