"""An update and a score that the package does not know, with a parameter each: one class, and it
goes through the commands.
"""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from runs import check_verified
from tiny import weights_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import (
    InputStatistics,
    Magnitude,
    Recipe,
    Share,
    prune,
    prune_model,
    recipe_of,
    sweep,
    verify,
)
from emp_llm.cli import options_from
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError
from emp_llm.options.recipe import Score
from emp_llm.pruning.writing import read_manifest
from emp_llm.records.run_report import read_report
from emp_llm.selection.criteria import Criterion, own_criterion
from emp_llm.selection.reference import largest_mask, order_keys, pattern_mask
from emp_llm.update.least_squares import Solution
from emp_llm.update.update import Allowed, Moments, Search, Update

TEXT: dict[str, Any] = {"samples": 4, "seqlen": 64}


@dataclass(frozen=True, kw_only=True)
class Shrink(Search):
    """Keeps the weights with the largest |W| * sqrt(G_jj), at a part of their values."""

    name = "shrink"
    title = "shrunken weights"
    part: Annotated[float, Flag("Part of a kept weight.", above=0, maximum=1)] = 0.9

    def solve(self, weight: Tensor, moments: Moments, allowed: Allowed, damping: float) -> Solution:
        scores = weight.abs() * moments.gram.diagonal().sqrt()
        if allowed.pattern is not None:
            mask = pattern_mask(order_keys(scores), *allowed.pattern)
        else:
            assert allowed.counts is not None
            mask = largest_mask(scores, allowed.counts)
        return Solution(self.part * weight * mask, mask, damping)


@dataclass(frozen=True)
class Power(Score):
    """|W|^p * ||X_j||."""

    name = "power"
    title = "powers of weights"
    power: Annotated[float, Flag("Exponent of the weights.", above=0)] = 1.0

    @property
    def criterion(self) -> Criterion:
        def score(weight: Tensor, inputs: InputStatistics) -> Tensor:
            return weight.double().abs() ** self.power * inputs.norms.double()

        return own_criterion(score, "power")


# Known inside these tests alone.
del Update.kinds["shrink"], Score.kinds["power"]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Update.kinds, "shrink", Shrink)
    monkeypatch.setitem(Score.kinds, "power", Power)


@pytest.mark.parametrize(
    "how",
    [
        {"method": "shrink", "sparsity": 0.25, "part": 0.5},
        {"method": "emp-shrink", "targets": "all-linear"},
        {"method": "shrink", "pattern": "2:4", "refit": True},
    ],
    ids=["fixed", "emp", "pattern and refit"],
)
def test_it_goes_through_the_commands(
    how: dict[str, Any], tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    source = tiny_llama
    report = prune(
        model=str(source),
        calibration=str(text),
        device_map="cpu",
        output=tmp_path / "out",
        **how,
        **TEXT,
    )
    findings = verify(tmp_path / "out", source=str(source))
    assert not findings.differences
    assert findings.checked["targets"] == len(report.matrices)
    assert "shrink" in report.stages
    assert report.recipe.method == how["method"]
    assert report.recipe == read_report(tmp_path / "out").recipe
    update = read_manifest(tmp_path / "out").recipe.update
    assert isinstance(update, Shrink)
    assert update.part == how.get("part", 0.9)
    assert "shrunken weights" in report.recipe.words
    assert all(fit.error_after is not None for fit in report.fits.values())

    dense = weights_of(source)
    pruned = weights_of(tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    kept = pruned[name] != 0
    if "sparsity" in how:
        assert torch.equal(
            kept.sum(1), torch.full((len(kept),), kept.shape[1] - kept.shape[1] // 4)
        )
    if "refit" not in how:
        rounded = (update.part * dense[name].float()).to(dense[name].dtype)
        assert torch.equal(pruned[name][kept], rounded[kept])

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(source)
    in_memory = prune_model(model, recipe_of(**how), str(text), tokenizer, **TEXT)
    assert in_memory.record.targets.kept == report.targets.kept
    state = model.state_dict()
    assert torch.equal(state[name], pruned[name])


def test_a_sweep_takes_it(tiny_llama: Path, text: Path, task_suite: Path, tmp_path: Path) -> None:
    swept = sweep(
        model=tiny_llama,
        methods="shrink,wanda",
        sparsities="0.25",
        part=0.5,
        suite=str(task_suite.with_name("short.toml")),
        calibration=str(text),
        device_map="cpu",
        output=tmp_path / "sweep",
        **TEXT,
    )
    assert [point.point.name for point in swept.points] == ["shrink-0.25", "wanda-0.25"]
    shrunk = swept.points[0]
    assert shrunk.fits
    assert shrunk.as_dict()["recipe"]["update"] == {"shrink": {"refit": None, "part": 0.5}}
    assert shrunk.recipe == Recipe(score=Magnitude(), counts=Share(0.25), update=Shrink(part=0.5))


def test_the_shell_takes_its_option(tiny_llama: Path) -> None:
    line = [str(tiny_llama), "--method", "shrink", "--part", "0.25"]
    words = options_from("prune", line).groups["words"]
    assert words.recipe.update == Shrink(part=0.25)
    assert "--part <float>" in help_of_all("prune")
    for wrong, says in (
        (["--part", "2"], "--part must be above 0 and at most 1, got 2"),
        (["--method", "wanda"], "--part is for method shrink, not for wanda"),
        (["--power", "2"], "--power is for method power, not for shrink"),
    ):
        with pytest.raises(UserError, match=says):
            _ = options_from("prune", [*line, *wrong]).groups["words"].recipe


def help_of_all(name: str) -> str:
    """What `--help all` of a command prints."""
    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit):
        options_from(name, ["--help", "all"])
    return shown.getvalue()


def test_a_score_with_a_parameter(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    source = tiny_llama
    how = {"calibration": str(text), "device_map": "cpu", **TEXT}
    report = prune(source, method="emp-power", power=0.5, output=tmp_path / "out", **how)
    recipe = read_manifest(tmp_path / "out").recipe
    assert recipe == report.recipe == Recipe(score=Power(0.5))
    assert recipe.as_dict()["score"]["power"]["power"] == 0.5
    assert recipe.variant == ["power 0.5"]
    assert "powers of weights" in recipe.words
    check_verified(tmp_path / "out", source)
    manifest = tmp_path / "out" / "emp_manifest.json"
    manifest.write_text(manifest.read_text().replace('"power": 0.5', '"power": 2.0'))
    assert verify(tmp_path / "out", source=str(source)).differences


def test_a_record_of_an_unknown_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Recipe(counts=Share(0.5), update=Shrink()).as_dict()
    monkeypatch.delitem(Update.kinds, "shrink")
    with pytest.raises(ValueError, match=r"\.update: unknown value 'shrink'"):
        Recipe.of_dict(tree)


def test_verify_counts_its_weights(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = Shrink.solve

    def all_weights(*arguments: Any) -> Solution:
        solution = solve(*arguments)
        every = torch.ones_like(solution.mask)
        return solution._replace(
            weight=torch.where(solution.mask, solution.weight, 1.0), mask=every
        )

    monkeypatch.setattr(Shrink, "solve", all_weights)
    source = tiny_llama
    how = {"method": "shrink", "sparsity": 0.5, "device_map": "cpu", "check": False}
    prune(model=str(source), calibration=str(text), output=tmp_path / "out", **how, **TEXT)
    assert verify(tmp_path / "out", source=str(source)).differences


def test_rows_are_its_groups(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--group all does not go with method shrink"):
        prune(model=str(tiny_llama), method="shrink", group="all", output=tmp_path / "out")
