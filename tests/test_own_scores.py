"""Scores of the user's own: criteria by --criterion, and scores from files by --scores, against the oracle."""

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import Run
from safetensors.torch import load_file, save_file

from emp_llm import masks_of
from emp_llm.common.errors import UserError
from emp_llm.measure import measure
from emp_llm.options.recipe import Recipe
from emp_llm.prune import prune
from emp_llm.report import report
from emp_llm.selection.criteria import InputStatistics
from emp_llm.sweep import sweep
from emp_llm.verify import verify

CODE = '''
import torch

calls = []


def my_ria(weight, inputs):
    """Relative importance and activations, with whole rows and columns."""
    size = weight.double().abs()
    calls.append(tuple(weight.shape))
    assert inputs.tokens == 256
    return (size / size.sum(1, keepdim=True) + size / size.sum(0)) * inputs.norms.double().sqrt()


def signed(weight):
    return weight.float() - 0.01


def short(weight):
    return weight[:, :3]


def text(weight):
    return "a score"


def broken(weight):
    return weight / 0


def raising(weight):
    raise ZeroDivisionError("mine")


def three(weight, inputs, more):
    return weight
'''
Files = Callable[[Path], dict[str, Any]]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `my_scores` in the current folder; forgotten after the test."""
    path = tmp_path / "my_scores.py"
    path.write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield path
    sys.modules.pop("my_scores", None)


def targets(run: Path) -> dict[str, str]:
    """Layer -> stored tensor."""
    return {name: entry["tensor"] for name, entry in json.loads((run / "emp_report.json").read_text())["matrices"].items()}


def kept(run: Path, tensor: str) -> oracle.Array:
    return oracle.weight(run, tensor) != 0


def my_ria(source: Path, run: Path, layer: str, tensor: str) -> oracle.Array:
    """The scores of `my_ria` in numpy."""
    size = np.abs(oracle.weight(source, tensor))
    norm = oracle.load_norms(run / "emp_llm" / "activations.safetensors")[layer].astype(np.float64)
    scores: oracle.Array = (size / size.sum(1, keepdims=True) + size / size.sum(0)) * np.sqrt(norm)
    return scores


@pytest.mark.parametrize("method", ["emp-my_ria", "my_ria"])
def test_a_criterion_by_name_prunes_by_its_scores(
    command: Run, models: Callable[[str], Path], text: Path, code: Path, tmp_path: Path, method: str
) -> None:
    source, out = models("llama"), tmp_path / "out"
    how = ["--method", method] if method == "my_ria" else []  # emp-my_ria is the default with this criterion
    given = ["--calibration", text, "--samples", 4, "--seqlen", 64, "--device-map", "cpu"]
    done = command("prune", "--model", source, "--criterion", "my_scores:my_ria", *how, *given, "--output", out)
    assert done.returncode == 0, done.stderr
    for layer, tensor in targets(out).items():
        scores = my_ria(source, out, layer, tensor)
        mask = oracle.row_masks(scores, method == "emp-my_ria")
        np.testing.assert_array_equal(kept(out, tensor), mask & (oracle.weight(source, tensor) != 0), err_msg=layer)
    calls = sys.modules["my_scores"].calls
    assert len(calls) == 6  # once for each matrix
    shapes = set(calls)
    assert shapes == {(80, 32), (32, 80)}  # whole matrices
    recipe = json.loads((out / "emp_report.json").read_text())["recipe"]
    assert recipe["method"] == method
    assert recipe["criterion"] == "my_scores:my_ria"
    assert len(recipe["criterion_source"]) == 64
    checked = command("verify", out, "--source", source, "--criterion", "my_scores.py:my_ria")
    assert checked.returncode == 0, checked.stderr
    assert "0 differences" in checked.stdout
    code.write_text(CODE.replace("size.sum(0)", "size.sum(0).square()"))
    changed = command("verify", out, "--source", source, "--criterion", "my_scores.py:my_ria")
    assert changed.returncode == 1
    assert "has changed since" in changed.stderr
    unknown = command("verify", out, "--source", source)
    assert unknown.returncode == 2
    assert "add --criterion my_scores:my_ria" in unknown.stderr


MAPPED: dict[str, Callable[[oracle.Array], oracle.Array]] = {
    "abs": np.abs,
    "shift": lambda s: s - s.min(),
    "exp": lambda s: np.exp(s - s.max()),
}


@pytest.mark.parametrize("group", ["row", "matrix", "all"])
@pytest.mark.parametrize("kind", MAPPED)
def test_signed_scores_from_a_file(models: Callable[[str], Path], tmp_path: Path, kind: str, group: str) -> None:
    source, out = models("gpt2"), tmp_path / "out"
    generator = torch.Generator().manual_seed(0)
    stored = {name: t for name, t in oracle.tensors(source).items() if ".mlp." in name and len(t.shape) == 2}
    scores = {name: torch.randn(t.shape, generator=generator) for name, t in stored.items()}
    path = tmp_path / "scores.safetensors"
    save_file(scores, path)
    done = prune(model=source, scores=path, score_map=kind, group=group, output=out)  # type: ignore[arg-type]
    assert done.recipe.method == "emp-scores"
    order = targets(out)
    wanted = {name: scores[name].T.double().numpy() for name in order.values()}  # Conv1D: outputs are the last dimension
    map_scores = MAPPED[kind]
    if group == "row":
        masks = {name: np.stack([row_mask(map_scores(row)) for row in s]) for name, s in wanted.items()}
    elif group == "matrix":
        masks = {name: row_mask(map_scores(s).reshape(-1)).reshape(s.shape) for name, s in wanted.items()}
    else:
        flat = row_mask(map_scores(np.concatenate([s.reshape(-1) for s in wanted.values()])))
        parts = np.split(flat, np.cumsum([s.size for s in wanted.values()])[:-1])
        masks = {name: part.reshape(s.shape) for part, (name, s) in zip(parts, wanted.items(), strict=True)}
    for name, mask in masks.items():
        assert mask.any()
        assert not mask.all()
        before = oracle.weight(source, name, transposed=True)
        np.testing.assert_array_equal(oracle.weight(out, name, transposed=True), np.where(mask, before, 0), err_msg=name)
    assert verify(folder=out, source=str(source), scores=path).differences == []
    assert (done.recipe.scores, done.recipe.score_map) == ("scores.safetensors", kind)


def row_mask(scores: oracle.Array) -> oracle.Array:
    return oracle.keep(scores, oracle.count(scores))


def test_scores_equal_to_the_magnitudes_give_the_masks_of_magnitude(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Through experts too, and for uniform rows, and in a folder of several files."""
    source = models("mixtral")
    folder = tmp_path / "given"
    folder.mkdir()
    for shard in source.glob("*.safetensors"):
        save_file({name: tensor.abs() for name, tensor in load_file(shard).items()}, folder / shard.name)
    for method, other in (("emp-scores", "emp-magnitude"), ("scores", "magnitude")):
        prune(model=source, scores=folder, method=method, output=tmp_path / method)
        prune(model=source, method=other, output=tmp_path / other)
        for shard in (tmp_path / other).glob("*.safetensors"):
            assert (tmp_path / method / shard.name).read_bytes() == shard.read_bytes()


