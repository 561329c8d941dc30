"""`prune --loss`: the largest sparsity within a rise of the perplexity of held-out text."""

import errno
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import oracle
import pytest
import torch
from conftest import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import first_blocks
from transformers import AutoModelForCausalLM

from emp_llm import calibrate, measure, prune, verify
from emp_llm.calibration.data import read_text
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError
from emp_llm.models.loading import load_tokenizer
from emp_llm.options.recipe import Pattern
from emp_llm.options.shared import CalibrationOptions
from emp_llm.options.words import recipe_of
from emp_llm.records.run_report import LossPoint, LossRecord, RunReport
from emp_llm.reporting.run_tables import measure_table
from emp_llm.runs import loss_budget, trials
from emp_llm.runs.loss_budget import LossBudget, next_point, sparsities_of
from emp_llm.runs.prune_run import PruneRun

TEXT: dict[str, Any] = {"calibration": "demo", "samples": 8, "seqlen": 64, "device_map": "cpu"}


@pytest.fixture(scope="module")
def two_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two blocks of the demo model. Read-only."""
    return first_blocks(DEMO, tmp_path_factory.mktemp("demo") / "model", 2)


def pruned(
    model: Path, tmp_path: Path, name: str = "out", **how: Any
) -> tuple[RunReport, LossRecord]:
    """A run."""
    report = prune(model, output=tmp_path / name, **(TEXT | how))
    assert isinstance(report, RunReport)
    assert report.loss is not None
    assert not list(tmp_path.glob(".*"))
    return report, report.loss


@settings(max_examples=300, deadline=None)
@given(
    budget=st.floats(1e-3, 0.5),
    root=st.floats(0.02, 0.9),
    steep=st.floats(4, 30),
)
def test_the_points_of_a_smooth_curve(budget: float, root: float, steep: float) -> None:
    """At most eight, for half a point of sparsity to each side."""
    sparsities = sparsities_of(recipe_of(method="wanda"))
    rises: dict[float, float] = {}
    while (wanted := next_point(sparsities, rises, budget)) is not None:
        assert wanted in sparsities
        assert wanted not in rises
        rises[wanted] = budget * math.exp(steep * (wanted - root))
    assert len(rises) <= 8
    taken = max(each for each, rise in rises.items() if rise <= budget)
    assert root - 0.0101 <= taken <= root + 1e-9


@settings(max_examples=300, deadline=None)
@given(
    budget=st.floats(1e-3, 0.5),
    root=st.floats(0.02, 0.9),
    steep=st.floats(4, 30),
    chance=st.floats(-0.3, 0.3),
)
def test_the_points_of_a_curve_with_a_floor(
    budget: float, root: float, steep: float, chance: float
) -> None:
    """Low sparsities change the loss by chance alone, also downwards."""
    sparsities = sparsities_of(recipe_of(method="wanda"))
    rises: dict[float, float] = {}
    while (wanted := next_point(sparsities, rises, budget, most=40)) is not None:
        rises[wanted] = budget * (chance + (1 - chance) * math.exp(steep * (wanted - root)))
    assert len(rises) <= 10
    taken = max(each for each, rise in rises.items() if rise <= budget)
    assert root - 0.0101 <= taken <= root + 1e-9


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("removed", range(9))
def test_the_patterns_of_a_group(group: int, removed: int) -> None:
    rises: dict[float, float] = {}
    patterns = sparsities_of(recipe_of(method="wanda", pattern=f"1:{group}"))
    assert patterns == [n / group for n in range(1, group)]
    while (wanted := next_point(patterns, rises, 1.0)) is not None:
        rises[wanted] = wanted / (removed / group + 1e-9) if removed else 2.0
    good = [each for each, rise in rises.items() if rise <= 1]
    assert max(good, default=0.0) == min(removed, group - 1) / group


def test_masks_keep_to_the_budget(two_blocks: Path, tmp_path: Path) -> None:
    """The bytes are those of a plain run at the sparsity that it takes; the rise is that of the
    sequences that decide.
    """
    report, loss = pruned(two_blocks, tmp_path, loss="5%", method="wanda")
    assert loss.budget == pytest.approx(math.log(1.05))
    assert report.recipe.counts.sparsity == loss.sparsity
    assert 3 <= len(loss.points) <= 8
    taken = next(each for each in loss.points if each.sparsity == loss.sparsity)
    assert taken.rise + taken.error <= loss.budget
    above = [each for each in loss.points if each.sparsity > loss.sparsity]
    assert min(above, key=lambda each: each.sparsity).sparsity <= loss.sparsity + 0.0101
    assert all(each.rise + each.error > loss.budget for each in above)
    prune(two_blocks, output=tmp_path / "plain", method="wanda", sparsity=loss.sparsity, **TEXT)
    assert oracle.shards(tmp_path / "plain") == oracle.shards(tmp_path / "out")
    assert not verify(tmp_path / "out", source=two_blocks).differences

    how = CalibrationOptions(calibration="demo", samples=8, seqlen=64)
    tokens = read_text(how, load_tokenizer(two_blocks), None, None, 24).held_out
    assert tokens is not None
    assert (loss.sequences, loss.length) == (16, 64)
    deciding = torch.stack([each for number, each in enumerate(tokens) if number % 3 != 2])
    means = []
    for folder in (two_blocks, tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            means.append(float(model(deciding, labels=deciding).loss))
    assert taken.rise == pytest.approx(means[1] - means[0], abs=3e-3)
    assert report.check is not None
    assert report.check.dense.blocks == 8


def test_offloaded_weights(two_blocks: Path, tmp_path: Path) -> None:
    how = {"loss": "5%", "method": "magnitude"}
    _, loss = pruned(two_blocks, tmp_path, "memory", **how)
    _, same = pruned(two_blocks, tmp_path, "disk", **how, device_map="disk")
    assert same.sparsity == loss.sparsity


def check_moved(folder: Path, model: Path, report: RunReport, loss: LossRecord, most: int) -> None:
    """The run that is kept is within the budget, and verified."""
    runs = [each for each in loss.points if each.whole_run]
    assert 1 <= len(runs) <= most
    taken = next(each for each in runs if each.sparsity == loss.sparsity)
    assert taken.rise + taken.error <= loss.budget
    assert any(each.sparsity == loss.sparsity for each in loss.points if not each.whole_run)
    assert report.recipe.update is not None
    assert report.fits
    assert not verify(folder, source=model).differences


def test_weights_that_move(two_blocks: Path, tmp_path: Path) -> None:
    found = pruned(two_blocks, tmp_path, loss="3%", method="emp-admm", refit=True)
    check_moved(tmp_path / "out", two_blocks, *found, most=3)


def test_where_no_whole_run_keeps_to_the_budget(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with few, noisy sequences: what the masks alone allow is removed, instead of nothing."""
    whole = loss_budget._Search._measure_whole

    def noisy(self: Any, sparsity: float) -> Any:
        point = whole(self, sparsity)
        allowed = self._largest(self.budget.nats)
        return point if sparsity <= allowed else msgspec.structs.replace(point, error=1.0)

    monkeypatch.setattr(loss_budget._Search, "_measure_whole", noisy)
    report, loss = pruned(two_blocks, tmp_path, loss="3%", method="wanda", refit=True)
    check_moved(tmp_path / "out", two_blocks, report, loss, most=5)


