"""Relative norms in scores (--score), counts by the effective number of the magnitudes (--count-by), and RIA's score."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import Run
from transformers import AutoModelForCausalLM

from emp_llm import Recipe, prune_model
from emp_llm.calibration.activations import Activations
from emp_llm.measure import measure
from emp_llm.prune import prune
from emp_llm.records.run_report import RunReport
from emp_llm.selection.criteria import InputStatistics, ria
from emp_llm.sweep import sweep
from emp_llm.verify import verify

Models = Callable[[str], Path]
GROUPS = ("row", "matrix", "all")


def report_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "emp_report.json").read_text())
    return found


def pruned(source: Path, norms: Path, out: Path, **options: Any) -> RunReport:
    report = prune(source, output=out, activations=norms, min_expert_tokens=0, **options)
    assert isinstance(report, RunReport)
    return report


def masks_in(source: Path, out: Path, report: RunReport) -> dict[str, Any]:
    """Which weights are not removed; the tiny models hold no zeros."""
    return {layer: oracle.weight(out, entry.tensor) != 0 for layer, entry in report.matrices.items()}


@pytest.mark.parametrize("group", GROUPS)
def test_counts_by_magnitude_and_choice_by_score(models: Models, norms: Models, tmp_path: Path, group: str) -> None:
    """As many weights in each group as its magnitudes are worth, those with the largest scores; beta and order apply."""
    source, file = models("llama"), norms("llama")
    report = pruned(source, file, tmp_path / "out", method="emp-relative", group=group, beta=0.8, order=1.0)
    relative, masks = oracle.load_norms(file, relative=True), masks_in(source, tmp_path / "out", report)
    weights = {layer: oracle.scores(oracle.weight(source, entry.tensor)) for layer, entry in report.matrices.items()}
    scores = {layer: oracle.scores(matrix, relative[layer]) for layer, matrix in weights.items()}
    layers = list(weights)
    groups = [layers] if group == "all" else [[layer] for layer in layers]
    numbers = []
    for members in groups:
        size, choice = (np.concatenate([each[layer].reshape(-1) for layer in members]) for each in (weights, scores))
        mask = np.concatenate([masks[layer].reshape(-1) for layer in members])
        shape = weights[members[0]].shape if group == "row" else (1, -1)
        for kept, magnitudes, score in zip(*(each.reshape(shape) for each in (mask, size, choice)), strict=True):
            count = oracle.count(magnitudes, 0.8, 1.0)
            np.testing.assert_array_equal(kept, oracle.keep(score, count))
            numbers.append(oracle.effective(magnitudes, 1.0))
    entry = report.matrices[layers[0]]
    if group == "all":
        assert report.targets.n_eff == pytest.approx(numbers[0])
        assert report.targets.s_eff_bound is None
    else:
        rows = entry.rows if group == "row" else 1
        assert entry.n_eff_mean == pytest.approx(np.mean(numbers[:rows]))
        assert entry.s_eff_bound is None
    assert (report.recipe.method, report.recipe.count_by) == ("emp-relative", "magnitude")
    assert verify(tmp_path / "out", source=str(source), activations=file).differences == []


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_names_of_one_rule(models: Models, norms: Models, tmp_path: Path, family: str) -> None:
    """The words for the norms and for the counts combine to the methods of their own."""
    source, file = models(family), norms(family)

    def run(name: str, **options: Any) -> dict[str, Any]:
        return masks_in(source, tmp_path / name, pruned(source, file, tmp_path / name, **options))

    same = [
        (run("a", method="emp-relative"), run("b", method="emp-wanda", score="relative", count_by="magnitude")),
        (run("c", method="emp-relative", count_by="own"), run("d", method="emp-wanda", score="relative")),
        (run("e", method="relative", sparsity=0.3), run("f", method="wanda", score="relative", sparsity=0.3)),
    ]
    for one, other in same:
        assert all(np.array_equal(one[layer], other[layer]) for layer in one)
    plain = run("g", method="emp-wanda", count_by="magnitude")
    for layer, mask in plain.items():
        assert np.array_equal(mask.sum(1), same[0][0][layer].sum(1)), "the counts do not depend on the norms"
    assert any(not np.array_equal(mask, same[0][0][layer]) for layer, mask in plain.items())
    for name in "abcdefg":
        assert verify(tmp_path / name, source=str(source), activations=file).differences == []
    manifest = json.loads((tmp_path / "b" / "emp_manifest.json").read_text())
    manifest["recipe"].pop("count_by")
    (tmp_path / "b" / "emp_manifest.json").write_text(json.dumps(manifest))
    assert len(verify(tmp_path / "b", source=str(source), activations=file).differences) > 1


@pytest.mark.parametrize("group", GROUPS)
def test_requested_sparsity(command: Run, models: Models, norms: Models, tmp_path: Path, group: str) -> None:
    source = models("llama")
    line = ["prune", "--model", source, "--method", "emp-relative", "--activations", norms("llama"), "--group", group]
    done = command(*line, "--sparsity", 0.45, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    report = report_in(tmp_path / "out")
    removed = report["targets"]["weights"] - report["targets"]["kept"]
    assert abs(removed - math.floor(0.45 * report["targets"]["weights"])) <= (0 if group == "row" else 6)
    assert f"sparsity 0.45 is that of beta {report['recipe']['beta']:.6g}" in done.stderr
    assert verify(tmp_path / "out", source=str(source), activations=norms("llama")).differences == []


@pytest.mark.parametrize("sparsity", [None, 0.4])
def test_pruned_propagation(models: Models, text: Path, tmp_path: Path, sparsity: float | None) -> None:
    """The counts do not depend on the norms, so that a sparsity can be asked for too."""
    given: dict[str, Any] = {"calibration": str(text), "samples": 4, "seqlen": 64, "device_map": "cpu"}
    source, out = models("llama"), tmp_path / "out"
    report = prune(source, output=out, method="emp-relative", propagate="pruned", sparsity=sparsity, **given)
    assert verify(out, source=str(source)).differences == []
    dense = prune(source, output=tmp_path / "dense", method="emp-relative", sparsity=sparsity, **given)
    for layer, entry in report["matrices"].items():
        assert entry["kept"] == dense["matrices"][layer]["kept"]
    files = [Activations.load(folder / "emp_llm" / "activations.safetensors") for folder in (out, tmp_path / "dense")]
    first, last = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
    norm = [[each.norm(layer, relative=True) for each in files] for layer in (first, last)]
    assert torch.equal(norm[0][0], norm[0][1])  # type: ignore[arg-type]
    assert not torch.equal(norm[1][0], norm[1][1])  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokens = {"samples": 4, "seqlen": 64, "propagate": "pruned"}
    found = prune_model(model, Recipe(method="emp-relative", sparsity=sparsity), text, source, **tokens)  # type: ignore[arg-type]
    for layer, entry in found.matrices.items():
        assert torch.equal(model.get_submodule(layer).weight != 0, torch.from_numpy(oracle.weight(out, entry.tensor) != 0))


@pytest.mark.parametrize("options", [{}, {"score": "relative", "count_by": "magnitude"}], ids=["plain", "relative"])
def test_ria_of_rows_and_columns_of_zeros(models: Models, norms: Models, tmp_path: Path, options: dict[str, Any]) -> None:
    """A row of zeros has scores of zero, and so has a column. Either kind of norms and of counts goes with the score."""
    name = "model.layers.0.mlp.up_proj"

    def plant(matrix: oracle.Array) -> None:
        matrix[3] = 0
        matrix[:, 5] = 0

    source = oracle.edited_copy(models("llama"), tmp_path / "planted", f"{name}.weight", plant)
    report = pruned(source, norms("llama"), tmp_path / "out", method="emp-ria", **options)
    own = oracle.load_norms(norms("llama"), relative=bool(options))
    for layer, entry in report.matrices.items():
        size = oracle.scores(oracle.weight(source, entry.tensor))
        scores = oracle.ria(size, own[layer])
        mask = oracle.row_masks(scores, True, counting=size if options else None)
        np.testing.assert_array_equal(oracle.weight(tmp_path / "out", entry.tensor) != 0, mask & (size != 0), err_msg=layer)
        assert entry.kept == mask.sum()
    assert verify(tmp_path / "out", source=str(source), activations=norms("llama")).differences == []


def test_ria_of_a_large_matrix() -> None:
    """It is computed a piece at a time, and the pieces do not show."""
    weight, norm = torch.randn(1025, 1030).bfloat16(), torch.rand(1030)
    size = weight.double().abs()
    wanted = (size / size.sum(1, keepdim=True) + size / size.sum(0)) * norm.double().sqrt()
    torch.testing.assert_close(ria(weight, InputStatistics(norm)), wanted.float(), rtol=1e-6, atol=0)


def test_dry_run_needs_no_activations_for_counts_by_magnitude(command: Run, models: Models, norms: Models) -> None:
    line = ["prune", "--model", models("llama"), "--dry-run", "--method"]
    done = command(*line, "emp-relative")
    assert done.returncode == 0, done.stderr
    assert "emp-relative, order 2, group row, counts by |W|" in done.stdout
    other = command(*line, "emp-wanda", "--count-by", "magnitude")
    assert [x.split() for x in done.stdout.splitlines()[-2:]] == [x.split() for x in other.stdout.splitlines()[-2:]]
    assert "add --activations FILE" in command(*line, "emp-relative", "--count-by", "own").stdout
    given = command(*line, "emp-relative", "--count-by", "own", "--activations", norms("llama")).stdout
    assert "emp-relative, order 2, group row: removed" in given


def test_sweep_and_measure(
    evaluable: Models, task_suite: Path, norms: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Points with counts by magnitude share one pass of numbers; masks are those of prune."""
    source = evaluable("llama")
    caplog.set_level(logging.INFO)
    common: dict[str, Any] = {"activations": norms("llama"), "device_map": "cpu"}
    out = tmp_path / "sweep"
    found = sweep(
        source, output=out, methods="emp-relative,relative,emp-wanda,magnitude", betas="0.7,1", emp_sparsities="0.5",
        sparsities="0.5", suite=str(task_suite.parent / "short.toml"), score="relative", keep=True, **common,
    )  # fmt: skip
    masks = {point.name: point.masks for point in found.points}
    assert len(masks) == 8
    for name, options in {
        "emp-relative-beta-0.7": {"method": "emp-relative", "beta": 0.7},
        "emp-relative-0.5": {"method": "emp-relative", "sparsity": 0.5},
        "emp-wanda-beta-1": {"method": "emp-wanda", "score": "relative"},
        "relative-0.5": {"method": "relative"},
    }.items():
        prune(source, output=tmp_path / name, **common, **options)
        for shard in (tmp_path / name).glob("*.safetensors"):
            assert shard.read_bytes() == (out / "points" / name / shard.name).read_bytes(), name
        assert verify(out / "points" / name, source=str(source)).differences == []
    record = measure(source, output=tmp_path / "m.json", criteria="magnitude,relative,wanda", betas="0.7,1", **common)
    magnitude, relative, wanda = record.measures
    assert (magnitude.count_by, relative.count_by, wanda.count_by) == (None, "magnitude", None)
    assert (magnitude.score, relative.score, wanda.score) == (None, "relative", None)
    assert relative.curve == magnitude.curve != wanda.curve
    written = report_in(tmp_path / "emp-relative-beta-0.7")
    assert relative.curve[0].kept == written["targets"]["kept"]
    for layer, entry in relative.matrices.items():
        assert (entry.n_eff, entry.kept) == (magnitude.matrices[layer].n_eff, magnitude.matrices[layer].kept)
        assert entry.s_eff != magnitude.matrices[layer].s_eff
    both = measure(source, output=tmp_path / "n.json", criteria="wanda", score="relative", count_by="magnitude", **common)
    assert both.measures[0].matrices == relative.matrices


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("--method magnitude --score relative", "--score chooses the norms of the inputs, and method magnitude needs none"),
        ("--method emp-magnitude --score wanda", "--score chooses the norms of the inputs"),
        ("--method relative --score wanda", "--method relative has relative norms; leave out --score wanda"),
        ("--method wanda --count-by magnitude", "--count-by does not go with method wanda: its sparsity is fixed"),
        ("--method relative --count-by own", "--count-by does not go with method relative"),
        ("--method emp-relative --neff-dtype bfloat16", "--neff-dtype bfloat16 is the paper's arithmetic for the scores"),
        ("--method emp-relative --propagate pruned --count-by own --sparsity 0.5", "--sparsity needs the scores of all"),
        ("--method emp-relative --activations old", "old: it has no norms relative to the outputs, which relative scores need"),
        ("--method wanda --score relative --activations old", "Run emp-llm calibrate again"),
        ("--method emp-wanda --score relativ", "relativ"),
        ("--method emp-wanda --count-by size", "size"),
    ],
)
def test_wrong_options(command: Run, models: Models, norms: Models, tmp_path: Path, options: str, match: str) -> None:
    replace(Activations.load(norms("llama")), relative={}).save(tmp_path / "old")
    done = command("prune", "--model", models("llama"), *options.split(), "--output", tmp_path / "out")
    assert done.returncode == 2
    assert match in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_options_of_other_commands(command: Run, models: Models, tmp_path: Path) -> None:
    for options, match in (
        ("sweep --methods magnitude --score relative", "--score relative is for methods that need activations"),
        ("sweep --methods wanda --count-by magnitude", "--count-by magnitude is for emp methods"),
        ("measure --criteria magnitude --score relative", "--score relative is for criteria that need activations"),
    ):
        name, *more = options.split()
        done = command(name, "--model", models("llama"), *more, "--output", tmp_path / "out")
        assert done.returncode == 2
        assert match in done.stderr