def test_sweep_measure_and_report_know_the_criterion(
    models: Callable[[str], Path], text: Path, code: Path, tmp_path: Path, task_suite: Path
) -> None:
    source = models("llama")
    suite = tmp_path / "suite.toml"
    (tmp_path / "heldout.txt").write_text(text.read_text()[:2000])
    suite.write_text('[perplexity]\nfile = "heldout.txt"\nseqlen = 64\n')
    common: dict[str, Any] = {"model": source, "criterion": "my_scores:my_ria", "calibration": str(text), "samples": 4}
    common |= {"seqlen": 64, "device_map": "cpu"}
    swept = sweep(
        **common, methods="emp-my_ria,wanda", betas="1", suite=str(suite), matched_baselines=True, output=tmp_path / "sweep"
    )
    names = [point.name for point in swept.points]
    assert names == [
        "emp-my_ria-beta-1",
        "my_ria-total-as-emp-my_ria-beta-1",
        "my_ria-matrix-as-emp-my_ria-beta-1",
        "wanda-0.5",
    ]
    first, same = swept.points[0], swept.points[1]
    equal = sweep(**common, methods="emp-my_ria,my_ria", emp_sparsities="0.5", suite=str(suite), output=tmp_path / "equal")
    assert [point.name for point in equal.points] == ["emp-my_ria-0.5", "my_ria-0.5"]
    assert {point.sparsity_of_targets for point in equal.points} == {0.5}
    report(runs=[tmp_path / "equal"], output=tmp_path / "equal-page", no_plots=True)
    assert first.sparsity_of_targets == same.sparsity_of_targets
    measured = measure(**common, output=tmp_path / "measure.json")
    assert [entry.criterion for entry in measured.measures] == ["magnitude", "wanda", "my_ria"]
    assert measured.measures[-1].targets.sparsity_of_targets == first.sparsity_of_targets
    assert {point.beta: point.sparsity_of_targets for point in measured.measures[-1].curve}[1] == first.sparsity_of_targets
    page = report(runs=[tmp_path / "sweep", tmp_path / "measure.json"], output=tmp_path / "page", no_plots=True)
    assert page is not None
    assert "my_ria" in (tmp_path / "page" / "report.html").read_text()


def test_a_function_in_python() -> None:
    def halves(weight: torch.Tensor, inputs: InputStatistics) -> torch.Tensor:
        return weight * inputs.norms

    assert Recipe(criterion=halves).method == "emp-halves"
    assert Recipe(criterion=halves).needs_activations
    named = Recipe(method="wanda", criterion=halves)
    with pytest.raises(UserError, match="--method wanda does not use --criterion"):
        named.check()
    with pytest.raises(UserError, match="letters, digits and underscores"):
        Recipe(criterion=lambda weight: weight).check()


