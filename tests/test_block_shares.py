"""Shares of the blocks by cost: `--shares cost`."""

import math
from pathlib import Path
from typing import Any

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import check_verified
from stops import stopped
from tiny import weights_of

from emp_llm import ByCost, Recipe, Share, UserError, prune, prune_model, recipe_of
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.pruning import writing
from emp_llm.records.run_report import RunReport
from emp_llm.runs import trials
from emp_llm.runs.trials import ALONE, BlockCost, shares_by_cost

# Of the short demo model, all blocks but the first alike.
COSTS = [BlockCost(block, 1000, (0.1 + (block == 0), 0.3, 0.9)) for block in range(3)]
TEXT: dict[str, Any] = {"calibration": "demo", "samples": 4, "seqlen": 64, "device_map": "cpu"}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.floats(-12, -2), st.floats(2, 20)),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.05, 0.9),
)
def test_the_last_weights_cost_the_same(
    blocks: list[tuple[int, float, float]], total: float
) -> None:
    """Of rises that are exponential: the total is kept, and no weight is cheaper elsewhere."""
    costs = [
        BlockCost(number, size, tuple(math.exp(start + slope * each) for each in ALONE))
        for number, (size, start, slope) in enumerate(blocks)
    ]
    shares = shares_by_cost(costs, total)
    weights = sum(size for size, _, _ in blocks)
    gone = sum(shares[number] * size for number, (size, _, _) in enumerate(blocks))
    assert gone == pytest.approx(total * weights, rel=1e-6)
    prices = {
        number: math.log(slope / size) + start + slope * shares[number]
        for number, (size, start, slope) in enumerate(blocks)
        if start > math.log(1e-6) + 0.01
    }
    inner = [price for number, price in prices.items() if 0 < shares[number] < 0.95]
    if len(prices) == len(blocks) and inner:
        assert max(inner) - min(inner) < 1e-3
        assert all(price > min(inner) - 1e-3 for n, price in prices.items() if shares[n] == 0)
        assert all(price < max(inner) + 1e-3 for n, price in prices.items() if shares[n] >= 0.95)


@pytest.mark.parametrize(
    "how",
    [
        {"method": "wanda", "group": "matrix"},
        {"method": "magnitude"},
        {"method": "admm", "refit": True},
        {"method": "sparsegpt"},
    ],
    ids=["wanda", "magnitude", "admm", "sparsegpt"],
)
def test_a_run(
    how: dict[str, Any], short_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how["method"] != "wanda":  # one run measures
        monkeypatch.setattr(trials, "costs_of_blocks", lambda *_: COSTS)
    report = prune(short_demo, shares="cost", sparsity=0.5, output=tmp_path / "out", **how, **TEXT)
    removed = report.recipe.counts.shares.removed
    assert isinstance(removed, dict)
    assert report.recipe.counts == Share(0.5, ByCost(removed))
    assert report.targets.sparsity_of_targets == pytest.approx(0.5, abs=2e-3)
    assert len(set(removed.values())) > 1
    for name, weight in weights_of(tmp_path / "out").items():
        if name.removesuffix(".weight") in removed:
            assert int((weight == 0).sum()) == removed[name.removesuffix(".weight")]
    assert report.check is not None
    check_verified(tmp_path / "out", short_demo)


def test_a_killed_run_resumes(short_demo: Path, tmp_path: Path) -> None:
    """Killed before the shares are known, and after: the bytes are those of a run in one go."""
    how = {"method": "wanda", "shares": "cost", "sparsity": 0.6, **TEXT}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "costs_of_blocks", lambda *_: COSTS)
        prune(short_demo, output=tmp_path / "whole" / "out", **how)
        how["output"] = tmp_path / "killed" / "out"
        for place, name in ((trials, "shares_by_cost"), (writing, "outcome_of")):
            with stopped(place, name):
                prune(short_demo, **how)
    with pytest.MonkeyPatch.context() as patch:  # what is known is not measured again
        patch.setattr(trials, "costs_of_blocks", None)
        report = prune(short_demo, **how)
    assert isinstance(report.recipe.counts.shares.removed, dict)
    assert len(set(report.recipe.counts.shares.removed.values())) == 2
    assert oracle.shards(tmp_path / "killed" / "out") == oracle.shards(tmp_path / "whole" / "out")
    check_verified(tmp_path / "killed" / "out", short_demo)


def test_a_budget_sets_how_much_goes(
    short_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "costs_of_blocks", lambda *_: COSTS)
    most = 0.9 * Checkpoint(short_demo).elements
    how = {"method": "wanda", "shares": "cost", "parameters": f"{most}", **TEXT}
    report = prune(short_demo, output=tmp_path / "out", **how)
    assert isinstance(report, RunReport)
    assert report.targets.sparsity_of_all_parameters == pytest.approx(0.1, abs=0.001)


def test_offloaded_weights(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    how = {"method": "wanda", "shares": "cost", "samples": 4, "seqlen": 48}
    for place in ("cpu", "disk"):
        report = prune(
            tiny_llama, output=tmp_path / place, calibration=text, device_map=place, **how
        )
        assert isinstance(report, RunReport)
    first, other = (weights_of(tmp_path / place) for place in ("cpu", "disk"))
    assert all((first[name] == other[name]).all() for name in first)


def test_models_in_memory_have_none(tiny_llama: Path) -> None:
    with pytest.raises(UserError, match="it is for the command prune"):
        prune_model(tiny_llama, recipe_of("magnitude", shares="cost"))
    assert recipe_of("magnitude", shares="cost") == Recipe(
        score=recipe_of("magnitude").score, counts=Share(0.5, ByCost())
    )