def test_a_third_run_lies_between_two(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one run goes beyond the budget, and the next uses little of it."""
    sparsities: list[float] = []

    def whole(self: Any, sparsity: float) -> LossPoint:
        sparsities.append(sparsity)
        rise = self.budget.nats * math.exp(18 * (sparsity - sparsities[0] + 0.03))
        return LossPoint(sparsity=sparsity, rise=rise, error=0.0, whole_run=True)

    monkeypatch.setattr(loss_budget._Search, "_measure_whole", whole)
    _, loss = pruned(two_blocks, tmp_path, loss="3%", method="wanda", refit=True)
    assert len(sparsities) == 3
    rises = [each.rise / loss.budget for each in loss.points if each.whole_run]
    assert rises[0] < 0.7 < rises[1] <= 1 < rises[2]
    assert loss.sparsity == sparsities[2]


def test_the_disk_of_whole_runs(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the best run and the one that is made, with the weights that a refit moves; that is
    checked. The best is moved, and made once more if the move was cut off.
    """
    how: dict[str, Any] = {"method": "emp-relative", "refit": True, "refit_weighting": "relative"}
    how |= {"loss": "3%"}
    size = Checkpoint(two_blocks).output_bytes
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(2.3 * size)))
        with pytest.raises(UserError, match=r"--output .*: it needs"):
            pruned(two_blocks, tmp_path, **how)
    most = 0
    whole = loss_budget._Search._measure_whole

    def counted(self: Any, sparsity: float) -> Any:
        nonlocal most
        point = whole(self, sparsity)
        most = max(most, len(list((tmp_path / ".out.loss").glob("removed-*"))))
        return point

    monkeypatch.setattr(loss_budget._Search, "_measure_whole", counted)
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "complete", _cut_off)
        with pytest.raises(KeyboardInterrupt):
            pruned(two_blocks, tmp_path, **how)
    assert 1 <= most <= 2
    assert not list((tmp_path / ".out.loss").glob("removed-*"))
    # The refit helps less than is guessed, and a run goes beyond the budget.
    check_moved(tmp_path / "out", two_blocks, *pruned(two_blocks, tmp_path, **how), most=4)