def test_two_criteria_of_one_name_decide_their_own_masks(models: Callable[[str], Path]) -> None:
    """A recipe holds its criterion; no table of the process lets the later one take the place of the earlier one."""

    def criterion(largest: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def mine(weight: torch.Tensor) -> torch.Tensor:
            return weight.float().abs() if largest else 1 / (1 + weight.float().abs())

        return mine

    first, second = (Recipe(method="mine", criterion=criterion(largest)) for largest in (True, False))
    assert first.method == second.method == "mine"
    found = masks_of(str(models("llama")), first)
    other = masks_of(str(models("llama")), second)
    magnitude = masks_of(str(models("llama")), Recipe(method="magnitude"))
    assert all(torch.equal(found[name], magnitude[name]) for name in magnitude)
    assert not any(torch.equal(other[name], magnitude[name]) for name in magnitude)


def test_a_file_of_the_user_shadows_no_module(code: Path, tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise SystemExit('shadowed')")
    assert Recipe(criterion="my_scores:signed").scored_by.name == "signed"
    assert str(tmp_path) not in sys.path
    assert importlib.import_module("colorsys").rgb_to_hsv


def test_a_file_with_several_criteria(code: Path) -> None:
    """The method names the function; the file is named alone."""
    assert Recipe(method="emp-signed", criterion="my_scores.py").scored_by.name == "signed"
    assert Recipe(method="my_ria", criterion="my_scores").needs_activations
    with pytest.raises(UserError, match=r"my_scores\.py has no function other"):
        Recipe(method="other", criterion="my_scores.py").check()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("signed", r"criterion signed: model\.layers\.0\.mlp\.\w+ has scores below zero.*--map"),
        ("short", r"returned a tensor of shape \[\d+, 3\] for model\.layers\.0\.mlp"),
        ("text", "returned str for model"),
        ("broken", "criterion broken: the scores of .* hold NaN or infinity"),
        ("three", r"--criterion my_scores:three: .* must take the arguments \(weight\) or \(weight, inputs\)"),
        ("none", "--criterion my_scores:none: my_scores has no function none"),
    ],
)
def test_wrong_criteria_are_named(
    command: Run, models: Callable[[str], Path], code: Path, tmp_path: Path, name: str, match: str
) -> None:
    done = command("prune", "--model", models("llama"), "--criterion", f"my_scores:{name}", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("error")]) == 1
    assert re.search(match, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_criterion_that_raises_keeps_its_traceback(models: Callable[[str], Path], code: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        prune(model=models("llama"), criterion="my_scores:raising", output=tmp_path / "out")
    (note,) = [note for note in caught.value.__notes__ if "criterion" in note]
    assert "raised by the criterion raising for model.layers.0.mlp" in note


def with_scores(models: Callable[[str], Path], change: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, torch.Tensor]:
    scores = {}
    for shard in models("llama").glob("*.safetensors"):
        scores |= {name: tensor.float().abs() for name, tensor in load_file(shard).items()}
    change(scores)
    return scores


UP = "model.layers.1.mlp.up_proj.weight"
WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda scores: scores.pop(UP), f"no scores for {UP}"),
    "shape": (lambda scores: scores.update({UP: scores[UP].T.contiguous()}), rf"{UP} has the shape \[32, 80\]"),
    "nan": (lambda scores: scores[UP].fill_(math.nan), "the scores of model.layers.1.mlp.up_proj hold NaN"),
    "negative": (lambda scores: scores[UP].neg_(), "scores below zero.*--map"),
    "dtype": (lambda scores: scores.update({UP: scores[UP].to(torch.float8_e4m3fn)}), "stored as F8_E4M3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_scores_are_named(command: Run, models: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    change, match = WRONG[case]
    save_file(with_scores(models, change), tmp_path / "s.safetensors")
    done = command("prune", "--model", models("llama"), "--scores", tmp_path / "s.safetensors", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert re.search(match, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--map", "abs"], "--map is for scores of your own"),
        (["--scores", "nowhere.safetensors"], "--scores nowhere.safetensors: no such file"),
        (["--scores", ".", "--criterion", "my_scores:my_ria"], "--criterion and --scores both define"),
        (["--method", "emp-scores"], "--method emp-scores needs your scores"),
        (["--method", "wanda", "--criterion", "my_scores:my_ria"], "--method wanda does not use --criterion"),
        (["--method", "emp-nothing"], "'emp-nothing' is not one of emp-wanda, wanda.*--criterion MODULE:FUNCTION"),
        (["--criterion", "no_such_module:f"], "no module no_such_module"),
        (["--criterion", "nowhere.py:f"], "no file nowhere.py"),
        (["--criterion", "my_scores:my_ria", "--map", "log"], "log"),
    ],
)
def test_conflicting_options(
    command: Run, models: Callable[[str], Path], code: Path, tmp_path: Path, options: list[str], match: str
) -> None:
    done = command("prune", "--model", models("llama"), *options, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert re.search(match, done.stderr), done.stderr
