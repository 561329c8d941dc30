"""Scores of the user's own: criteria by --criterion, and scores from files by --scores, against
the oracle.
"""

import importlib
import math
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import Run
from runs import report_of
from safetensors.torch import load_file, save_file

from emp_llm import masks_of, measure, prune, report, sweep, verify
from emp_llm.common.errors import UserError
from emp_llm.options.recipe import Recipe
from emp_llm.options.words import recipe_of
from emp_llm.selection.criteria import InputStatistics

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
Refused = Callable[..., None]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `my_scores` in the current folder; forgotten after the test."""
    path = tmp_path / "my_scores.py"
    path.write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield path
    sys.modules.pop("my_scores", None)


@pytest.fixture
def refused(command: Run, tiny_llama: Path, tmp_path: Path) -> Refused:
    """Check that a prune of the tiny Llama with some options ends with one matching error, and
    leaves no output.
    """

    def call(match: str, options: str) -> None:
        done = command(f"prune --model {tiny_llama} {options} --output {tmp_path}/out", code=2)
        assert len(re.findall("^(?:error|Usage)", done.stderr, re.MULTILINE)) == 1
        assert re.search(match, done.stderr), done.stderr
        assert not (tmp_path / "out").exists()

    return call


def targets(run: Path) -> dict[str, str]:
    """Layer -> stored tensor."""
    return {name: entry["tensor"] for name, entry in report_of(run)["matrices"].items()}


@pytest.mark.parametrize("method", ["emp-my_ria", "my_ria"])
def test_a_criterion_by_name_prunes_by_its_scores(
    command: Run, tiny_llama: Path, text: Path, code: Path, tmp_path: Path, method: str
) -> None:
    source = tiny_llama
    out = tmp_path / "out"
    # emp-my_ria is the default with this criterion.
    how = ["--method", method] if method == "my_ria" else []
    given = ["--calibration", text, "--samples", 4, "--seqlen", 64, "--device-map", "cpu"]
    command(f"prune --criterion my_scores:my_ria --model {source}", *how, *given, "--output", out)
    norms = oracle.load_norms(out / "emp_llm" / "activations.safetensors")
    for layer, tensor in targets(out).items():
        size = np.abs(oracle.weight(source, tensor))
        scores = (size / size.sum(1, keepdims=True) + size / size.sum(0)) * np.sqrt(
            norms[layer].astype(np.float64)
        )
        mask = oracle.row_masks(scores, method == "emp-my_ria")
        np.testing.assert_array_equal(
            oracle.weight(out, tensor) != 0, mask & (size != 0), err_msg=layer
        )
    # Whole matrices, once for each.
    assert sorted(sys.modules["my_scores"].calls) == [(32, 80)] * 2 + [(80, 32)] * 4
    recipe = report_of(out)["recipe"]
    score = recipe["score"]["own"]
    assert (score["function"], len(score["source"])) == ("my_scores:my_ria", 64)
    assert Recipe.of_dict(recipe).method == method
    by = ("--criterion", "my_scores.py:my_ria")
    checked = command(f"verify {out} --source {source}", *by)
    assert "0 differences" in checked.stdout
    code.write_text(CODE.replace("size.sum(0)", "size.sum(0).square()"))
    for more, exit_code, said in (
        (by, 1, "has changed since"),
        ((), 2, f"--criterion {out}/emp_llm/criterion.py:my_ria: this runs the whole file"),
        (("--criterion", f"{out}/emp_llm/criterion.py:my_ria"), 0, ""),
    ):
        refused = command(f"verify {out} --source {source}", *more, code=exit_code)
        assert said in refused.stderr


SCRIPT = """
from transformers import AutoModelForCausalLM

from emp_llm import Own, Recipe, prune_model


def my_score(weight):
    return weight.abs() ** 2


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained({source!r})
    report = prune_model(model, Recipe(score=Own(my_score)))
    model.save_pretrained("saved")
    report.save("saved")
