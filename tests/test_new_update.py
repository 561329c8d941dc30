"""An update that the package does not know: one class, and it goes through the commands."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import weights_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import prune, prune_model, recipe_of, sweep, verify
from emp_llm.common.errors import UserError
from emp_llm.reporting.card import method_words
from emp_llm.selection.reference import largest_mask, order_keys, pattern_mask
from emp_llm.update.least_squares import Solution
from emp_llm.update.update import SEARCHES, Allowed, Moments, Search

TEXT: dict[str, Any] = {"samples": 4, "seqlen": 64}


@dataclass(frozen=True, kw_only=True)
class Shrink(Search):
    """Keeps the weights with the largest |W| * sqrt(G_jj), at 0.9 of their values."""

    name = "shrink"
    title = "shrunken weights"

    def solve(self, weight: Tensor, moments: Moments, allowed: Allowed, damping: float) -> Solution:
        scores = weight.abs() * moments.gram.diagonal().sqrt()
        if allowed.pattern is not None:
            mask = pattern_mask(order_keys(scores), *allowed.pattern)
        else:
            assert allowed.counts is not None
            mask = largest_mask(scores, allowed.counts)
        return Solution(0.9 * weight * mask, mask, damping)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEARCHES, "shrink", f"{__name__}:Shrink")


@pytest.mark.parametrize(
    "how",
    [
        {"method": "shrink", "sparsity": 0.25},
        {"method": "emp-shrink", "targets": "all-linear"},
        {"method": "shrink", "pattern": "2:4", "refit": True},
    ],
    ids=["fixed", "emp", "pattern and refit"],
)
def test_it_goes_through_the_commands(
    how: dict[str, Any], models: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    source = models("llama")
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
    assert "shrunken weights" in method_words(report.recipe)
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
        rounded = (0.9 * dense[name].float()).to(dense[name].dtype)
        assert torch.equal(pruned[name][kept], rounded[kept])

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(source)
    in_memory = prune_model(model, recipe_of(**how), str(text), tokenizer, **TEXT)
    assert in_memory.record.targets.kept == report.targets.kept
    state = model.state_dict()
    assert torch.equal(state[name], pruned[name])


def test_a_sweep_takes_it(
    models: Callable[[str], Path], text: Path, task_suite: Path, tmp_path: Path
) -> None:
    swept = sweep(
        model=models("llama"),
        methods="shrink,wanda",
        sparsities="0.25",
        suite=str(task_suite.with_name("short.toml")),
        calibration=str(text),
        device_map="cpu",
        output=tmp_path / "sweep",
        **TEXT,
    )
    assert [point.name for point in swept.points] == ["shrink-0.25", "wanda-0.25"]
    report = json.loads(
        (tmp_path / "sweep" / "points" / "shrink-0.25" / "emp_report.json").read_text()
    )
    assert report["fits"]


def test_verify_counts_its_weights(
    models: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = Shrink.solve

    def all_weights(*arguments: Any) -> Solution:
        solution = solve(*arguments)
        every = torch.ones_like(solution.mask)
        return solution._replace(
            weight=torch.where(solution.mask, solution.weight, 1.0), mask=every
        )

    monkeypatch.setattr(Shrink, "solve", all_weights)
    source = models("llama")
    how: dict[str, Any] = {"method": "shrink", "sparsity": 0.5, "device_map": "cpu", "check": False}
    prune(model=str(source), calibration=str(text), output=tmp_path / "out", **how, **TEXT)
    assert verify(tmp_path / "out", source=str(source)).differences


def test_rows_are_its_groups(models: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--group all does not go with method shrink"):
        prune(model=str(models("llama")), method="shrink", group="all", output=tmp_path / "out")
