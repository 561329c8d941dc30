"""Healing: kept weights that learn the dense model's probabilities, in runs of commands and in
memory.
"""

import copy
import errno
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
import tiny
import torch
import torture
import transformers
from accelerate import cpu_offload
from launch import launch
from safetensors.torch import load_file, save_file
from tiny import weights_of
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from emp_llm import (
    Admm,
    Heal,
    Magnitude,
    Pattern,
    Recipe,
    Refit,
    heal,
    heal_model,
    pack,
    prune,
    prune_model,
    recipe_of,
    sweep,
    verify,
)
from emp_llm.calibration.data import CHOOSING, read_text
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import file_hash, write_own
from emp_llm.common import machine
from emp_llm.common.errors import UserError, format_bytes
from emp_llm.common.ranks import ranks
from emp_llm.healing import adam, blocks, memory, progress
from emp_llm.healing import training as healing
from emp_llm.healing.adam import rate_of
from emp_llm.healing.checks import sequences_for, set_aside
from emp_llm.healing.progress import Measure, Progress
from emp_llm.models import blockwise
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Step
from emp_llm.models.loading import load_tokenizer
from emp_llm.models.masks import Masks
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.pruning import updates
from emp_llm.records.base import read_record
from emp_llm.records.run_report import RunReport
from emp_llm.reporting.run_tables import check_lines, healing_lines
from emp_llm.walk.moved import MovedWeights

Models = Callable[[str], Path]
STEPS = 4


class _Killed(BaseException):
    pass