def _cut_off(folder: OutputFolder) -> None:
    if folder.path.name == "out":
        raise KeyboardInterrupt
    _COMPLETE(folder)


_COMPLETE = OutputFolder.complete


def test_a_disk_that_is_full(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in a sentence at each file of the curve, and the same command resumes."""
    how = {"loss": "4%", "method": "magnitude", "samples": 6}
    write = loss_budget.write_own
    calls = 0
    for fails_at in (1, 2):

        def full(path: Path, value: Any, fails_at: int = fails_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, value)

        calls = 0
        monkeypatch.setattr(loss_budget, "write_own", full)
        with pytest.raises(UserError, match=r"--output .*/out: the disk is full"):
            pruned(two_blocks, tmp_path, **how)
        assert not (tmp_path / "out").exists()
    pruned(two_blocks, tmp_path, **how)


def test_damaged_work_begins_again(
    two_blocks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a warning, whatever stands in the file, and whatever stands in its place."""
    how = {"loss": "4%", "method": "wanda", "samples": 6}
    curve = tmp_path / ".out.loss" / "curve.json"
    keep = loss_budget._Search._keep

    def cut_off(*given: Any) -> None:
        keep(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(loss_budget._Search, "_keep", cut_off)
    told = []
    for damage in (
        lambda: None,
        lambda: curve.write_bytes(b""),
        lambda: curve.write_text(curve.read_text().replace('"points": [', '"points": [5, ')),
        lambda: (curve.unlink(), curve.mkdir()),
        lambda: curve.with_name("activations.safetensors").write_bytes(b"[]"),
    ):
        damage()
        caplog.clear()
        with pytest.raises(KeyboardInterrupt):
            pruned(two_blocks, tmp_path, **how)
        told.append("is damaged (" in caplog.text)
        assert json.loads(curve.read_text())["points"]
    assert told == [False] + 4 * [True]


def test_a_frozen_run_keeps_its_signature(two_blocks: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen: list[PruneRun] = []
        find = loss_budget._find

        def found(*given: Any) -> PruneRun:
            seen.append(find(*given))
            return seen[-1]

        patch.setattr(loss_budget, "_find", found)
        pruned(two_blocks, tmp_path, loss="4%", method="magnitude", samples=6)
    assert not {"loss", "machine", "norms"} & seen[0].signature.keys()


def test_patterns(tmp_path: Path) -> None:
    how = {"method": "wanda", "pattern": "2:4", "seqlen": 128}
    report, loss = pruned(DEMO, tmp_path, loss="6%", **how)
    assert report.recipe.counts == Pattern(3, 4)
    assert loss.sparsity == 0.25
    assert report.targets.sparsity_of_targets == 0.25


@pytest.mark.parametrize(
    "how",
    [
        {"structure": "layers", "loss": "80%"},
        {"structure": "neurons", "method": "magnitude", "width_multiple": 16, "loss": "5%"},
        {"structure": "neurons", "method": "emp-magnitude", "width_multiple": 64, "loss": "20%"},
    ],
)
def test_units(short_demo: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    """Each point is a whole run, and the best one is kept; also in place of an older output."""
    report, loss = pruned(short_demo, tmp_path, **how)
    assert report.structure is not None
    assert all(each.whole_run for each in loss.points)
    taken = next(each for each in loss.points if each.sparsity == loss.sparsity)
    assert taken.rise + taken.error <= loss.budget
    assert report.recipe.counts.sparsity == loss.sparsity
    assert not verify(tmp_path / "out", source=short_demo).differences
    if how["structure"] == "neurons":  # each point is a width of its own
        width = json.loads((tmp_path / "out" / "config.json").read_text())["intermediate_size"]
        assert width == 512 * (1 - loss.sparsity)
        assert all(512 * each.sparsity % how["width_multiple"] == 0 for each in loss.points)
    if how["structure"] == "layers":
        assert loss.sparsity * 3 == pytest.approx(round(loss.sparsity * 3))
        with pytest.raises(UserError, match="it exists"):
            pruned(short_demo, tmp_path, **how)
        _, again = pruned(short_demo, tmp_path, **how, overwrite=True)
        assert again.points == loss.points


@pytest.mark.parametrize("method", ["wanda", "admm"])
def test_a_killed_run_resumes(
    two_blocks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """It says where the work is kept; no point is measured again, and the bytes are the same."""
    how = {"loss": "4%", "method": method, "samples": 6}
    _, whole = pruned(two_blocks, tmp_path, "whole", **how)
    measured = trials.perplexity
    calls = 0

    def killed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return measured(*arguments, **keywords)

    monkeypatch.setattr(trials, "perplexity", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(two_blocks, output=tmp_path / "out", **(TEXT | how))
    assert f"kept in {tmp_path / '.out.loss'}; the same command resumes" in caplog.text
    held = json.loads((tmp_path / ".out.loss" / "curve.json").read_text())
    assert len(held["points"]) == 2
    _, loss = pruned(two_blocks, tmp_path, "out", **how)
    # The dense model once more, and each point once.
    assert calls == 4 + 1 + len(loss.points) - 2
    assert loss.points == whole.points
    assert oracle.shards(tmp_path / "whole") == oracle.shards(tmp_path / "out")


def test_another_file_of_norms_starts_again(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The points of an interrupted run are those of its own masks."""
    short = TEXT | {"samples": 4}
    norms = calibrate(two_blocks, output=tmp_path / "norms.safetensors", **short)
    other = tmp_path / "other.safetensors"
    turned = {
        name: {layer: values.flip(0) for layer, values in of_layers.items()}
        for name, of_layers in norms.statistics.items()
    }
    replace(norms, statistics=turned).save(other)
    how = {"loss": "4%", "method": "wanda", "samples": 6}
    _, whole = pruned(two_blocks, tmp_path, "whole", activations=other, **how)
    with monkeypatch.context() as patch:
        patch.setattr(loss_budget._Search, "_keep", _interrupted(loss_budget._Search._keep))
        with pytest.raises(KeyboardInterrupt):
            prune(
                two_blocks,
                output=tmp_path / "out",
                activations=tmp_path / "norms.safetensors",
                **(TEXT | how),
            )
    _, loss = pruned(two_blocks, tmp_path, "out", activations=other, **how)
    assert loss.points == whole.points


def _interrupted(keep: Any) -> Any:
    def after_keeping(self: Any, point: Any) -> Any:
        keep(self, point)
        raise KeyboardInterrupt

    return after_keeping


def test_the_lines_of_the_command(two_blocks: Path, tmp_path: Path, command: Any) -> None:
    line = ["prune", two_blocks, "--calibration", "demo", "--samples", 8, "--seqlen", 64]
    line += ["--output", tmp_path / "out"]
    found = command(*line, "--method", "wanda", "--loss", "10%")
    assert "% removed: " not in found.stderr, "the table has every point"
    line.append("--quiet")
    assert "held-out tokens" in found.stdout
    assert re.search(r"(?m)^removed +masks alone$", found.stdout)
    assert re.search(r"chosen: [\d.]+ %, the most with rise \+ error <= 10 %", found.stdout)
    assert found.stdout.splitlines()[-1].startswith("held-out text, 8 x 64 tokens: perplexity")
    (tmp_path / "worst.py").write_text(
        "def worst(weights, inputs):\n    return 1 / (weights.float().abs() + 1e-9)\n"
    )
    worst = ["--method", "worst", "--criterion", tmp_path / "worst.py"]
    found = command(*line, "--overwrite", *worst, "--loss", "0.1%", code=2)
    assert "--loss 0.1% removes nothing" in found.stderr
    assert "Allow more, or use --method emp-admm --refit." in found.stderr
    assert "1.0 %: " in found.stderr, "the curve"
    assert not list(tmp_path.glob(".*"))


def test_too_little_for_a_single_unit(two_blocks: Path, tmp_path: Path, command: Any) -> None:
    """The least width that goes is the first point, and nothing is left to resume."""
    line = ["prune", two_blocks, "--calibration", "demo", "--samples", 8, "--seqlen", 64, "--quiet"]
    line += ["--structure", "neurons", "--method", "emp-magnitude", "--width-multiple", 64]
    found = command(*line, "--loss", "0.01%", "--output", tmp_path / "out", code=2)
    assert "--loss 0.01% removes nothing: the least that was tried goes beyond it (12.5 %: +" in (
        found.stderr
    )
    assert "Allow more, or use --refit or a lower --width-multiple." in found.stderr
    assert "+0.00" not in found.stderr
    assert "resumes" not in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "how", [{"method": "wanda"}, {"method": "emp-admm", "refit": True}, {"structure": "neurons"}]
)
def test_a_dry_run_plans_without_counts(tmp_path: Path, how: dict[str, Any]) -> None:
    """How many weights go is not known before the search."""
    plan = prune(DEMO, output=tmp_path / "out", dry_run=True, **(TEXT | {"loss": "2%"} | how))
    assert plan.curve == []
    assert plan.no_curve == ""
    (note,) = [note for note in plan.notes if "--loss 2%" in note]
    assert "found by the run" in note
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [{"method": "wanda"}, {"structure": "neurons"}])
@pytest.mark.parametrize("loss", ["nan", "-1%", "much", "0", "2"])
def test_a_dry_run_refuses_a_wrong_budget(tmp_path: Path, how: dict[str, Any], loss: str) -> None:
    with pytest.raises(UserError, match=f"^--loss .?{loss}"):
        prune(DEMO, output=tmp_path / "out", dry_run=True, **(TEXT | {"loss": loss} | how))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"loss": "0"}, "nothing can be removed"),
        ({"loss": "-1%"}, "is not a rise such as 2%"),
        ({"loss": "much"}, "is not a rise such as 2%"),
        ({"loss": "2"}, "is a rise of 639%. Did you mean 2%? The largest without % is 0.3."),
        ({"loss": "0.31"}, "Did you mean 0.31%?"),
        ({"sparsity": 0.3}, "leave out --sparsity"),
        ({"beta": 0.5}, "leave out --beta"),
        ({"match": "out", "method": "wanda"}, "leave out --match"),
        ({"parameters": "1B"}, "--loss and --parameters"),
        ({"structure": "neurons", "method": "magnitude", "calibration": None}, "reads none"),
        ({"evaluate": "demo"}, "emp-llm evaluate"),
        ({"push_to_hub": "a/b"}, "emp-llm push"),
        ({"load_in_8bit": True}, "--load-in-8bit"),
        ({"check": False}, "leave out --no-check"),
        ({"method": "magnitude", "calibration": None}, "Name one with --calibration"),
        ({"samples": 410, "seqlen": 128}, "fewer --samples"),
    ],
)
def test_bad_input(two_blocks: Path, tmp_path: Path, how: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        prune(two_blocks, output=tmp_path / "out", **(TEXT | {"loss": "2%"} | how))
    assert said in str(error.value)
    assert not list(tmp_path.iterdir())


def test_budgets() -> None:
    assert LossBudget.of("2%").nats == pytest.approx(math.log(1.02))
    assert LossBudget.of("0.02").nats == LossBudget.of(0.02).nats == 0.02
    assert LossBudget.of("1.5 %".replace(" ", "")).flag == "--loss 1.5%"


def test_the_output_is_checked_before_anything_is_computed(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_budget, "calibrate", lambda *_, **__: pytest.fail("computed"))
    how = TEXT | {"loss": "2%", "method": "wanda", "output": tmp_path / "out"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="it exists"):
        prune(two_blocks, **how)
    (tmp_path / "out" / "mine.txt").rename(tmp_path / "mine.txt")
    (tmp_path / "out").rmdir()
    (tmp_path / ".out.loss").mkdir()
    (tmp_path / "mine.txt").rename(tmp_path / ".out.loss" / "mine.txt")
    with pytest.raises(UserError, match="did not put there"):
        prune(two_blocks, **how)
    assert (tmp_path / ".out.loss" / "mine.txt").read_text() == "mine"


def test_a_ruined_model_is_beyond_every_budget(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = trials.perplexity
    calls = 0

    def ruined(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        found = measured(*arguments, **keywords)
        # The first point after the dense model.
        return msgspec.structs.replace(found, perplexity=None) if calls == 2 else found

    monkeypatch.setattr(trials, "perplexity", ruined)
    _, loss = pruned(two_blocks, tmp_path, loss="5%", method="magnitude")
    assert max(loss.points, key=lambda each: each.rise).rise > 100
    assert loss.sparsity < 0.3


def test_measure_what_can_go(two_blocks: Path, tmp_path: Path) -> None:
    """The table of a model: what `prune --loss` finds, for every criterion and budget."""
    asked: dict[str, Any] = {"loss": "5%,1%", "criteria": "wanda", "betas": "1"}
    found = measure(two_blocks, output=tmp_path / "m.json", **asked, **TEXT)
    assert [each.method for each in found.losses] == ["wanda", "emp-wanda"]
    for each in found.losses:
        small, large = each.budgets
        assert (small.flag, large.flag) == ("--loss 1%", "--loss 5%")
        for entry in each.budgets:
            assert entry.point is not None
            assert entry.point.most <= entry.budget
        assert small.point is not None
        assert large.point is not None
        assert small.point.sparsity < large.point.sparsity
        assert (small.packed_bytes or 0) > (large.packed_bytes or 0) > 0
    wanda = found.losses[0]
    _, record = pruned(two_blocks, tmp_path, method="wanda", loss="1%")
    first = wanda.budgets[0].point
    assert first is not None
    assert abs(record.sparsity - first.sparsity) <= 0.02
    assert {point.sparsity: point.rise for point in wanda.points}[first.sparsity] == pytest.approx(
        first.rise
    )
    assert "removed % of the targets within" in measure_table(found)
    assert not list(tmp_path.glob(".m.json*"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"loss": "no"}, "--loss 'no' is not a rise such as 2% of the perplexity"),
        ({"loss": "1%,"}, "expected values separated by commas"),
        ({"loss": "1%,2"}, "--loss 2: .* Did you mean 2%"),
        ({"loss": "0%"}, "nothing can be removed without a rise"),
        ({"loss": "1%", "samples": 10_000}, "too short for 10000 samples"),
        (
            {"loss": "1%", "activations": "norms", "calibration": None},
            "--activations holds only norms. Name the text",
        ),
    ],
)
def test_wrong_budgets_of_measure(
    how: dict[str, Any], said: str, two_blocks: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        measure(two_blocks, output=tmp_path / "m.json", **(TEXT | how))