"""


def test_a_criterion_of_a_script_is_kept_beside_the_report(
    command: Run,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "nb3.py"
    script.write_text(SCRIPT.format(source=str(tiny_llama)))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert report_of(tmp_path / "saved")["recipe"]["score"]["own"]["function"] == "nb3.py:my_score"
    script.unlink()
    line = f"verify saved --source {tiny_llama}"
    (given,) = re.findall(r"--criterion (\S+): this runs", command(line, code=2).stderr)
    assert "0 differences" in command(line, "--criterion", given).stdout


def test_a_criterion_without_a_file(command: Run, tiny_llama: Path, tmp_path: Path) -> None:
    names = {"__name__": "__main__"}
    exec("def my_score(weight):\n    return weight.abs()", names)
    prune(model=tiny_llama, criterion=names["my_score"], output=tmp_path / "out")
    refused = command(f"verify out --source {tiny_llama}", code=2).stderr
    assert "Write it to one, and add --criterion FILE.py:my_score" in refused
    assert not (tmp_path / "out" / "emp_llm").exists()


MAPPED: list[tuple[Any, Any, Callable[[oracle.Array], oracle.Array]]] = [
    ("abs", "row", np.abs),
    ("shift", "matrix", lambda s: s - s.min()),
    ("shift", "row", lambda s: s - s.min()),
    ("exp", "all", lambda s: np.exp(s - s.max())),
]


@pytest.mark.parametrize(("kind", "group", "map_scores"), MAPPED)
def test_signed_scores_from_a_file(
    models: Callable[[str], Path],
    tmp_path: Path,
    kind: Any,
    group: Any,
    map_scores: Callable[[oracle.Array], oracle.Array],
) -> None:
    source = models("gpt2")
    out = tmp_path / "out"
    path = tmp_path / "scores.safetensors"
    generator = torch.Generator().manual_seed(0)
    stored = {
        name: t
        for name, t in oracle.tensors(source).items()
        if ".mlp." in name and len(t.shape) == 2
    }
    scores = {name: torch.randn(t.shape, generator=generator) for name, t in stored.items()}
    save_file(scores, path)
    recipe = prune(model=source, scores=path, score_map=kind, group=group, output=out).recipe
    assert (recipe.method, recipe.score.scores, recipe.score.score_map) == (
        "emp-scores",
        "scores.safetensors",
        kind,
    )
    # Conv1D: outputs are the last dimension.
    wanted = {name: scores[name].T.double().numpy() for name in targets(out).values()}
    flat = np.concatenate([s.ravel() for s in wanted.values()])
    rows = [row for s in wanted.values() for row in s]
    groups = {"row": rows, "matrix": [s.ravel() for s in wanted.values()], "all": [flat]}[group]
    mapped = [map_scores(each) for each in groups]
    masks = np.concatenate([oracle.keep(each, oracle.count(each)) for each in mapped])
    assert 0 < masks.mean() < 1
    for name, s in wanted.items():
        mask = masks[: s.size].reshape(s.shape)
        masks = masks[s.size :]
        before = oracle.weight(source, name, transposed=True)
        np.testing.assert_array_equal(
            oracle.weight(out, name, transposed=True), np.where(mask, before, 0), err_msg=name
        )
    assert verify(folder=out, source=str(source), scores=path).differences == []


@pytest.mark.parametrize(
    ("method", "other"), [("emp-scores", "emp-magnitude"), ("scores", "magnitude")]
)
def test_scores_equal_to_the_magnitudes_give_the_masks_of_magnitude(
    models: Callable[[str], Path], tmp_path: Path, method: str, other: str
) -> None:
    """Through experts too, and for uniform rows, and in a folder of several files."""
    source = models("mixtral")
    folder = tmp_path / "given"
    folder.mkdir()
    for shard in source.glob("*.safetensors"):
        save_file(
            {name: tensor.abs() for name, tensor in load_file(shard).items()}, folder / shard.name
        )
    prune(model=source, scores=folder, method=method, output=tmp_path / method)
    prune(model=source, method=other, output=tmp_path / other)
    assert oracle.shards(tmp_path / other) == oracle.shards(tmp_path / method)


def test_sweep_measure_and_report_know_the_criterion(
    tiny_llama: Path, text: Path, code: Path, tmp_path: Path, task_suite: Path
) -> None:
    common = {
        "model": tiny_llama,
        "criterion": "my_scores:my_ria",
        "calibration": str(text),
    }
    common |= {"samples": 4, "seqlen": 64, "device_map": "cpu"}
    options = common | {
        "suite": str(task_suite.with_name("short.toml")),
        "output": tmp_path / "sweep",
    }
    swept = sweep(**options, methods="emp-my_ria,wanda", betas="1", matched_baselines=True)
    name = "emp-my_ria-beta-1"
    names = [name, f"my_ria-total-as-{name}", f"my_ria-matrix-as-{name}", "wanda-0.5"]
    assert [point.point.name for point in swept.points] == names
    first = swept.points[0].targets
    same = swept.points[1].targets
    assert first.sparsity_of_targets == same.sparsity_of_targets
    equal = sweep(
        **options | {"output": tmp_path / "equal"},
        methods="emp-my_ria,my_ria",
        emp_sparsities="0.5",
    )
    assert [(p.point.name, p.targets.sparsity_of_targets) for p in equal.points] == [
        ("emp-my_ria-0.5", 0.5),
        ("my_ria-0.5", 0.5),
    ]
    measured = measure(**common, output=tmp_path / "measure.json").measures
    assert [entry.criterion for entry in measured] == ["magnitude", "wanda", "my_ria"]
    assert measured[-1].targets.sparsity_of_targets == first.sparsity_of_targets
    assert {point.beta: point.sparsity_of_targets for point in measured[-1].curve}[
        1
    ] == first.sparsity_of_targets
    report(runs=[tmp_path / "sweep"], output=tmp_path / "page", no_plots=True)
    assert "my_ria" in (tmp_path / "page" / "report.md").read_text()


def test_two_criteria_of_one_name_decide_their_own_masks(tiny_llama: Path) -> None:
    """A recipe holds its criterion; no table of the process lets the later one take the place of
    the earlier one.
    """

    def criterion(sign: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def mine(weight: torch.Tensor) -> torch.Tensor:
            return weight.float().abs() if sign > 0 else 1 / (1 + weight.float().abs())

        return mine

    def halves(weight: torch.Tensor, inputs: InputStatistics) -> torch.Tensor:
        return weight * inputs.norms

    assert (recipe_of(criterion=halves).method, recipe_of(criterion=halves).needs_activations) == (
        "emp-halves",
        True,
    )
    for wrong, said in (
        ({"method": "wanda", "criterion": halves}, "--method wanda does not use --criterion"),
        ({"criterion": lambda weight: weight}, "letters, digits and underscores"),
    ):
        with pytest.raises(UserError, match=said):
            recipe_of(**wrong)
    recipes = [recipe_of(method="mine", criterion=criterion(sign)) for sign in (1, -1)]
    found, other, magnitude = (
        masks_of(str(tiny_llama), each) for each in (*recipes, recipe_of(method="magnitude"))
    )
    assert all(torch.equal(found[name], magnitude[name]) for name in magnitude)
    assert not any(torch.equal(other[name], magnitude[name]) for name in magnitude)


def test_a_file_of_the_user_shadows_no_module(code: Path, tmp_path: Path) -> None:
    """The method names the function; the file may be named alone."""
    (tmp_path / "colorsys.py").write_text("raise SystemExit('shadowed')")
    assert recipe_of(method="emp-signed", criterion="my_scores.py").score.method == "signed"
    assert recipe_of(method="my_ria", criterion="my_scores").needs_activations
    with pytest.raises(UserError, match=r"my_scores\.py has no function other"):
        recipe_of(method="other", criterion="my_scores.py")
    assert str(tmp_path) not in sys.path
    assert importlib.import_module("colorsys").rgb_to_hsv


def test_a_criterion_that_raises_keeps_its_traceback(
    tiny_llama: Path, code: Path, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        prune(model=tiny_llama, criterion="my_scores:raising", output=tmp_path / "out")
    (note,) = [note for note in caught.value.__notes__ if "criterion" in note]
    assert "raised by the criterion raising for model.layers.0.mlp" in note


UP = "model.layers.1.mlp.up_proj.weight"
WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda scores: scores.pop(UP), f"no scores for {UP}"),
    "shape": (
        lambda scores: scores.update({UP: scores[UP].T.contiguous()}),
        rf"{UP} has the shape "
        r"\[32, 80\]",
    ),
    "nan": (
        lambda scores: scores[UP].fill_(math.nan),
        "the scores of model.layers.1.mlp.up_proj hold NaN",
    ),
    "negative": (lambda scores: scores[UP].neg_(), "scores below zero.*--map"),
    "dtype": (
        lambda scores: scores.update({UP: scores[UP].to(torch.float8_e4m3fn)}),
        "stored as F8_E4M3",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_scores_are_named(
    refused: Refused, tiny_llama: Path, tmp_path: Path, case: str
) -> None:
    shards = [load_file(shard) for shard in tiny_llama.glob("*.safetensors")]
    scores = {name: tensor.float().abs() for shard in shards for name, tensor in shard.items()}
    WRONG[case][0](scores)
    save_file(scores, tmp_path / "s.safetensors")
    refused(WRONG[case][1], f"--scores {tmp_path}/s.safetensors")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            "--criterion my_scores:signed",
            r"criterion signed: model\.layers\.0\.mlp\.\w+ has scores below zero.*--map",
        ),
        (
            "--criterion my_scores:short",
            r"returned a tensor of shape \[\d+, 3\] for model\.layers\.0\.mlp",
        ),
        ("--criterion my_scores:text", "returned str for model"),
        (
            "--criterion my_scores:broken",
            "criterion broken: the scores of .* hold NaN or infinity",
        ),
        (
            "--criterion my_scores:three",
            r":three: .* must take the arguments \(weight\) or \(weight, inputs\)",
        ),
        (
            "--criterion my_scores:none",
            "--criterion my_scores:none: my_scores has no function none",
        ),
        ("--map abs", "--map is for scores of your own"),
        ("--scores nowhere.safetensors", "--scores nowhere.safetensors: no such file"),
        (
            "--scores . --criterion my_scores:my_ria",
            "--criterion and --scores both define",
        ),
        ("--method emp-scores", "--method emp-scores needs your scores"),
        (
            "--method wanda --criterion my_scores:my_ria",
            "--method wanda does not use --criterion",
        ),
        (
            "--method emp-nothing",
            "'emp-nothing' is not one of emp-wanda, wanda.*--criterion MODULE:FUNCTION",
        ),
        ("--criterion no_such_module:f", "no module no_such_module"),
        ("--criterion nowhere.py:f", "no file nowhere.py"),
        ("--criterion my_scores:my_ria --map log", "log"),
    ],
)
def test_wrong_criteria_and_options_are_named(
    refused: Refused, code: Path, options: str, match: str
) -> None:
    refused(match, options)