def kill_in_step(number: int, error: type[BaseException] = _Killed) -> Callable[..., torch.Tensor]:
    """`_Healer.step`, which raises in its `number`-th call."""
    calls = 0
    step = healing._Healer.step

    def killed(self: Any, numbers: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return step(self, numbers)

    return killed


@pytest.fixture(scope="module")
def given(text: Path) -> dict[str, Any]:
    return {"calibration": str(text), "samples": 10, "seqlen": 32, "device_map": "cpu"}


@pytest.fixture(scope="module")
def short(given: dict[str, Any]) -> dict[str, Any]:
    """Wanda, and a healing of a few steps."""
    return given | {"method": "wanda", "heal": True, "heal_steps": STEPS}


@pytest.fixture(scope="module")
def whole(models: Models, short: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `out`, the tiny Llama after a run of `short` that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    prune(models("llama"), output=folder / "out", **short)
    return folder


@pytest.fixture(scope="module")
def killed(models: Models, short: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run that ended with its third step. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        killed_in_third_step(models("llama"), folder / "out", patch, **short)
    return folder


def pruned_and_healed(model: Path, folder: Path, **how: Any) -> tuple[Path, Path, RunReport]:
    """A model pruned by a recipe, the same healed, and the report of the second."""
    plain = folder / "plain"
    healed = folder / "healed"
    prune(
        model,
        output=plain,
        **{name: value for name, value in how.items() if not name.startswith("heal")},
    )
    report = prune(model, output=healed, heal=True, heal_steps=how.pop("heal_steps", STEPS), **how)
    assert isinstance(report, RunReport)
    return plain, healed, report


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt", "mixtral"])
def test_zeros_stay_and_kept_weights_move(
    models: Models, given: dict[str, Any], tmp_path: Path, family: str
) -> None:
    how = given | {"method": "wanda", "targets": "all-linear", "min_expert_tokens": 0}
    plain, healed, report = pruned_and_healed(models(family), tmp_path, **how)
    before = weights_of(plain)
    after = weights_of(healed)
    targets = {entry.tensor for entry in report.matrices.values()}
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if name in targets:
            assert bool((after[name][weight == 0] == 0).all())
            assert not torch.equal(weight, after[name])
        else:
            assert torch.equal(weight, after[name])
    curve = {int(step): loss for step, loss in report.healing.curve}
    assert list(curve) == list(range(STEPS + 1))
    assert report.healing.best > 0
    assert curve[report.healing.best] == min(curve.values()) < curve[0]
    # The written weights are those of the best step: their divergence is the one in the curve.
    tokens = healing_tokens(models(family), given, STEPS)
    held = tokens[-set_aside(len(tokens)) :]
    loaded = [
        AutoModelForCausalLM.from_pretrained(folder) for folder in (models(family), healed, plain)
    ]
    with torch.no_grad():
        p, q, r = (model(held).logits.double().log_softmax(-1) for model in loaded)
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(
        curve[report.healing.best], rel=0.1
    )
    # So are the perplexities of the same sequences.
    for name, logs in {"dense": p, "after": q, "before": r}.items():
        loss = -logs[:, :-1].gather(2, held[:, 1:, None]).mean()
        assert report.healing.perplexity[name] == pytest.approx(float(loss.exp()), rel=0.02)
    assert (report.healing.origin.execution, report.healing.origin.seed) == ("model", 0)
    (line,) = healing_lines(report)
    # One text judges, and one name is given to it: that of `check_lines`.
    assert line.endswith(f"on the sequences that chose step {report.healing.best}")
    assert "perplexity" not in line
    assert report.check is not None
    assert len(check_lines(report)) == 1
    assert verify(healed, source=str(models(family))).differences == []


def healing_tokens(model: Path, given: dict[str, Any], steps: int) -> torch.Tensor:
    """What a healing of so many steps trains on, and chooses by."""
    how = CalibrationOptions(
        calibration=given["calibration"], samples=given["samples"], seqlen=given["seqlen"]
    )
    wanted = sequences_for(steps)
    return read_text(how, load_tokenizer(model), None, training=wanted).for_training.tokens


def test_a_training_reads_new_text(
    models: Models,
    given: dict[str, Any],
    short: dict[str, Any],
    whole: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As many sequences as its steps visit, and none of those by which the run is judged. Where the
    text ends, it says how often each is read.
    """
    report = read_record(whole / "out" / "emp_report.json", RunReport)
    assert report.healing.origin.text.samples == sequences_for(STEPS)
    assert report.calibration.text.samples == given["samples"]
    tokenizer = load_tokenizer(models("llama"))
    options = CalibrationOptions(**{name: given[name] for name in ("calibration", "seqlen")})
    options = replace(options, samples=10)
    text = read_text(options, tokenizer, None, training=30)
    every = read_text(replace(options, samples=38), tokenizer, None).tokens
    assert text.held_out is not None
    assert torch.equal(text.tokens, every[:10])
    assert torch.equal(text.held_out, every[10:18])
    assert torch.equal(text.for_training.tokens, torch.cat([every[:10], every[18:38]]))
    few = tmp_path / "few.txt"
    few.write_text(Path(given["calibration"]).read_text()[:500])
    with caplog.at_level("INFO"):
        prune(models("llama"), output=tmp_path / "out", **short | {"calibration": str(few)})
    assert re.search(r"trains on \d+ sequences, each up to \d+ times", caplog.text)


def test_a_search_by_loss_heals_on_no_sequence_that_judges_it(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Mock(side_effect=healing.train)
    monkeypatch.setattr(healing, "train", train)
    how = given | {"method": "wanda", "heal": True, "heal_steps": STEPS}
    prune(models("llama"), loss="5%", output=tmp_path / "out", **how)
    options = CalibrationOptions(
        calibration=given["calibration"], samples=given["samples"] + CHOOSING, seqlen=32
    )
    every = read_text(options, load_tokenizer(models("llama")), None).tokens
    judges = set(map(tuple, every[given["samples"] :].tolist()))
    assert train.call_args_list
    for call in train.call_args_list:
        trained = set(map(tuple, call.args[2].tolist()))
        assert len(trained) > given["samples"]
        assert not trained & judges


def test_all_texts_of_a_mix_are_held_out(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the refit, by the healing of the whole model, and by blocks."""
    for name in "ab":
        text = " ".join(f"{name}{number}" for number in range(700))
        (tmp_path / f"{name}.txt").write_text(text)
    mix = f"{tmp_path}/a.txt:20,{tmp_path}/b.txt:12"
    tokens = []
    for owner, name, place in (
        (updates, "move_weights", "tokens"),
        (healing, "train", 2),
        (healing, "heal_blocks", 3),
    ):
        spy = Mock(side_effect=getattr(owner, name))
        monkeypatch.setattr(owner, name, spy)
        tokens.append((spy, place))
    how = {"method": "wanda", "refit": True, "heal": True, "heal_steps": 11, "seqlen": 32}
    for device_map in ("cpu", "disk"):
        out = tmp_path / device_map
        prune(models("llama"), calibration=mix, output=out, device_map=device_map, **how)
    tokenizer = load_tokenizer(models("llama"))
    options = CalibrationOptions(calibration=f"{tmp_path}/a.txt", samples=60, seqlen=32)
    of_a = set(map(tuple, read_text(options, tokenizer, None).tokens.tolist()))
    for spy, place in tokens:
        (call, *_) = spy.call_args_list
        trained = call.kwargs[place] if isinstance(place, str) else call.args[place]
        held = [tuple(row) in of_a for row in trained[-set_aside(len(trained)) :].tolist()]
        assert len(held) >= 2
        assert set(held) == {True, False}


def test_a_healing_says_why_it_is_not_checked(
    models: Models, given: dict[str, Any], tmp_path: Path
) -> None:
    dense = models("llama")
    plain = prune(dense, output=tmp_path / "plain", method="magnitude", device_map="cpu")
    assert plain.unchecked == "give --calibration"
    few = tmp_path / "few.txt"
    few.write_text(Path(given["calibration"]).read_text()[:340])
    for text, says in ((few, "the text ends"), (given["calibration"], None)):
        how = given | {"calibration": str(text), "heal_steps": 1, "overwrite": True}
        report = heal(tmp_path / "plain", dense=str(dense), output=tmp_path / "out", **how)
        if says is None:
            assert report.unchecked is None
        else:
            assert report.check is None
            assert check_lines(report)[0].startswith(f"damage not measured: {says}")


@pytest.mark.parametrize("separable", [True, False])
def test_the_loss_is_the_divergence(models: Models, separable: bool) -> None:
    """Against numpy in float64; whether the dense blocks run once for each sequence, or each
    time.
    """
    dense, model = (
        AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.float32) for _ in range(2)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    ids = torch.arange(24).reshape(2, 12)
    order = [1, 0]
    with healing._DenseLogits(dense, ids) as dense_logits:
        if not separable:
            dense_logits._runner = None
        dense_logits._keep("training", order)
        healer = healing._Healer(model, dense_logits, ids, None, 2, False)  # type: ignore[arg-type]
        logits, wanted = healer._logits(order)
    divergence = healer._divergence(logits, wanted).detach() / ids.numel()
    with torch.no_grad():
        assert torch.equal(wanted, dense(ids)[0][order])
        p, q = (one(ids).logits.double().numpy() for one in (dense, model))
    p, q = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)) for logits in (p, q))
    assert float(divergence) == pytest.approx(float((np.exp(p) * (p - q)).sum(-1).mean()), rel=1e-5)


def test_the_command_makes_the_bytes_of_prune(
    models: Models, given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how = given | {"method": "admm", "refit": True, "pattern": "2:4"}
    plain, healed, report = pruned_and_healed(models("llama"), tmp_path, **how)
    caplog.set_level("INFO")
    (plain / ".git").mkdir()
    (plain / ".git" / "config").write_text("a token")
    (plain / ".env").symlink_to("/etc/hostname")
    (plain / "pytorch_model.bin").write_bytes(b"a pickle")
    (plain / "emp_llm").mkdir(exist_ok=True)
    (plain / "emp_llm" / ".secret.json").symlink_to("/etc/hostname")
    manifest = json.loads((plain / "emp_manifest.json").read_text())
    manifest["files"]["emp_llm/.secret.json"] = {"bytes": 1, "blake3": "0" * 64}
    (plain / "emp_manifest.json").write_text(json.dumps(manifest))
    again = heal(
        plain, dense=str(models("llama")), output=tmp_path / "again", heal_steps=STEPS, **given
    )
    assert oracle.shards(healed) == oracle.shards(tmp_path / "again")
    written = {path.name for path in (tmp_path / "again").rglob("*")}
    assert not written & {".git", "config", ".env", "pytorch_model.bin", ".secret.json"}
    assert again.recipe == report.recipe
    assert again.healing.command is not None
    assert again.healing.curve == report.healing.curve if report.healing is not None else False
    assert verify(tmp_path / "again", source=str(models("llama"))).differences == []
    assert "again is healed: its kept weights may differ" in caplog.text
    for weight in (matrix for name, matrix in weights_of(healed).items() if "mlp" in name):
        assert int((weight.reshape(-1, 4) != 0).sum(1).max()) <= 2
    assert "healed" in again.recipe.words
    with pytest.raises(UserError, match="fitted, healed or trained"):
        pack(healed, tmp_path / "mask", mask_only=True)
    pack(healed, tmp_path / "packed")
    from emp_llm import unpack

    unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert torture.snapshot(tmp_path / "unpacked") == torture.snapshot(healed)


def test_a_killed_healing_resumes(
    models: Models, short: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("mixtral")
    prune(model, output=tmp_path / "whole" / "out", **short)
    killed_in_third_step(model, tmp_path / "killed" / "out", monkeypatch, **short)
    kept = tmp_path / "killed" / ".out.partial" / "healing"
    assert {path.name for path in kept.iterdir()} == {"step-2", "progress.json"}
    visits = []
    step = healing._Healer.step
    monkeypatch.setattr(
        healing._Healer, "step", lambda self, numbers: (visits.append(numbers), step(self, numbers))
    )
    prune(model, output=tmp_path / "killed" / "out", **short)
    assert len(visits) == STEPS - 2
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(tmp_path / "whole")


@pytest.mark.parametrize("healer", ["prune", "heal"])
def test_a_healing_resumes_with_its_seed(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    healer: str,
) -> None:
    """The seed orders the sequences, also those of a text that is not shuffled."""
    source = models("llama")
    how = given | {"output": tmp_path / "out", "heal_steps": STEPS}
    call = partial(prune, source, method="magnitude", heal=True, **how)
    if healer == "heal":
        prune(source, method="magnitude", output=tmp_path / "plain")
        call = partial(heal, tmp_path / "plain", dense=str(source), **how)
    with monkeypatch.context() as patch:
        patch.setattr(healing._Healer, "step", kill_in_step(3))
        with pytest.raises(_Killed):
            call()
    with pytest.raises(UserError, match=r"holds the work of an unfinished run with .*seed"):
        call(seed=1)
    assert (tmp_path / ".out.partial" / "healing" / "step-2").is_dir()
    call(seed=0)


def test_checkpoints_are_written_beside_the_training_of_a_gpu(
    models: Models,
    short: dict[str, Any],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With copies of the weights as they were: the training goes on while they are written."""
    monkeypatch.setattr(adam.Adam, "on_cpu", False)
    writers = set[str]()
    write = progress.Progress._write

    def slow(self: Any, *rest: Any) -> None:
        writers.add(threading.current_thread().name)
        time.sleep(0.2)
        write(self, *rest)

    monkeypatch.setattr(progress.Progress, "_write", slow)
    killed_in_third_step(models("llama"), tmp_path / "killed" / "out", monkeypatch, **short)
    prune(models("llama"), output=tmp_path / "killed" / "out", **short)
    assert {name.partition("_")[0] for name in writers} == {"emp-llm-healing"}
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(whole)


def test_less_memory_changes_nothing_but_rounding(
    models: Models,
    short: dict[str, Any],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradient checkpointing, four sequences at a time, and a dense model that runs for a few
    sequences at a time.
    """
    plain = read_record(whole / "out" / "emp_report.json", RunReport)
    monkeypatch.setattr(memory, "down_from", lambda most: [4])
    monkeypatch.setattr(healing, "_PIECE", 1)
    planned = memory._whole

    def checkpointing(*given: Any) -> Any:
        return replace(planned(*given), checkpointing=True)  # type: ignore[type-var]

    monkeypatch.setattr(memory, "_whole", checkpointing)
    walks = list[int]()
    keep = healing._DenseLogits._keep
    monkeypatch.setattr(
        healing._DenseLogits,
        "_keep",
        lambda self, name, numbers: (walks.append(len(numbers)), keep(self, name, numbers))[1],
    )
    less = prune(models("llama"), output=tmp_path / "less", **short)
    for report in (plain, less):
        assert report.healing is not None
    assert len(walks) > 2  # of the held-out text, and of pieces
    assert max(walks) <= 4
    for (_, loss), (_, other) in zip(plain.healing.curve, less.healing.curve, strict=True):
        assert loss == pytest.approx(other, rel=0.02)


def killed_in_third_step(
    model: Path, output: Path, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> None:
    """A healing with a checkpoint after two steps."""
    with monkeypatch.context() as patch:
        patch.setattr(healing._Healer, "step", kill_in_step(3))
        with pytest.raises(_Killed):
            prune(model, output=output, **how)


def test_a_healing_that_is_killed_after_its_last_checkpoint(
    models: Models,
    short: dict[str, Any],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains no step more, however often it is killed there."""

    def kill(self: Any, step: int) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "load", kill)
        for _ in range(2):
            with pytest.raises(_Killed):
                prune(models("llama"), output=tmp_path / "killed" / "out", **short)
    report = prune(models("llama"), output=tmp_path / "killed" / "out", **short)
    assert report.healing.steps == STEPS
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(whole)


PART = "00000.safetensors"


def cut(folder: Path) -> None:
    path = folder / PART
    path.write_bytes(path.read_bytes()[:1000])


def change_a_bit(folder: Path) -> None:
    path = folder / PART
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def reshape(folder: Path) -> None:
    path = folder / PART
    save_file(
        {name: values.flatten()[:1].clone() for name, values in load_file(path).items()}, path
    )


def reshape_with_its_hash(folder: Path) -> None:
    reshape(folder)
    path = folder.parent / "progress.json"
    record = json.loads(path.read_text())
    del record["blake3"]
    record["files"][f"{folder.name}/{PART}"] = file_hash(folder / PART)
    write_own(path, record)


@pytest.mark.parametrize("damage", [cut, change_a_bit, reshape_with_its_hash])
def test_a_damaged_checkpoint_of_a_healing(
    models: Models,
    short: dict[str, Any],
    whole: Path,
    killed: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    """The training begins again, and ends with the same bytes."""
    shutil.copytree(killed, tmp_path / "killed")
    damage(tmp_path / "killed" / ".out.partial" / "healing" / "step-2")
    prune(models("llama"), output=tmp_path / "killed" / "out", **short)
    assert "is damaged" in caplog.text
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(whole)


def test_killed_while_healed_weights_are_written(
    models: Models,
    short: dict[str, Any],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights that the training began with are gone, and are written again."""
    calls = []

    def overwrite(matrix: Any, weight: torch.Tensor) -> None:
        calls.append(matrix)
        if len(calls) == 3:
            raise KeyboardInterrupt
        plain(matrix, weight)

    plain = healing._overwrite
    with monkeypatch.context() as patch:
        patch.setattr(healing, "_overwrite", overwrite)
        with pytest.raises(KeyboardInterrupt):
            prune(models("llama"), output=tmp_path / "killed" / "out", **short)
    shutil.copytree(tmp_path / "killed", tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost" / ".out.partial" / "healing")
    (tmp_path / "lost" / ".out.partial" / "healing").touch()
    for name in ("lost", "killed"):
        prune(models("llama"), output=tmp_path / name / "out", **short)
        assert torture.snapshot(tmp_path / name) == torture.snapshot(whole)


def test_a_disk_that_is_full_in_the_training(
    models: Models,
    short: dict[str, Any],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint that is not whole is not taken up."""
    write = progress.write_bytes
    second = tmp_path / "full" / ".out.partial" / "healing" / "step-2"

    def fail(path: Path, content: bytes) -> None:
        if path.parent == second:
            write(path, content[:100])
            raise OSError(errno.ENOSPC, "full")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(progress, "write_bytes", fail)
        with pytest.raises(
            UserError,
            match=r"full/out: the disk is full.*the same command resumes",
        ):
            prune(models("llama"), output=tmp_path / "full" / "out", **short)
    prune(models("llama"), output=tmp_path / "full" / "out", **short)
    assert torture.snapshot(tmp_path / "full") == torture.snapshot(whole)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with larger weights, whose probabilities differ from each other, so that neurons
    matter.
    """
    name, values = tiny.FAMILIES["llama"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "sharp", (name, values | {"initializer_range": 0.2}))
        return tiny.make_model(tmp_path_factory.mktemp("sharp") / "model", "sharp")


def test_structures_heal(sharp: Path, given: dict[str, Any], tmp_path: Path) -> None:
    how = given | {"structure": "neurons", "sparsity": 0.25, "width_multiple": 8}
    prune(sharp, output=tmp_path / "plain", **how)
    plain = weights_of(tmp_path / "plain")
    for weights in ("targets", "all"):
        out = tmp_path / weights
        prune(sharp, output=out, heal=True, heal_steps=10, heal_weights=weights, **how)
        assert verify(out, source=str(sharp)).differences == []
        healed = weights_of(out)
        changed = {name for name, weight in plain.items() if not torch.equal(weight, healed[name])}
        assert any("mlp.down_proj" in name for name in changed)
        assert any("self_attn" in name for name in changed) == (weights == "all")
        assert any("layernorm" in name for name in changed) == (weights == "all")
        assert not any("embed" in name or "lm_head" in name for name in changed)


def test_experts_heal(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without products of bfloat16."""
    monkeypatch.setattr(machine, "cpu_fields", lambda: {"flags": "sse2 avx2 f16c"})
    assert not machine.has_bfloat16(torch.device("cpu"))
    how = {"structure": "experts", "sparsity": 0.5, "method": "reap"}
    how |= {"heal": True, "heal_steps": STEPS, "seed": 7}
    report = prune(models("mixtral"), output=tmp_path / "out", **given, **how)
    assert report.healing.best > 0
    assert verify(tmp_path / "out", source=str(models("mixtral"))).differences == []


def test_block_by_block(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on the disk; killed in the second block, and resumed after the first."""
    how = given | {
        "method": "wanda",
        "targets": "all-linear",
        "device_map": "disk",
        "heal_steps": STEPS,
    }
    plain, healed, report = pruned_and_healed(models("llama"), tmp_path, **how)
    assert report.healing.by == "blocks"
    (_, before), (_, after) = report.healing.curve
    assert after < before
    then = weights_of(healed)
    for name, weight in weights_of(plain).items():
        assert bool((then[name][weight == 0] == 0).all()) or "norm" in name
    assert verify(healed, source=str(models("llama"))).differences == []
    put = MovedWeights.put
    numbers = list[int]()

    def kill(self: MovedWeights, number: int, moved: Any) -> None:
        if number == 1:
            raise _Killed
        put(self, number, moved)

    (tmp_path / "killed").mkdir()
    options = how | {"heal": True, "output": tmp_path / "killed" / "out"}
    with monkeypatch.context() as patch:
        patch.setattr(MovedWeights, "put", kill)
        with pytest.raises(_Killed):
            prune(models("llama"), **options)
    run = blocks._heal
    monkeypatch.setattr(
        blocks,
        "_heal",
        lambda block, *rest: (numbers.append(block.step.index), run(block, *rest))[1],
    )
    prune(models("llama"), **options)
    assert numbers == [1]
    (tmp_path / "whole").mkdir()
    shutil.move(healed, tmp_path / "whole" / "out")
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(tmp_path / "whole")


def test_a_block_whose_outputs_are_not_finite(
    models: Models, given: dict[str, Any], tmp_path: Path
) -> None:
    """Values of float16 end at 65504; in float32 the same model heals."""
    model = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3e5)
        for layer in (model.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.gate_proj):
            layer.weight.mul_(1e2)
    model.half().save_pretrained(tmp_path / "model")
    tiny.make_tokenizer().save_pretrained(tmp_path / "model")
    how = given | {"method": "magnitude", "heal": True, "heal_steps": 2}
    how |= {"device_map": "disk", "output": tmp_path / "out"}
    with pytest.raises(UserError, match=r"model\.layers\.1 are not finite.*--dtype float32"):
        prune(tmp_path / "model", **how, dtype="float16")
    report = prune(tmp_path / "model", **how, dtype="float32", overwrite=True)
    assert report.healing is not None


def test_too_little_memory_for_the_whole_model(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would be killed in the training. An interrupted run keeps its way, whatever memory is
    free then.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    free = 400_000  # enough for a block
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    how = given | {"device_map": "auto", "method": "wanda", "heal": True, "heal_steps": 1}
    run = blocks._heal

    def kill(*_: Any) -> Any:
        raise _Killed

    monkeypatch.setattr(blocks, "_heal", kill)
    with pytest.raises(_Killed):
        prune(models("llama"), output=tmp_path / "out", **how)
    monkeypatch.setattr(blocks, "_heal", run)
    free = 10**12
    with caplog.at_level("INFO"):
        report = prune(models("llama"), output=tmp_path / "out", **how)
    assert report.healing.by == "blocks"
    assert "healing block by block, " in caplog.text
    whole = prune(models("llama"), output=tmp_path / "whole", **how)  # now there is enough
    assert whole.healing.by == "model"
    assert whole.healing.best == 1  # a single step has a rate
    free = 400_000
    with pytest.raises(UserError, match="--heal-weights all needs the whole model"):
        prune(models("llama"), output=tmp_path / "all", heal_weights="all", **how)
    # Steps that minutes have chosen are those of the whole model, not of each block.
    prune(models("llama"), output=tmp_path / "plain", method="magnitude")
    timed = given | {"device_map": "auto", "heal_minutes": 5.0}

    def less_memory(*_: Any, **how: Any) -> int:
        nonlocal free
        free = 400_000
        return STEPS

    monkeypatch.setattr(healing, "steps_of_minutes", less_memory)
    for command in (
        partial(prune, models("llama"), method="wanda", heal=True, output=tmp_path / "timed"),
        partial(heal, tmp_path / "plain", dense=str(models("llama")), output=tmp_path / "healed"),
    ):
        free = 10**12
        with pytest.raises(UserError, match=r"block by block.* Give --heal-steps, which are those"):
            command(**timed)
    free = 1000
    calibrate = Mock()
    monkeypatch.setattr("emp_llm.calibration.passes.calibrated", calibrate)
    with pytest.raises(
        UserError, match=r"cpu has 1.0 kB; block by block it takes .* Lower --seqlen"
    ):
        prune(models("llama"), output=tmp_path / "none", **how)
    calibrate.assert_not_called()  # it is known before the first pass


def test_memory_that_runs_out_in_the_training(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence names what takes less; and if memory is free again, the same command resumes."""
    prune(models("llama"), output=tmp_path / "plain", method="wanda", **given)
    how = given | {"dense": str(models("llama")), "heal_steps": STEPS}
    for number, (part, options, remedy) in enumerate(
        [
            ((healing._Healer, "step"), {}, "1 sequence .* Lower --seqlen, or give --device-map d"),
            ((blocks, "_heal"), {"device_map": "disk"}, "4 sequences .* Lower --batch-size, then"),
            (
                (healing._Healer, "step"),
                {"heal_steps": None, "heal_minutes": 5.0},
                "Lower --seqlen",
            ),
        ]
    ):
        command = partial(heal, tmp_path / "plain", output=tmp_path / f"{number}", **how | options)
        with monkeypatch.context() as patch:
            patch.setattr(*part, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
            with pytest.raises(
                UserError, match=rf"^(healing|--heal-minutes): .* on cpu .*{remedy}"
            ):
                command()
        if number < 2:
            command()
            assert verify(tmp_path / f"{number}", source=str(models("llama"))).differences == []


@pytest.mark.parametrize("instructions", [True, False])
def test_a_layer_that_no_batch_calls(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instructions: bool,
) -> None:
    """As an expert that no token reaches: it keeps its weights, and the others heal. With and
    without bfloat16 products.
    """
    for module in (healing, memory):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: instructions)
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)))
    )
    how = given | {"method": "magnitude", "targets": "mlp", "device_map": "disk"}
    plain, healed, _ = pruned_and_healed(models("llama"), tmp_path, **how)
    after = weights_of(healed)
    changed = {
        name for name, weight in weights_of(plain).items() if not torch.equal(weight, after[name])
    }
    assert {name.split(".")[4] for name in changed} == {"gate_proj", "down_proj"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_norms_heal_in_bfloat16_too(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """torch's layer_norm takes no weight of another dtype than its input's."""
    for module in (healing, memory):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: True)
    how = given | {"method": "magnitude", "heal_weights": "all"}
    plain, healed, _ = pruned_and_healed(models(family), tmp_path, **how)
    after = weights_of(healed)
    norms = {name: weight for name, weight in weights_of(plain).items() if weight.dim() == 1}
    assert any(not torch.equal(weight, after[name]) for name, weight in norms.items())


@pytest.mark.parametrize(
    ("fields", "has"),
    [
        ({"flags": "avx2 avx512f avx512_bf16"}, True),
        ({"flags": "avx2 amx_bf16"}, True),
        ({"Features": "asimd i8mm bf16"}, True),
        ({"flags": "avx2 avx512f"}, False),
        ({"Features": "asimd"}, False),
        ({}, False),
    ],
)
def test_processors_with_products_of_bfloat16(
    fields: dict[str, str], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_fields", lambda: fields)
    assert machine.has_bfloat16(torch.device("cpu")) == has


@hypothesis.given(st.lists(st.integers(-(2**31) + 2**24, 2**31 - 2**24), min_size=1))
def test_a_weight_in_two_halves(bits: list[int]) -> None:
    """The upper half is the nearest bfloat16, and both together are the weight, to the bit."""
    value = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    value = torch.where(value.isfinite() & (value.abs() < 1e38), value, 0.0)
    upper, lower = adam._halves(value)
    assert upper.dtype == torch.bfloat16
    assert lower.dtype == torch.int16
    again = (upper.view(torch.int16).int() << 16).add(lower).view(torch.float32)
    assert torch.equal(again.view(torch.int32), value.view(torch.int32))
    nearest = value.bfloat16().float()
    assert bool(((upper.float() - value).abs() <= (nearest - value).abs()).all())


def test_a_step_unpacks_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """`name in masks` unpacked it on the CPU: a third of the time of a step on a GPU."""
    model = nn.ModuleDict({"a": nn.Linear(32, 8, bias=False)})
    masks = Masks({"a.weight": torch.rand(8, 32) < 0.5})
    masks.apply(model)
    optimizer = adam.Adam(dict(model.named_parameters()), masks, 1e-2)
    monkeypatch.setattr(Masks, "__getitem__", Mock(side_effect=AssertionError))
    optimizer.begin()
    model["a"](torch.ones(2, 32)).square().sum().backward()
    optimizer.end()
    assert 0 < int(model["a"].weight.ne(0).sum()) < 8 * 32


@pytest.mark.parametrize("halved", [False, True])
def test_small_steps_add_up(halved: bool) -> None:
    """A step of a ten-thousandth is lost in bfloat16 alone. Adam in float64 is beside it."""
    layer = torch.nn.Linear(4, 3, bias=False)
    start = torch.linspace(0.5, 1.5, 12).reshape(3, 4)
    start[0, 0] = 0.0
    layer.weight.data = start.clone()
    masks = healing.Masks({"weight": start != 0})
    optimiser = adam.Adam({"weight": layer.weight}, masks, 1e-4, halved)
    rate = optimiser._weights["weight"].rate
    assert rate == pytest.approx(1e-4 * float(start[start != 0].square().mean().sqrt()), rel=1e-6)
    wanted = start.double()
    mean = square = torch.zeros(3, 4, dtype=torch.float64)
    for step in range(1, 101):
        gradient = torch.linspace(-1, 2, 12).reshape(3, 4) * (1 + step % 3)
        optimiser.begin()
        (layer.weight * gradient.to(layer.weight.dtype)).sum().backward()
        assert layer.weight.grad is None  # it is freed within the backward pass
        gradient = gradient / gradient.square().mean().sqrt()  # none counts more than others
        mean = 0.9 * mean + 0.1 * gradient.double()
        square = 0.95 * square + 0.05 * gradient.double() ** 2
        change = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        wanted = (wanted - rate * change) * (start != 0)
        optimiser.end()
    assert layer.weight.dtype == (torch.bfloat16 if halved else torch.float32)
    optimiser.finish()
    assert layer.weight.dtype == torch.float32
    assert layer.weight.grad is None
    assert layer.weight[0, 0] == 0
    moved = (wanted - start).abs().mean()
    assert float((layer.weight.double() - wanted).abs().max()) < 0.02 * float(moved)


def test_a_diverging_training_changes_nothing(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "rate_of", lambda config: 1000.0)
    plain, healed, report = pruned_and_healed(
        models("llama"), tmp_path, method="wanda", heal_steps=10, **given
    )
    assert report.healing.best == 0
    assert report.healing.steps < 10
    assert any("did not bring the model nearer" in sentence for sentence in report.warnings)
    assert oracle.shards(plain) == oracle.shards(healed)


def test_a_loss_that_is_not_finite(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training goes back four times, and ends; the weights stay, and the report can be read
    again.
    """
    compute = healing._Healer._logits
    began = False

    def diverge(self: Any, numbers: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal began
        logits, wanted = compute(self, numbers)
        began |= logits.requires_grad
        return (logits * math.nan if began and not logits.requires_grad else logits), wanted

    monkeypatch.setattr(healing._Healer, "_logits", diverge)
    plain, healed, _ = pruned_and_healed(
        models("llama"), tmp_path, method="wanda", heal_steps=10, **given
    )
    report = read_record(healed / "emp_report.json", RunReport)
    assert (report.healing.best, report.healing.steps) == (0, 8)
    assert [loss is None for _, loss in report.healing.curve] == [False, True, True, True, True]
    assert oracle.shards(plain) == oracle.shards(healed)


def test_a_rate_that_is_too_high_is_lowered(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the held-out loss rises, the training goes back to the best weights, with a lower
    rate; also if it is killed.
    """
    monkeypatch.setattr(healing, "rate_of", lambda config: 0.3)
    how = given | {"method": "wanda", "heal": True, "heal_steps": 15}
    prune(models("llama"), output=tmp_path / "whole" / "out", **how)
    report = read_record(tmp_path / "whole" / "out" / "emp_report.json", RunReport)
    losses = [loss or math.inf for _, loss in report.healing.curve]
    assert losses[1] > 1.02 * losses[0]
    assert min(losses) < losses[0]
    assert report.healing.best > 3
    with monkeypatch.context() as patch:
        patch.setattr(healing._Healer, "step", kill_in_step(8, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune(models("llama"), output=tmp_path / "killed" / "out", **how)
    prune(models("llama"), output=tmp_path / "killed" / "out", **how)
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(tmp_path / "whole")


@pytest.mark.parametrize(("loss", "divided"), [(1.05, 1), (1.2, 3), (2.5, 9), (math.nan, 9)])
def test_a_small_rise_of_the_loss_is_no_reason_for_a_lower_rate(
    loss: float, divided: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is common while the rate is high: SmolLM2's loss rises by 5 % at first, and falls."""
    training = Progress(tmp_path / "none", 10)
    monkeypatch.setattr(training, "load", Mock())
    training.measured = {0: Measure(1.0, 9.0, 8.0), 5: Measure(loss, 9.0, 8.0)}
    training.go_back_if_worse()
    assert training.cut == divided


@pytest.mark.parametrize(
    ("width", "blocks", "rate"),
    [(64, 5, 0.0085), (576, 30, 1 / (30 * 288**0.5)), (4096, 32, 1 / (32 * 2048**0.5))],
)
def test_the_rate_follows_from_the_size(width: int, blocks: int, rate: float) -> None:
    config = transformers.LlamaConfig(hidden_size=width, num_hidden_layers=blocks)
    assert rate_of(config) == pytest.approx(rate)
    assert rate_of(config, 6) == pytest.approx(min(0.0085, 1 / (6 * (width / 2) ** 0.5)))


@pytest.mark.parametrize("fails", ["run", "record"])
def test_a_pass_that_fails_leaves_nothing_open(
    models: Models, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """In a user's process, the bar and the file of the hidden states are closed."""
    tokens = healing_tokens(models("llama"), given, STEPS)
    dense = AutoModelForCausalLM.from_pretrained(models("llama"))
    report = prune_model(copy.deepcopy(dense), recipe_of(method="magnitude"))
    bars = []
    made = []
    closed = []
    calls = iter(range(100))
    owner = Step if fails == "run" else BlockwiseModel
    whole = getattr(owner, fails)

    def failing(*args: Any, **more: Any) -> Any:
        if next(calls) == 2:
            raise _Killed
        return whole(*args, **more)

    def bar(*args: Any) -> Mock:
        bars.append(Mock())
        return bars[-1]

    with monkeypatch.context() as patch:
        patch.setattr(blockwise, "progress_bar", bar)
        patch.setattr(owner, fails, failing)
        init = HiddenStates.__init__
        patch.setattr(
            HiddenStates, "__init__", lambda self, place: (made.append(self), init(self, place))[1]
        )
        patch.setattr(HiddenStates, "close", lambda self: closed.append(self))
        with pytest.raises(_Killed):
            heal_model(dense, dense, tokens, masks=report.masks, steps=1)
    assert bars
    assert all(one.close.called for one in bars)
    assert {*map(id, made)} == {*map(id, closed)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_memory(models: Models, given: dict[str, Any], dtype: torch.dtype) -> None:
    tokens = healing_tokens(models("llama"), given, STEPS)
    dense = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=dtype)
    report = prune_model(model, recipe_of(method="wanda"), tokens)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = heal_model(model, dense, tokens, masks=report.masks, steps=STEPS)
    assert done.best > 0
    assert done.curve[done.best][1] < done.curve[0][1]
    assert report.masks.broken(model) == 0
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == set(report.masks)
    assert {value.dtype for value in model.state_dict().values()} == {dtype}
    assert all(parameter.requires_grad for parameter in model.parameters())
    # In one call, with the same result.
    other = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=dtype)
    both = prune_model(other, recipe_of(method="wanda", heal=True, heal_steps=STEPS), tokens)
    assert both.record.healing.curve == done.curve
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items()
    )


def test_wrong_input_in_memory(models: Models, given: dict[str, Any]) -> None:
    """The model stays as it was."""
    recipe = recipe_of(method="wanda", heal=True)
    tokens = healing_tokens(models("llama"), given, STEPS)
    model = AutoModelForCausalLM.from_pretrained(models("llama"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for match, data in {
        r"^heal=Heal\(\) fits weights to calibration data; give data=": None,
        "4 sequences, and 5 are needed: 4 for a step, and one that is held out": tokens[:4],
        "trains on text alone": DataLoader(tokens, batch_size=2),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(UserError, match=match):
            prune_model(model, recipe, data)
    with pytest.raises(
        UserError,
        match=r"^heal=Heal\(\) runs a model of transformers as a whole; Sequential is not one",
    ):
        prune_model(
            nn.Sequential(nn.Linear(8, 8)), recipe_of("magnitude", heal=True, targets=".*"), tokens
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    offloaded = cpu_offload(AutoModelForCausalLM.from_pretrained(models("llama")))
    with pytest.raises(UserError, match="healing needs both models whole in memory"):
        prune_model(offloaded, recipe, tokens)
    report = prune_model(model, "magnitude")
    with pytest.raises(UserError, match="healing needs both models whole in memory"):
        heal_model(model, offloaded, tokens, masks=report.masks)
    dense = AutoModelForCausalLM.from_pretrained(models("llama"))
    for wrong, says in (
        ({"weights": "everything"}, "weights must be 'targets' or 'all', got 'everything'"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": -3}, "steps must be a whole number of at least 1, got -3"),
        ({"steps": 2.5}, "steps must be a whole number of at least 1, got 2.5"),
        ({"batch_size": 0}, "batch.size must be at least 1, got 0"),
        ({"seed": "one"}, "seed must be a whole number, got 'one'"),
        ({"report_to": None}, "report.to None is not one of none, trackio"),
        ({"report_to": "json"}, "report.to 'json' is not one of none, trackio"),
        ({"dense": None}, "dense is of type NoneType; heal_model takes models"),
        ({"data": ["a text"], "tokenizer": object()}, "tokenizer is of type object; give a tok"),
    ):
        with pytest.raises(UserError, match=says):
            heal_model(model, **{"dense": dense, "data": tokens, "masks": report.masks} | wrong)
    dense.resize_token_embeddings(dense.config.vocab_size, pad_to_multiple_of=192)
    with pytest.raises(
        UserError,
        match=r"the dense model predicts 384 tokens and the pruned one "
        r"256.*resize_token_embeddings",
    ):
        heal_model(model, dense, tokens, masks=report.masks)


def test_options_of_the_text_count(
    models: Models, given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Healing reads the text, also where the method needs none, or takes its norms from a file."""
    caplog.set_level("INFO")
    how = given | {"heal": True, "heal_steps": 1}
    prune(models("llama"), method="magnitude", output=tmp_path / "magnitude", **how)
    prune(models("llama"), method="wanda", output=tmp_path / "wanda", **given)
    norms = tmp_path / "wanda" / "emp_llm" / "activations.safetensors"
    prune(models("llama"), method="wanda", activations=norms, output=tmp_path / "healed", **how)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_a_step_is_four_sequences_on_three_ranks(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    device_map: str,
) -> None:
    """Whole and by blocks, as in one process, but for the order of the sums."""
    how = given | {"method": "wanda", "heal": True, "heal_steps": STEPS, "device_map": device_map}
    alone = prune(models("llama"), output=tmp_path / "alone", **how)
    line = ["prune --method wanda --batch-size 3 --heal", models("llama")]
    line += ["--heal-steps", STEPS, "--device-map", device_map, "--output", "out"]
    line += ["--calibration", given["calibration"], "--samples", 10, "--seqlen", 32]
    done = launch(3, tmp_path, tmp_path_factory.mktemp("logs"), *line)
    assert done.codes == [0, 0, 0], done.error
    report = read_record(tmp_path / "out" / "emp_report.json", RunReport)
    for each in (report, alone):
        assert each.healing.tokens == STEPS * 4 * 32
    for (step, loss), (other, wanted) in zip(
        report.healing.curve, alone.healing.curve, strict=True
    ):
        assert (step, loss) == (other, pytest.approx(wanted, rel=0.02))
    assert verify(tmp_path / "out", source=str(models("llama"))).differences == []


def test_a_rank_that_dies_while_blocks_heal(
    models: Models, given: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The others end, and the same command resumes after the last block."""

    def die() -> None:
        put = blocks._heal

        def heal(block: Any, *rest: Any) -> Any:
            if block.step.index == 1 and ranks().index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return put(block, *rest)

        blocks._heal = heal

    line = ["prune --method wanda --batch-size 2 --heal", models("llama")]
    line += ["--heal-steps", STEPS, "--device-map", "disk", "--output", "out"]
    line += ["--calibration", given["calibration"], "--samples", 10, "--seqlen", 32]
    done = launch(2, tmp_path, tmp_path_factory.mktemp("logs"), *line, prepare=die)
    assert done.codes == [75, -9], done.error
    assert "Traceback" not in done.error
    kept = tmp_path / ".out.partial" / "healing"
    assert {path.name for path in kept.iterdir()} == {"block-00000.safetensors", "blocks.json"}
    again = launch(2, tmp_path, tmp_path_factory.mktemp("logs"), *line)
    assert again.codes == [0, 0], again.error
    assert verify(tmp_path / "out", source=str(models("llama"))).differences == []


def test_too_few_sequences_for_the_ranks(
    models: Models, given: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    line = ["heal plain --heal-steps 1 --dense", models("llama")]
    line += ["--device-map", "disk", "--output", "out"]
    line += ["--calibration", given["calibration"], "--samples", 6, "--seqlen", 32]
    prune(models("llama"), output=tmp_path / "plain", method="magnitude")
    done = launch(6, tmp_path, tmp_path_factory.mktemp("logs"), *line)
    assert done.codes == [2] * 6, done.error
    assert "are too few for 6 ranks. Give more --samples." in done.errors[0]


def test_minutes_in_place_of_steps(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one second, with a third more for the dense model; eight seconds for the held-out
    sequences. An interrupted run keeps its steps.
    """
    prune(models("llama"), output=tmp_path / "plain", **given)
    how = given | {"dense": str(models("llama"))}
    heal(tmp_path / "plain", output=tmp_path / "steps", heal_steps=3, **how)
    seconds = iter(range(1 << 30))
    with monkeypatch.context() as patch:
        patch.setattr(healing, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
        with pytest.raises(UserError, match=r"0.15: a step takes 1.0 s.* Give 0.16 or"):
            heal(tmp_path / "plain", output=tmp_path / "out", heal_minutes=0.15, **how)
        of_disk = how | {"device_map": "disk", "heal_minutes": 5.0}
        with pytest.raises(UserError, match=r"block by block.* Give --heal-steps, which are those"):
            heal(tmp_path / "plain", output=tmp_path / "out", **of_disk)
        assert not list(tmp_path.glob(".out*"))
        of_trial = 2
        patch.setattr(healing._Healer, "step", kill_in_step(of_trial + 2, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            heal(tmp_path / "plain", output=tmp_path / "out", heal_minutes=0.2, **how)
    with pytest.raises(UserError, match=r"unfinished run with minutes 0.2"):
        heal(tmp_path / "plain", output=tmp_path / "out", heal_steps=3, **how)
    monkeypatch.setattr(healing, "steps_of_minutes", Mock(side_effect=TimeoutError))
    prune(models("llama"), output=tmp_path / "less", **given | {"sparsity": 0.25})
    with pytest.raises(TimeoutError):  # it discards the work, and takes its own time
        heal(tmp_path / "less", output=tmp_path / "out", heal_minutes=0.2, **how, overwrite=True)
    report = heal(tmp_path / "plain", output=tmp_path / "out", heal_minutes=0.2, **how)
    assert report.recipe.heal == Heal(steps=3)
    for name, weight in weights_of(tmp_path / "steps").items():
        assert torch.equal(weights_of(tmp_path / "out")[name], weight), name


def test_minutes_of_prune(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of heal: the dense model is timed, before anything is pruned."""
    how = given | {"model": models("llama"), "heal": True}
    prune(output=tmp_path / "steps", heal_steps=3, **how)
    how |= {"output": tmp_path / "out", "heal_minutes": 0.2}
    plan = prune(dry_run=True, **how)
    assert any("heal: 0.2 min of steps of 4 x 32 tokens" in note for note in plan.notes)
    with pytest.raises(UserError, match="--loss may heal several times; give --heal-steps"):
        prune(loss="5%", **{key: value for key, value in how.items() if key != "sparsity"})
    seconds = iter(range(1 << 30))
    with monkeypatch.context() as patch:
        patch.setattr(healing, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
        of_trial = 2
        patch.setattr(healing._Healer, "step", kill_in_step(of_trial + 2, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune(**how)
    monkeypatch.setattr(healing, "steps_of_minutes", Mock(side_effect=TimeoutError))
    for other in ({"sparsity": 0.25}, {"seqlen": 16}, {"dtype": "float32"}):
        with pytest.raises(TimeoutError):  # it discards the work, and takes its own time
            prune(**how | other, overwrite=True)
    report = prune(**how, overwrite=True)
    assert report.recipe.heal == Heal(steps=3)
    for name, weight in weights_of(tmp_path / "steps").items():
        assert torch.equal(weights_of(tmp_path / "out")[name], weight), name


_TRACKER = """
import json


class Run:
    def __init__(self, **about):
        self.file = open("tracked.jsonl", "a")
        self.log(about, step=None)

    def log(self, numbers, step):
        self.file.write(json.dumps([numbers, step]) + "\\n")

    def finish(self):
        self.file.close()


init = Run
"""


@pytest.mark.parametrize("device_map", ["auto", "disk"], ids=["whole", "by blocks"])
def test_a_tracker_gets_the_numbers_of_a_training(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device_map: str,
) -> None:
    """The weights are those without one. One that is not installed, or does not start, is named;
    one that fails at the end costs no training.
    """
    prune(models("llama"), output=tmp_path / "plain", **given)
    monkeypatch.chdir(tmp_path)
    how = given | {"dense": str(models("llama")), "device_map": device_map}
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "trackio.py").write_text(_TRACKER)
    monkeypatch.syspath_prepend(tmp_path / "site")
    quiet = heal(tmp_path / "plain", output=tmp_path / "a", heal_steps=2, **how)
    how |= {"report_to": "trackio", "heal_tokens": 8 * given["seqlen"] + 1.0}
    report = heal(tmp_path / "plain", output=tmp_path / "b", **how)
    sys.modules.pop("trackio")
    assert report.recipe.heal == quiet.recipe.heal == Heal(steps=2)
    for name, weight in weights_of(tmp_path / "a").items():
        assert torch.equal(weights_of(tmp_path / "b")[name], weight), name
    of_both = given | {"heal": True, "heal_tokens": 300.0}
    whole = prune(models("llama"), output=tmp_path / "d", **of_both)
    assert whole.recipe.heal == Heal(steps=2)
    assert whole.healing.steps == 2
    settings, *rows = map(json.loads, (tmp_path / "tracked.jsonl").read_text().splitlines())
    assert (settings[0]["project"], settings[0]["name"]) == ("emp-llm", "b")
    if device_map == "disk":
        assert [step for _, step in rows] == list(range(len(rows)))
        assert all(row["block/error before"] > row["block/error after"] > 0 for row, _ in rows)
    else:
        held = [(step, row["held out/divergence"]) for row, step in rows if len(row) == 2]
        assert held == report.healing.curve
        trained = [row for row, _ in rows if "train/divergence" in row]
        assert len(trained) == 2
        assert all(row["train/divergence"] > 0 and row["train/rate"] > 0 for row in trained)
    (tmp_path / "site" / "trackio.py").write_text(_TRACKER + "\nRun.finish = exit\n")
    heal(tmp_path / "plain", output=tmp_path / "e", **how)
    sys.modules.pop("trackio")
    assert caplog.text.count("--report-to trackio: numbers are lost") == 1
    for raised in ("OSError('no login')", "SystemExit('no login')"):
        (tmp_path / "site" / "wandb.py").write_text(f"def init(**about):\n    raise {raised}\n")
        with pytest.raises(UserError, match=r"--report-to wandb: it does not start \(no login\)"):
            heal(tmp_path / "plain", output=tmp_path / "c", **how | {"report_to": "wandb"})
        sys.modules.pop("wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    (tmp_path / "site" / "tensorboard").mkdir()  # no package
    with pytest.raises(UserError, match="--report-to tensorboard needs the package tensorboard"):
        heal(tmp_path / "plain", output=tmp_path / "c", **how | {"report_to": "tensorboard"})


def test_bad_input(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = str(models("llama"))
    prune(models("llama"), output=tmp_path / "plain", **given)

    def refused(match: str, **how: Any) -> None:
        with pytest.raises(UserError, match=match):
            heal(
                **{"folder": tmp_path / "plain", "dense": dense, "output": tmp_path / "out"}
                | given
                | how
            )
        assert not (tmp_path / "out").exists()

    refused("no emp_report.json", folder=models("llama"))
    refused("its weights are not those that were pruned", dense=str(models("qwen2")), heal_steps=1)
    refused(
        "the text has 4 sequences, and 5 are needed: 4 for a step, and one that is held out",
        samples=4,
    )
    refused("a sequence of 1 token has no next token", seqlen=1)
    refused("must be at least 1", heal_steps=0)
    for tokens in (127.0, 1e18):
        refused("4 sequences of 32 tokens. Give 128 to 1,280,000,000", heal_tokens=tokens)
    for tokens in (math.inf, math.nan):
        refused("--heal-tokens must be a finite number", heal_tokens=tokens)
    refused("more than 64 bits", heal_tokens=10**400)
    refused("at least 1 and at most 10000000", heal_steps=10**12)
    refused("--heal-minutes all say how long", heal_tokens=1e6, heal_steps=300)
    refused("--heal-minutes all say how long", heal_minutes=1.0, heal_steps=300)
    refused("--heal-minutes must be above 0 and at most 1000000, got 0", heal_minutes=0.0)
    refused("--heal-minutes must be a finite number, got inf", heal_minutes=math.inf)
    pack(tmp_path / "plain", tmp_path / "packed")
    refused("unpack", folder=tmp_path / "packed")
    monkeypatch.chdir(tmp_path / "plain")
    heal(Path(), dense=dense, heal_steps=1, **given)
    refused("it is healed already", folder=tmp_path / "plain-healed")
    for match, how in {
        "--heal-steps has no effect without --heal": {"heal_steps": 3},
        "--report-to has no effect without --heal": {"report_to": "wandb"},
        "--heal cannot change quantised weights": {"heal": True, "load_in_4bit": True},
        "method magnitude needs none": {"heal": True, "method": "magnitude", "calibration": None},
    }.items():
        with pytest.raises(UserError, match=match):
            prune(models("llama"), output=tmp_path / "out", **given | how)


def test_the_best_method_is_one_word(models: Models, given: dict[str, Any], tmp_path: Path) -> None:
    report = prune(models("llama"), method="best", heal_steps=1, output=tmp_path / "out", **given)
    recipe = report.recipe
    assert recipe == Recipe(update=Admm(refit=Refit()), heal=Heal(steps=1))
    assert report.fits
    assert report.healing is not None
    with pytest.raises(UserError, match="--method best removes weights, and --structure units"):
        recipe_of(method="best", structure="neurons")
    pattern = recipe_of(method="best", pattern="2:4")
    assert pattern == Recipe(
        score=Magnitude(), counts=Pattern(2, 4), update=Admm(refit=Refit()), heal=Heal()
    )
    with pytest.raises(UserError, match="best is for prune"):
        sweep(models("llama"), methods="best,wanda", output=tmp_path / "sweep", **given)


def test_a_dry_run_says_what_it_takes(
    models: Models, given: dict[str, Any], tmp_path: Path
) -> None:
    plan = prune(models("llama"), output=tmp_path / "out", heal=True, dry_run=True, **given)
    (note,) = (line for line in plan.notes if line.startswith("heal: "))
    assert "300 steps of 4 x 32 tokens" in note
    assert " min on cpu; the whole model, 1 sequence at a time; " in note
    for part in ("weights", "optimiser", "gradients", "activations", "logits"):
        assert f"{part} " in note
    assert f"{format_bytes(24 * plan.coverage.weights)} of disk beside the output" in note
    by_blocks = prune(
        models("llama"),
        output=tmp_path / "out",
        heal=True,
        dry_run=True,
        **given | {"device_map": "disk"},
    )
    assert any(
        f"{format_bytes(2 * plan.coverage.weights)} of disk beside the output" in line
        for line in by_blocks.notes
    )


@pytest.mark.parametrize(
    ("match", "how"),
    [
        ("the text has 4 sequences, and 5 are needed", {"samples": 4}),
        ("a sequence of 1 token has no next token", {"seqlen": 1}),
        (
            r"block by block.* Give --heal-steps, which are those",
            {"device_map": "disk", "heal_minutes": 5.0},
        ),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_refuses_what_the_run_refuses(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    match: str,
    how: dict[str, Any],
    dry_run: bool,
) -> None:
    with pytest.raises(UserError, match=match):
        prune(
            models("llama"),
            output=tmp_path / "out",
            heal=True,
            dry_run=dry_run,
            **given | how,
        )
    assert not list(tmp_path.iterdir())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the free bytes of the disk."""
    return lambda free: monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free)
    )


@pytest.mark.parametrize(
    "how", [{"method": "wanda"}, {"structure": "neurons", "beta": 1, "width_multiple": 8}]
)
def test_a_disk_that_is_too_small(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk: Callable[[int], None],
    how: dict[str, Any],
) -> None:
    """It has room for the output, and not for the checkpoints of the training."""
    source = Checkpoint(models("llama"))
    disk(source.output_bytes + 30_000)
    prune(models("llama"), output=tmp_path / "pruned", **given | how)
    monkeypatch.setattr(healing, "train", None)
    with pytest.raises(UserError, match=r"out: it needs .* and the disk has"):
        heal(tmp_path / "pruned", dense=str(models("llama")), output=tmp_path / "out", **given)
    # Before anything is computed: a refit may take hours.
    monkeypatch.setattr("emp_llm.models.one_model.OneModel.get", None)
    with pytest.raises(UserError, match=r"out: it needs .* and the disk has"):
        prune(models("llama"), output=tmp_path / "new" / "out", heal=True, **given | how)


def test_the_disk_of_a_refit_and_its_healing(
    models: Models, given: dict[str, Any], tmp_path: Path, disk: Callable[[int], None]
) -> None:
    """The fitted weights stay until the output is complete, beside those of the healing."""
    how = {"method": "wanda", "refit": True, "heal": True, "device_map": "disk"}
    model = models("llama")
    plan = prune(model, output=tmp_path / "out", dry_run=True, **given | how)
    assert plan.fit_disk_bytes is not None
    disk(plan.disk_bytes + plan.fit_disk_bytes * 3 // 2)
    with pytest.raises(UserError, match=r"out: it needs .* and the disk has"):
        prune(model, output=tmp_path / "out", **given | how)


def test_a_disk_that_is_full_in_the_copy(
    models: Models, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prune(models("llama"), method="magnitude", output=tmp_path / "pruned")

    def fail(*_: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(UserError, match="out: the disk is full"):
        heal(tmp_path / "pruned", dense=str(models("llama")), output=tmp_path / "out", **given)


def test_what_an_interrupted_run_has_written_is_not_needed_again(
    models: Models,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk: Callable[[int], None],
) -> None:
    plan = prune(models("llama"), output=tmp_path / "out", heal=True, dry_run=True, **given)
    how = given | {"heal": True, "heal_steps": STEPS, "output": tmp_path / "out"}
    with monkeypatch.context() as patch:
        patch.setattr(healing._Healer, "step", kill_in_step(3))
        with pytest.raises(_Killed):
            prune(models("llama"), **how)
    written = sum(path.stat().st_blocks * 512 for path in (tmp_path / ".out.partial").rglob("*"))
    disk(plan.disk_bytes + 40 * plan.coverage.weights - written)
    prune(models("llama"), **how)
