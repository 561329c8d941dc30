"""Healing: kept weights that learn the dense model's probabilities, in runs of commands and in
memory.
"""

import copy
import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
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
from conftest import Run
from launch import Launched, launch
from safetensors.torch import load_file, save_file
from stops import Killed, stopped, stopped_in_call, stopped_when
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
    unpack,
    verify,
)
from emp_llm.calibration.data import CHOOSING, read_text
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import file_hash, write_own
from emp_llm.common import machine
from emp_llm.common.errors import UserError, format_bytes
from emp_llm.common.ranks import ranks
from emp_llm.healing import adam, blocks, planning
from emp_llm.healing import training as healing
from emp_llm.healing.adam import Measure, Progress, rate_of
from emp_llm.healing.planning import sequences_for, set_aside
from emp_llm.models import blockwise
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Step
from emp_llm.models.loading import load_tokenizer
from emp_llm.models.masks import Masks
from emp_llm.options.shared import CalibrationOptions
from emp_llm.pruning import updates
from emp_llm.records.base import read_record
from emp_llm.records.run_report import RunReport
from emp_llm.reporting.run_tables import check_lines, healing_lines
from emp_llm.walk.updated import UpdatedWeights

Models = Callable[[str], Path]
STEPS = 4


@dataclass(frozen=True)
class Runs:
    """Runs on a model and a text, with their outputs in a folder."""

    model: Path
    given: dict[str, Any]
    folder: Path

    def prune(self, name: str = "out", **how: Any) -> Any:
        return prune(self.model, output=self.folder / name, **self.given | how)

    def short(self, name: str, **how: Any) -> Any:
        """Wanda, and a healing of a few steps."""
        return self.prune(name, **{"method": "wanda", "heal": True, "heal_steps": STEPS} | how)

    def heal(self, name: str = "out", **how: Any) -> Any:
        """The run `plain`, healed."""
        how = {"folder": self.folder / "plain", "dense": str(self.model)} | self.given | how
        return heal(output=self.folder / name, **how)

    def both(self, **how: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
        """The weights after a recipe (`plain`), those after its healing (`healed`), and the report
        of the second.
        """
        self.prune("plain", **{key: value for key, value in how.items() if "heal" not in key})
        report = self.prune("healed", **{"heal": True, "heal_steps": STEPS} | how)
        return weights_of(self.folder / "plain"), weights_of(self.folder / "healed"), report

    def resumes(self, whole: Path, name: str = "killed", **how: Any) -> Any:
        """The same command again ends with the bytes of a run that nothing stopped."""
        report = self.short(f"{name}/out", **how)
        assert torture.snapshot(self.folder / name) == torture.snapshot(whole)
        return report

    def tokens(self, steps: int = STEPS) -> torch.Tensor:
        """What a healing of so many steps trains on, and chooses by."""
        how = {name: self.given[name] for name in ("calibration", "samples", "seqlen")}
        options = CalibrationOptions(**how)
        read = read_text(options, load_tokenizer(self.model), None, training=sequences_for(steps))
        return read.for_training.tokens

    def verified(self, name: str = "out") -> bool:
        return verify(self.folder / name, source=str(self.model)).differences == []


def stopped_in_step(
    number: int, error: type[BaseException] = Killed
) -> AbstractContextManager[None]:
    """A training within ends as its `number`-th step begins; a checkpoint follows each second."""
    return stopped_in_call(healing._Healer, "step", number, error)


@pytest.fixture(scope="module")
def given(text: Path) -> dict[str, Any]:
    return {"calibration": str(text), "samples": 10, "seqlen": 32, "device_map": "cpu"}


@pytest.fixture
def llama(models: Models, given: dict[str, Any], tmp_path: Path) -> Runs:
    return Runs(models("llama"), given, tmp_path)


@pytest.fixture(scope="module")
def whole(models: Models, given: dict[str, Any], tmp_path_factory: Any) -> Path:
    """A folder with `out`, the tiny Llama after a short run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    Runs(models("llama"), given, folder).short("out")
    return Path(folder)


@pytest.fixture(scope="module")
def killed(models: Models, given: dict[str, Any], tmp_path_factory: Any) -> Path:
    """The folder of such a run that ended with its third step. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("killed")
    with stopped_in_step(3):
        Runs(models("llama"), given, folder).short("out")
    return Path(folder)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt", "mixtral"])
def test_zeros_stay_and_kept_weights_move(models: Models, llama: Runs, family: str) -> None:
    runs = replace(llama, model=models(family))
    how = {"method": "wanda", "targets": "all-linear", "min_expert_tokens": 0}
    before, after, report = runs.both(**how)
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
    tokens = runs.tokens()
    held = tokens[-set_aside(len(tokens)) :]
    loaded = [
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (runs.model, runs.folder / "healed", runs.folder / "plain")
    ]
    with torch.no_grad():
        p, q, r = (model(held).logits.double().log_softmax(-1) for model in loaded)
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    assert divergence == pytest.approx(curve[report.healing.best], rel=0.1)
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
    assert runs.verified("healed")


def test_a_training_reads_new_text(
    llama: Runs, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many sequences as its steps visit, and none of those by which the run is judged. Where the
    text ends, it says how often each is read.
    """
    report = read_record(whole / "out" / "emp_report.json", RunReport)
    assert report.healing.origin.text.samples == sequences_for(STEPS)
    assert report.calibration.text.samples == 10
    tokenizer = load_tokenizer(llama.model)
    options = CalibrationOptions(calibration=llama.given["calibration"], seqlen=32, samples=10)
    text = read_text(options, tokenizer, None, training=30)
    every = read_text(replace(options, samples=38), tokenizer, None).tokens
    assert torch.equal(text.tokens, every[:10])
    assert torch.equal(text.held_out, every[10:18])
    assert torch.equal(text.for_training.tokens, torch.cat([every[:10], every[18:38]]))
    few = llama.folder / "few.txt"
    few.write_text(Path(llama.given["calibration"]).read_text()[:500])
    with caplog.at_level("INFO"):
        llama.short("out", calibration=str(few))
    assert re.search(r"trains on \d+ sequences, each up to \d+ times", caplog.text)


def test_a_search_by_loss_heals_on_no_sequence_that_judges_it(
    llama: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Mock(side_effect=healing.train)
    monkeypatch.setattr(healing, "train", train)
    llama.short("out", loss="5%")
    options = CalibrationOptions(
        calibration=llama.given["calibration"], samples=10 + CHOOSING, seqlen=32
    )
    every = read_text(options, load_tokenizer(llama.model), None).tokens
    judges = set(map(tuple, every[10:].tolist()))
    assert train.call_args_list
    for call in train.call_args_list:
        trained = set(map(tuple, call.args[2].tolist()))
        assert len(trained) > 10
        assert not trained & judges


def test_all_texts_of_a_mix_are_held_out(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the refit, by the healing of the whole model, and by blocks."""
    for name in "ab":
        text = " ".join(f"{name}{number}" for number in range(700))
        (llama.folder / f"{name}.txt").write_text(text)
    mix = f"{llama.folder}/a.txt:20,{llama.folder}/b.txt:12"
    tokens = []
    for owner, name, place in (
        (updates, "move_weights", "tokens"),
        (healing, "train", 2),
        (healing, "heal_blocks", 3),
    ):
        spy = Mock(side_effect=getattr(owner, name))
        monkeypatch.setattr(owner, name, spy)
        tokens.append((spy, place))
    how = {"calibration": mix, "samples": None, "refit": True, "heal_steps": 11}
    for device_map in ("cpu", "disk"):
        llama.short(device_map, device_map=device_map, **how)
    options = CalibrationOptions(calibration=f"{llama.folder}/a.txt", samples=60, seqlen=32)
    of_a = set(map(tuple, read_text(options, load_tokenizer(llama.model), None).tokens.tolist()))
    for spy, place in tokens:
        (call, *_) = spy.call_args_list
        trained = call.kwargs[place] if isinstance(place, str) else call.args[place]
        held = [tuple(row) in of_a for row in trained[-set_aside(len(trained)) :].tolist()]
        assert len(held) >= 2
        assert set(held) == {True, False}


def test_a_healing_says_why_it_is_not_checked(llama: Runs) -> None:
    plain = prune(llama.model, output=llama.folder / "plain", method="magnitude", device_map="cpu")
    assert plain.unchecked == "give --calibration"
    few = llama.folder / "few.txt"
    few.write_text(Path(llama.given["calibration"]).read_text()[:340])
    report = llama.heal(calibration=str(few), heal_steps=1)
    assert report.check is None
    assert check_lines(report)[0].startswith("damage not measured: the text ends")
    assert llama.heal(heal_steps=1, overwrite=True).unchecked is None


@pytest.mark.parametrize(("separable", "labels"), [(True, 0), (False, 0), (True, 0.3), (True, 1)])
def test_the_loss_is_the_divergence(models: Models, separable: bool, labels: float) -> None:
    """And its gradient, against numpy in float64; whether the dense blocks run once for each
    sequence, or each time. The last token of a sequence has no label.
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
        healer = healing._Healer(model, dense_logits, ids, None, 2, False, labels)  # type: ignore[arg-type]
        logits, wanted = healer._logits(order)
    divergence = healer._divergence(logits, wanted, ids[order])
    gradient = torch.autograd.grad(divergence, logits)[0][order]
    with torch.no_grad():
        assert torch.equal(wanted, dense(ids)[0][order])
        p, q = (one(ids).logits.double().numpy() for one in (dense, model))
    p, q = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)) for logits in (p, q))
    learned = np.exp(p)
    learned[:, :-1] = (1 - labels) * learned[:, :-1] + labels * np.eye(p.shape[-1])[ids[:, 1:]]
    logs = np.log(learned, where=learned > 0, out=np.zeros_like(learned))
    expected = (learned * (logs - q)).sum(-1)
    assert float(divergence.detach()) / ids.numel() == pytest.approx(
        float(expected.mean()), rel=1e-5
    )
    assert np.allclose(gradient.numpy(), np.exp(q) - learned, atol=1e-5)


def test_labels(llama: Runs, command: Run) -> None:
    """The next tokens of the text lower its perplexity further, in as many steps."""
    llama.prune("plain", method="wanda")
    plain = llama.heal("out", heal_steps=20)
    line = f"heal {llama.folder / 'plain'} --dense {llama.model} --heal-labels 0.5 --heal-steps 20"
    text = f"--calibration {llama.given['calibration']} --samples 10 --seqlen 32"
    out = llama.folder / "labels"
    done = command(f"{line} {text} --output", out)
    assert "; divergence from labels (0.5) and the dense model " in done.stdout
    assert "; divergence " in "".join(healing_lines(plain))
    report = read_record(out / "emp_report.json", RunReport)
    assert report.recipe.heal == Heal(steps=20, weights="targets", labels=0.5)
    after = [each.healing.perplexity["after"] for each in (plain, report)]
    assert after[1] < after[0]
    assert llama.verified("labels")


def test_the_command_makes_the_bytes_of_prune(
    llama: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    after, report = llama.both(method="admm", refit=True, pattern="2:4")[1:]
    plain, healed, again = (llama.folder / name for name in ("plain", "healed", "again"))
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
    of_command = llama.heal("again", heal_steps=STEPS)
    assert oracle.shards(healed) == oracle.shards(again)
    written = {path.name for path in again.rglob("*")}
    assert not written & {".git", "config", ".env", "pytorch_model.bin", ".secret.json"}
    assert of_command.recipe == report.recipe
    assert of_command.healing.command is not None
    assert of_command.healing.curve == report.healing.curve
    assert llama.verified("again")
    assert "again is healed: its kept weights may differ" in caplog.text
    for weight in (matrix for name, matrix in after.items() if "mlp" in name):
        assert int((weight.reshape(-1, 4) != 0).sum(1).max()) <= 2
    assert "healed" in of_command.recipe.words
    with pytest.raises(UserError, match="fitted, healed or trained"):
        pack(healed, llama.folder / "mask", mask_only=True)
    pack(healed, llama.folder / "packed")
    unpack(llama.folder / "packed", llama.folder / "unpacked")
    assert torture.snapshot(llama.folder / "unpacked") == torture.snapshot(healed)


def test_a_killed_healing_resumes(
    models: Models, llama: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = replace(llama, model=models("mixtral"))
    runs.short("whole/out")
    with stopped_in_step(3):
        runs.short("killed/out")
    kept = runs.folder / "killed" / ".out.partial" / "healing"
    assert {path.name for path in kept.iterdir()} == {"step-2", "progress.json"}
    step = Mock(side_effect=healing._Healer.step)
    monkeypatch.setattr(healing._Healer, "step", lambda *given: step(*given))
    runs.resumes(runs.folder / "whole")
    assert step.call_count == STEPS - 2


@pytest.mark.parametrize("healer", ["prune", "heal"])
def test_a_healing_resumes_with_its_seed(llama: Runs, healer: str) -> None:
    """The seed orders the sequences, also those of a text that is not shuffled."""
    call = partial(llama.short, "out", method="magnitude")
    if healer == "heal":
        prune(llama.model, method="magnitude", output=llama.folder / "plain")
        call = partial(llama.heal, heal_steps=STEPS)
    with stopped_in_step(3):
        call()
    with pytest.raises(UserError, match=r"holds the work of an unfinished run with .*seed"):
        call(seed=1)
    assert (llama.folder / ".out.partial" / "healing" / "step-2").is_dir()
    call(seed=0)


def test_checkpoints_are_written_beside_the_training_of_a_gpu(
    llama: Runs, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies of the weights as they were: the training goes on while they are written."""
    monkeypatch.setattr(adam.Adam, "on_cpu", False)
    writers = set[str]()
    write = adam.Progress._write

    def slow(self: Any, *rest: Any) -> None:
        writers.add(threading.current_thread().name)
        time.sleep(0.2)
        write(self, *rest)

    monkeypatch.setattr(adam.Progress, "_write", slow)
    with stopped_in_step(3):
        llama.short("killed/out")
    llama.resumes(whole)
    assert {name.partition("_")[0] for name in writers} == {"emp-llm-healing"}


def test_less_memory_changes_nothing_but_rounding(
    llama: Runs, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient checkpointing, four sequences at a time, and a dense model that runs for a few
    sequences at a time.
    """
    plain = read_record(whole / "out" / "emp_report.json", RunReport)
    monkeypatch.setattr(planning, "down_from", lambda most: [4])
    monkeypatch.setattr(healing, "_PIECE", 1)
    planned = planning._whole
    monkeypatch.setattr(
        planning, "_whole", lambda *given: replace(planned(*given), checkpointing=True)
    )
    walks = list[int]()
    keep = healing._DenseLogits._keep
    monkeypatch.setattr(
        healing._DenseLogits,
        "_keep",
        lambda self, name, numbers: (walks.append(len(numbers)), keep(self, name, numbers))[1],
    )
    less = llama.short("less")
    assert len(walks) > 2  # of the held-out text, and of pieces
    assert max(walks) <= 4
    for (_, loss), (_, other) in zip(plain.healing.curve, less.healing.curve, strict=True):
        assert loss == pytest.approx(other, rel=0.02)


def test_a_healing_that_is_killed_after_its_last_checkpoint(llama: Runs, whole: Path) -> None:
    """It trains no step more, however often it is killed there."""
    for _ in range(2):
        with stopped(adam.Progress, "load"):
            llama.short("killed/out")
    assert llama.resumes(whole).healing.steps == STEPS


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
    llama: Runs,
    whole: Path,
    killed: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    """The training begins again, and ends with the same bytes."""
    shutil.copytree(killed, llama.folder / "killed")
    damage(llama.folder / "killed" / ".out.partial" / "healing" / "step-2")
    llama.resumes(whole)
    assert "is damaged" in caplog.text


def test_killed_while_healed_weights_are_written(llama: Runs, whole: Path) -> None:
    """The weights that the training began with are gone, and are written again."""
    with stopped_in_call(healing, "_overwrite", 3, KeyboardInterrupt):
        llama.short("killed/out")
    lost = Path(shutil.copytree(llama.folder / "killed", llama.folder / "lost"))
    shutil.rmtree(lost / ".out.partial" / "healing")
    (lost / ".out.partial" / "healing").touch()
    for name in ("lost", "killed"):
        llama.resumes(whole, name)


def test_a_disk_that_is_full_in_the_training(
    llama: Runs, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is not whole is not taken up."""
    write = adam.write_bytes
    second = llama.folder / "killed" / ".out.partial" / "healing" / "step-2"

    def fail(path: Path, content: bytes) -> None:
        if path.parent == second:
            write(path, content[:100])
            raise OSError(errno.ENOSPC, "full")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(adam, "write_bytes", fail)
        says = r"killed/out: the disk is full.*the same command resumes"
        with pytest.raises(UserError, match=says):
            llama.short("killed/out")
    llama.resumes(whole)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with larger weights, whose probabilities differ from each other, so that neurons
    matter.
    """
    name, values = tiny.FAMILIES["llama"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "sharp", (name, values | {"initializer_range": 0.2}))
        return tiny.make_model(tmp_path_factory.mktemp("sharp") / "model", "sharp")


def test_structures_heal(sharp: Path, llama: Runs) -> None:
    runs = replace(llama, model=sharp)
    how = {"structure": "neurons", "sparsity": 0.25, "width_multiple": 8}
    for weights in ("targets", "all"):
        given = {} if weights == "all" else {"heal_weights": weights}  # all are the default
        plain, healed, _ = replace(runs, folder=runs.folder / weights).both(
            heal_steps=10, **given, **how
        )
        assert runs.verified(f"{weights}/healed")
        changed = {name for name, weight in plain.items() if not torch.equal(weight, healed[name])}
        assert any("mlp.down_proj" in name for name in changed)
        assert any("self_attn" in name for name in changed) == (weights == "all")
        assert any("layernorm" in name for name in changed) == (weights == "all")
        assert not any("embed" in name or "lm_head" in name for name in changed)


def test_experts_heal(models: Models, llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor without products of bfloat16."""
    monkeypatch.setattr(machine, "cpu_fields", lambda: {"flags": "sse2 avx2 f16c"})
    assert not machine.has_bfloat16(torch.device("cpu"))
    runs = replace(llama, model=models("mixtral"))
    report = runs.short("out", structure="experts", sparsity=0.5, method="reap", seed=7)
    assert report.healing.best > 0
    assert runs.verified()


def test_block_by_block(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the disk; killed in the second block, and resumed after the first."""
    how = {"targets": "all-linear", "device_map": "disk"}
    runs = replace(llama, folder=llama.folder / "whole")
    plain, healed, report = runs.both(method="wanda", **how)
    assert report.healing.by == "blocks"
    (_, before), (_, after) = report.healing.curve
    assert after < before
    for name, weight in plain.items():
        assert bool((healed[name][weight == 0] == 0).all()) or "norm" in name
    assert runs.verified("healed")
    numbers = list[int]()
    with stopped_when(UpdatedWeights, "put", lambda _, number, *__: number == 1):
        llama.short("killed/out", **how)
    run = blocks._heal
    monkeypatch.setattr(
        blocks,
        "_heal",
        lambda block, *rest: (numbers.append(block.step.index), run(block, *rest))[1],
    )
    shutil.rmtree(runs.folder / "plain")
    (runs.folder / "healed").rename(runs.folder / "out")
    llama.resumes(runs.folder, **how)
    assert numbers == [1]


def test_a_block_whose_outputs_are_not_finite(llama: Runs) -> None:
    """Values of float16 end at 65504; in float32 the same model heals."""
    model = AutoModelForCausalLM.from_pretrained(llama.model, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3e5)
        for layer in (model.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.gate_proj):
            layer.weight.mul_(1e2)
    model.half().save_pretrained(llama.folder / "model")
    tiny.make_tokenizer().save_pretrained(llama.folder / "model")
    runs = replace(llama, model=llama.folder / "model")
    run = partial(runs.short, "out", method="magnitude", heal_steps=2, device_map="disk")
    with pytest.raises(UserError, match=r"model\.layers\.1 are not finite.*--dtype float32"):
        run(dtype="float16")
    assert run(dtype="float32", overwrite=True).healing is not None


def test_too_little_memory_for_the_whole_model(
    llama: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be killed in the training. An interrupted run keeps its way, whatever memory is
    free then.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    free = 400_000  # enough for a block
    monkeypatch.setattr(planning, "available_memory", lambda: free)
    runs = replace(llama, given=llama.given | {"device_map": "auto"})
    run = partial(runs.short, heal_steps=1)
    with stopped(blocks, "_heal"):
        run("out")
    free = 10**12
    with caplog.at_level("INFO"):
        assert run("out").healing.by == "blocks"
    assert "healing block by block, " in caplog.text
    whole = run("whole")  # now there is enough
    assert whole.healing.by == "model"
    assert whole.healing.best == 1  # a single step has a rate
    free = 400_000
    with pytest.raises(UserError, match="--heal-weights all needs the whole model"):
        run("all", heal_weights="all")
    with pytest.raises(UserError, match="--heal-labels needs the whole model"):
        run("labels", heal_labels=0.5)
    # Steps that minutes have chosen are those of the whole model, not of each block.
    prune(llama.model, output=llama.folder / "plain", method="magnitude")

    def less_memory(*_: Any, **how: Any) -> int:
        nonlocal free
        free = 400_000
        return STEPS

    monkeypatch.setattr(healing, "steps_of_minutes", less_memory)
    for command in (
        partial(runs.prune, "timed", method="wanda", heal=True),
        partial(runs.heal, "healed"),
    ):
        free = 10**12
        with pytest.raises(UserError, match=r"block by block.* Give --heal-steps, which are those"):
            command(heal_minutes=5.0)
    free = 1000
    calibrate = Mock()
    monkeypatch.setattr("emp_llm.calibration.passes.collect_norms", calibrate)
    with pytest.raises(
        UserError, match=r"cpu has 1.0 kB; block by block it takes .* Lower --seqlen"
    ):
        run("none")
    calibrate.assert_not_called()  # it is known before the first pass


def test_memory_that_runs_out_in_the_training(llama: Runs) -> None:
    """The sentence names what takes less; and if memory is free again, the same command resumes."""
    llama.prune("plain", method="wanda")
    step = (healing._Healer, "step")
    disk = {"device_map": "disk"}
    for number, (part, options, remedy) in enumerate(
        [
            (step, {}, "1 sequence .* Lower --seqlen, or give --device-map d"),
            ((blocks, "_heal"), disk, "4 sequences .* Lower --batch-size, then"),
            (step, {"heal_steps": None, "heal_minutes": 5.0}, "Lower --seqlen"),
        ]
    ):
        command = partial(llama.heal, f"{number}", **{"heal_steps": STEPS} | options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*part, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
            says = rf"^(healing|--heal-minutes): .* on cpu .*{remedy}"
            with pytest.raises(UserError, match=says):
                command()
        if number < 2:
            command()
            assert llama.verified(f"{number}")


@pytest.mark.parametrize("instructions", [True, False])
def test_a_layer_that_no_batch_calls(
    llama: Runs, monkeypatch: pytest.MonkeyPatch, instructions: bool
) -> None:
    """As an expert that no token reaches: it keeps its weights, and the others heal. With and
    without bfloat16 products.
    """
    for module in (healing, planning):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: instructions)
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)))
    )
    plain, healed, _ = llama.both(method="magnitude", targets="mlp", device_map="disk")
    changed = {name for name, weight in plain.items() if not torch.equal(weight, healed[name])}
    assert {name.split(".")[4] for name in changed} == {"gate_proj", "down_proj"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_norms_heal_in_bfloat16_too(
    models: Models, llama: Runs, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """torch's layer_norm takes no weight of another dtype than its input's."""
    for module in (healing, planning):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: True)
    runs = replace(llama, model=models(family))
    plain, healed, _ = runs.both(method="magnitude", heal_weights="all")
    norms = {name: weight for name, weight in plain.items() if weight.dim() == 1}
    assert any(not torch.equal(weight, healed[name]) for name, weight in norms.items())


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
    updated = (wanted - start).abs().mean()
    assert float((layer.weight.double() - wanted).abs().max()) < 0.02 * float(updated)


def test_a_diverging_training_changes_nothing(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "rate_of", lambda config: 1000.0)
    report = llama.both(method="wanda", heal_steps=10)[-1]
    assert report.healing.best == 0
    assert report.healing.steps < 10
    assert any("did not lower the divergence" in sentence for sentence in report.warnings)
    assert oracle.shards(llama.folder / "plain") == oracle.shards(llama.folder / "healed")


def test_a_loss_that_is_not_finite(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
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
    llama.both(method="wanda", heal_steps=10)
    plain, healed = llama.folder / "plain", llama.folder / "healed"
    report = read_record(healed / "emp_report.json", RunReport)
    assert (report.healing.best, report.healing.steps) == (0, 8)
    assert [loss is None for _, loss in report.healing.curve] == [False, True, True, True, True]
    assert oracle.shards(plain) == oracle.shards(healed)


def test_a_rate_that_is_too_high_is_lowered(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the held-out loss rises, the training goes back to the best weights, with a lower
    rate; also if it is killed.
    """
    monkeypatch.setattr(healing, "rate_of", lambda config: 0.3)
    whole = llama.short("whole/out", heal_steps=15).healing
    losses = [loss or math.inf for _, loss in whole.curve]
    assert losses[1] > 1.02 * losses[0]
    assert min(losses) < losses[0]
    assert whole.best > 3
    with stopped_in_step(8, KeyboardInterrupt):
        llama.short("killed/out", heal_steps=15)
    llama.resumes(llama.folder / "whole", heal_steps=15)


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
    llama: Runs, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """In a user's process, the bar and the file of the hidden states are closed."""
    dense = AutoModelForCausalLM.from_pretrained(llama.model)
    report = prune_model(copy.deepcopy(dense), recipe_of(method="magnitude"))
    bars = []
    made = []
    closed = []
    owner = Step if fails == "run" else BlockwiseModel

    def bar(*args: Any) -> Mock:
        bars.append(Mock())
        return bars[-1]

    init = HiddenStates.__init__
    monkeypatch.setattr(blockwise, "progress_bar", bar)
    monkeypatch.setattr(
        HiddenStates, "__init__", lambda self, place: (made.append(self), init(self, place))[1]
    )
    monkeypatch.setattr(HiddenStates, "close", lambda self: closed.append(self))
    with stopped_in_call(owner, fails, 3):
        heal_model(dense, dense, llama.tokens(), masks=report.masks, steps=1)
    assert bars
    assert all(one.close.called for one in bars)
    assert {*map(id, made)} == {*map(id, closed)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_memory(llama: Runs, dtype: torch.dtype) -> None:
    tokens = llama.tokens()
    dense, model, other = (
        AutoModelForCausalLM.from_pretrained(llama.model, dtype=dtype) for _ in range(3)
    )
    report = prune_model(model, recipe_of(method="wanda"), tokens)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = heal_model(model, dense, tokens, masks=report.masks, steps=STEPS)
    assert done.best > 0
    assert done.curve[done.best][1] < done.curve[0][1]
    assert report.masks.broken(model) == 0
    after = model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == set(report.masks)
    assert {value.dtype for value in after.values()} == {dtype}
    assert all(parameter.requires_grad for parameter in model.parameters())
    # In one call, with the same result.
    both = prune_model(other, recipe_of(method="wanda", heal=True, heal_steps=STEPS), tokens)
    assert both.record.healing.curve == done.curve
    assert all(torch.equal(value, after[name]) for name, value in other.state_dict().items())


def test_wrong_input_in_memory(llama: Runs) -> None:
    """The model stays as it was."""
    recipe = recipe_of(method="wanda", heal=True)
    tokens = llama.tokens()
    model, dense, on_cpu = (AutoModelForCausalLM.from_pretrained(llama.model) for _ in range(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    line = nn.Sequential(nn.Linear(8, 8))
    of_line = recipe_of("magnitude", heal=True, targets=".*")
    offloaded = cpu_offload(on_cpu)
    for says, *given in (
        (r"^heal=Heal\(\) fits weights to calibration data; give data=", model, recipe, None),
        (
            "4 sequences, and 5 are needed: 4 for a step, and one that is held out",
            model,
            recipe,
            tokens[:4],
        ),
        ("trains on text alone", model, recipe, DataLoader(tokens, batch_size=2)),
        (
            r"^heal=Heal\(\) runs a model of transformers as a whole; Sequential is not one",
            line,
            of_line,
            tokens,
        ),
        ("healing needs both models whole in memory", offloaded, recipe, tokens),
    ):
        with pytest.raises(UserError, match=says):
            prune_model(*given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = prune_model(model, "magnitude")
    for wrong, says in (
        ({"weights": "everything"}, "weights must be 'targets' or 'all', got 'everything'"),
        ({"steps": 0}, "steps must be a whole number from 1 to 10,000,000, got 0"),
        ({"steps": -3}, "steps must be a whole number from 1 to 10,000,000, got -3"),
        ({"steps": 2.5}, "steps must be a whole number from 1 to 10,000,000, got 2.5"),
        ({"steps": 10**9}, "steps must be a whole number from 1 to 10,000,000, got 1000000000"),
        ({"masks": {}}, "masks names no weights, so none would move. Give weights='all'"),
        ({"labels": 1.5}, "heal.labels must be at least 0 and at most 1, got 1.5"),
        ({"labels": None}, "heal.labels must be a number, got None"),
        ({"batch_size": 0}, "batch.size must be at least 1, got 0"),
        ({"seed": "one"}, "seed must be a whole number, got 'one'"),
        ({"report_to": None}, "report.to None is not one of none, trackio"),
        ({"report_to": "json"}, "report.to 'json' is not one of none, trackio"),
        ({"dense": None}, "dense is of type NoneType; heal_model takes models"),
        ({"dense": offloaded}, "healing needs both models whole in memory"),
        ({"data": ["a text"], "tokenizer": object()}, "tokenizer is of type object; give a tok"),
        ({"data": None}, "data: healing trains on text alone; give texts or token ids.$"),
        ({"data": []}, "data: healing trains on text alone; give texts or token ids.$"),
    ):
        with pytest.raises(UserError, match=says):
            heal_model(model, **{"dense": dense, "data": tokens, "masks": report.masks} | wrong)
    dense.resize_token_embeddings(dense.config.vocab_size, pad_to_multiple_of=192)
    says = r"the dense model predicts 384 tokens and the pruned one 256.*resize_token_embeddings"
    with pytest.raises(UserError, match=says):
        heal_model(model, dense, tokens, masks=report.masks)


def test_options_of_the_text_count(llama: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """Healing reads the text, also where the method needs none, or takes its norms from a file."""
    caplog.set_level("INFO")
    llama.short("magnitude", method="magnitude", heal_steps=1)
    llama.prune("wanda", method="wanda")
    norms = llama.folder / "wanda" / "emp_llm" / "activations.safetensors"
    llama.short("healed", activations=norms, heal_steps=1)
    assert "no effect" not in caplog.text


@pytest.fixture
def ranked(llama: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Launched]:
    """A command line by several ranks, on the text of `llama`, to `out`."""

    def call(count: int, line: str, samples: int = 10, **more: Any) -> Launched:
        text = f"--calibration {llama.given['calibration']} --samples {samples} --seqlen 32"
        logs = tmp_path_factory.mktemp("logs")
        return launch(count, llama.folder, logs, f"{line} {text} --output out", **more)

    return call


@pytest.mark.parametrize("device_map", ["cpu", "disk"])
def test_a_step_is_four_sequences_on_three_ranks(
    llama: Runs, ranked: Callable[..., Launched], device_map: str
) -> None:
    """Whole and by blocks, as in one process, but for the order of the sums."""
    alone = llama.short("alone", device_map=device_map).healing
    line = f"prune {llama.model} --method wanda --batch-size 3 --device-map {device_map}"
    done = ranked(3, f"{line} --heal --heal-steps {STEPS}")
    assert done.codes == [0, 0, 0], done.error
    healed = read_record(llama.folder / "out" / "emp_report.json", RunReport).healing
    assert healed.tokens == alone.tokens == STEPS * 4 * 32
    for (step, loss), (other, wanted) in zip(healed.curve, alone.curve, strict=True):
        assert (step, loss) == (other, pytest.approx(wanted, rel=0.02))
    assert llama.verified()


def test_a_rank_that_dies_while_blocks_heal(llama: Runs, ranked: Callable[..., Launched]) -> None:
    """The others end, and the same command resumes after the last block."""

    def die() -> None:
        put = blocks._heal

        def heal(block: Any, *rest: Any) -> Any:
            if block.step.index == 1 and ranks().index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return put(block, *rest)

        blocks._heal = heal

    line = f"prune {llama.model} --method wanda --batch-size 2 --device-map disk"
    line += f" --heal --heal-steps {STEPS}"
    done = ranked(2, line, prepare=die)
    assert done.codes == [75, -9], done.error
    assert "Traceback" not in done.error
    kept = llama.folder / ".out.partial" / "healing"
    assert {path.name for path in kept.iterdir()} == {"block-00000.safetensors", "blocks.json"}
    again = ranked(2, line)
    assert again.codes == [0, 0], again.error
    assert llama.verified()


def test_too_few_sequences_for_the_ranks(llama: Runs, ranked: Callable[..., Launched]) -> None:
    prune(llama.model, output=llama.folder / "plain", method="magnitude")
    line = f"heal plain --dense {llama.model} --heal-steps 1 --device-map disk"
    done = ranked(6, line, samples=6)
    assert done.codes == [2] * 6, done.error
    assert "are too few for 6 ranks. Give more --samples." in done.errors[0]


@contextmanager
def a_step_takes_a_second() -> Iterator[None]:
    """With a third more for the dense model; eight seconds for the held-out sequences."""
    seconds = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(healing, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
        yield


def test_minutes_in_place_of_steps(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run keeps its steps."""
    llama.prune("plain")
    llama.heal("steps", heal_steps=3)
    with a_step_takes_a_second():
        with pytest.raises(UserError, match=r"0.15: a step takes 1.0 s.* Give 0.16 or"):
            llama.heal(heal_minutes=0.15)
        with pytest.raises(UserError, match=r"block by block.* Give --heal-steps, which are those"):
            llama.heal(device_map="disk", heal_minutes=5.0)
        assert not list(llama.folder.glob(".out*"))
        of_trial = 2
        with stopped_in_step(of_trial + 2, KeyboardInterrupt):
            llama.heal(heal_minutes=0.2)
    with pytest.raises(UserError, match=r"unfinished run with minutes 0.2"):
        llama.heal(heal_steps=3)
    monkeypatch.setattr(healing, "steps_of_minutes", Mock(side_effect=TimeoutError))
    llama.prune("less", sparsity=0.25)
    with pytest.raises(TimeoutError):  # it discards the work, and takes its own time
        llama.heal(folder=llama.folder / "less", heal_minutes=0.2, overwrite=True)
    assert llama.heal(heal_minutes=0.2).recipe.heal == Heal(steps=3, weights="targets")
    healed = weights_of(llama.folder / "out")
    for name, weight in weights_of(llama.folder / "steps").items():
        assert torch.equal(healed[name], weight), name


def test_minutes_of_prune(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of heal: the dense model is timed, before anything is pruned."""
    llama.prune("steps", heal=True, heal_steps=3)
    run = partial(llama.prune, "out", heal=True, heal_minutes=0.2)
    plan = run(dry_run=True)
    assert any("heal: 0.2 min of steps of 4 x 32 tokens" in note for note in plan.notes)
    with pytest.raises(UserError, match="--loss may heal several times; give --heal-steps"):
        run(loss="5%")
    of_trial = 2
    with a_step_takes_a_second(), stopped_in_step(of_trial + 2, KeyboardInterrupt):
        run()
    monkeypatch.setattr(healing, "steps_of_minutes", Mock(side_effect=TimeoutError))
    for other in ({"sparsity": 0.25}, {"seqlen": 16}, {"dtype": "float32"}):
        with pytest.raises(TimeoutError):  # it discards the work, and takes its own time
            run(**other, overwrite=True)
    assert run(overwrite=True).recipe.heal == Heal(steps=3, weights="targets")
    healed = weights_of(llama.folder / "out")
    for name, weight in weights_of(llama.folder / "steps").items():
        assert torch.equal(healed[name], weight), name


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
    llama: Runs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device_map: str,
) -> None:
    """The weights are those without one. One that is not installed, or does not start, is named;
    one that fails at the end costs no training.
    """
    llama.prune("plain")
    monkeypatch.chdir(llama.folder)
    site = llama.folder / "site"
    site.mkdir()
    (site / "trackio.py").write_text(_TRACKER)
    monkeypatch.syspath_prepend(site)
    quiet = llama.heal("a", heal_steps=2, device_map=device_map)
    tracked = partial(
        llama.heal, device_map=device_map, report_to="trackio", heal_tokens=8 * 32 + 1.0
    )
    report = tracked("b")
    sys.modules.pop("trackio")
    assert report.recipe.heal == quiet.recipe.heal == Heal(steps=2, weights="targets")
    weights = weights_of(llama.folder / "b")
    for name, weight in weights_of(llama.folder / "a").items():
        assert torch.equal(weights[name], weight), name
    whole = llama.prune("d", heal=True, heal_tokens=300.0)
    assert whole.recipe.heal == Heal(steps=2, weights="targets")
    assert whole.healing.steps == 2
    settings, *rows = map(json.loads, Path("tracked.jsonl").read_text().splitlines())
    assert (settings[0]["project"], settings[0]["name"]) == ("emp-llm", "b")
    by = "blocks" if device_map == "disk" else "model"
    assert settings[0]["config"] == {"steps": 2, "seed": 0, "by": by}
    if device_map == "disk":
        assert [step for _, step in rows] == list(range(len(rows)))
        assert all(row["block/error before"] > row["block/error after"] > 0 for row, _ in rows)
    else:
        held = [(step, row["held out/divergence"]) for row, step in rows if len(row) == 2]
        assert held == report.healing.curve
        trained = [row for row, _ in rows if "train/divergence" in row]
        assert len(trained) == 2
        assert all(row["train/divergence"] > 0 and row["train/rate"] > 0 for row in trained)
    (site / "trackio.py").write_text(_TRACKER + "\nRun.finish = exit\n")
    tracked("e")
    sys.modules.pop("trackio")
    assert caplog.text.count("--report-to trackio: numbers are lost") == 1
    for raised in ("OSError('no login')", "SystemExit('no login')"):
        (site / "wandb.py").write_text(f"def init(**about):\n    raise {raised}\n")
        with pytest.raises(UserError, match=r"--report-to wandb: it does not start \(no login\)"):
            tracked("c", report_to="wandb")
        sys.modules.pop("wandb")
    monkeypatch.setattr(sys, "path", [str(site)])
    (site / "tensorboard").mkdir()  # no package
    with pytest.raises(UserError, match="--report-to tensorboard needs the package tensorboard"):
        tracked("c", report_to="tensorboard")


def test_bad_input(models: Models, llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    llama.prune("plain")

    def refused(match: str, call: Callable[..., object] = llama.heal, **how: Any) -> None:
        with pytest.raises(UserError, match=match):
            call(**how)
        assert not (llama.folder / "out").exists()

    refused("no emp_report.json", folder=llama.model)
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
    refused("--heal-labels must be at least 0 and at most 1, got 2", heal_labels=2)
    refused("--heal-labels must be a finite number, got nan", heal_labels=math.nan)
    refused("--heal-labels has no effect without --heal", llama.prune, heal_labels=0.5)
    refused("--heal-labels needs the whole model", heal_labels=0.5, device_map="disk")
    pack(llama.folder / "plain", llama.folder / "packed")
    refused("unpack", folder=llama.folder / "packed")
    monkeypatch.chdir(llama.folder / "plain")
    heal(Path(), dense=str(llama.model), heal_steps=1, **llama.given)
    refused("it is healed already", folder=llama.folder / "plain-healed")
    refused("--heal-steps has no effect without --heal", llama.prune, heal_steps=3)
    refused("--report-to has no effect without --heal", llama.prune, report_to="wandb")
    heal_of_prune = partial(llama.prune, heal=True)
    refused("--heal cannot change quantised weights", heal_of_prune, load_in_4bit=True)
    how = {"method": "magnitude", "calibration": None}
    refused("method magnitude needs none", heal_of_prune, **how)


def test_the_best_method_is_one_word(llama: Runs) -> None:
    report = llama.prune(method="best", heal_steps=1)
    assert report.recipe == Recipe(update=Admm(refit=Refit()), heal=Heal(steps=1))
    assert report.fits
    assert report.healing is not None
    with pytest.raises(UserError, match="--method best removes weights, and --structure units"):
        recipe_of(method="best", structure="neurons")
    pattern = recipe_of(method="best", pattern="2:4")
    assert pattern == Recipe(
        score=Magnitude(), counts=Pattern(2, 4), update=Admm(refit=Refit()), heal=Heal()
    )
    with pytest.raises(UserError, match="best is for prune"):
        sweep(llama.model, methods="best,wanda", output=llama.folder / "sweep", **llama.given)


def test_a_dry_run_says_what_it_takes(llama: Runs) -> None:
    plan = llama.prune(heal=True, dry_run=True)
    (note,) = (line for line in plan.notes if line.startswith("heal: "))
    assert "300 steps of 4 x 32 tokens" in note
    assert " min on cpu; the whole model, 1 sequence at a time; " in note
    for part in ("weights", "optimiser", "gradients", "activations", "logits"):
        assert f"{part} " in note
    assert f"{format_bytes(24 * plan.coverage.weights)} of disk beside the output" in note
    by_blocks = llama.prune(heal=True, dry_run=True, device_map="disk")
    disk = f"{format_bytes(2 * plan.coverage.weights)} of disk beside the output"
    assert any(disk in line for line in by_blocks.notes)


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
    llama: Runs, match: str, how: dict[str, Any], dry_run: bool
) -> None:
    with pytest.raises(UserError, match=match):
        llama.prune(heal=True, dry_run=dry_run, **how)
    assert not list(llama.folder.iterdir())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the free bytes of the disk."""
    return lambda free: monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free)
    )


NO_ROOM = r"out: it needs .* and the disk has"


@pytest.mark.parametrize(
    "how", [{"method": "wanda"}, {"structure": "neurons", "beta": 1, "width_multiple": 8}]
)
def test_a_disk_that_is_too_small(
    llama: Runs,
    monkeypatch: pytest.MonkeyPatch,
    disk: Callable[[int], None],
    how: dict[str, Any],
) -> None:
    """It has room for the output, and not for the checkpoints of the training."""
    disk(Checkpoint(llama.model).output_bytes + 30_000)
    llama.prune("plain", **how)
    monkeypatch.setattr(healing, "train", None)
    with pytest.raises(UserError, match=NO_ROOM):
        llama.heal()
    # Before anything is computed: a refit may take hours.
    monkeypatch.setattr("emp_llm.models.one_model.OneModel.get", None)
    with pytest.raises(UserError, match=NO_ROOM):
        llama.prune("new/out", heal=True, **how)


def test_the_disk_of_a_refit_and_its_healing(llama: Runs, disk: Callable[[int], None]) -> None:
    """The fitted weights stay until the output is complete, beside those of the healing."""
    run = partial(llama.prune, method="wanda", refit=True, heal=True, device_map="disk")
    plan = run(dry_run=True)
    disk(plan.disk_bytes + plan.fit_disk_bytes * 3 // 2)
    with pytest.raises(UserError, match=NO_ROOM):
        run()


def test_a_disk_that_is_full_in_the_copy(llama: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    prune(llama.model, method="magnitude", output=llama.folder / "plain")
    monkeypatch.setattr(shutil, "copyfile", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(UserError, match="out: the disk is full"):
        llama.heal()


def test_what_an_interrupted_run_has_written_is_not_needed_again(
    llama: Runs, disk: Callable[[int], None]
) -> None:
    run = partial(llama.prune, heal=True, heal_steps=STEPS)
    plan = llama.prune(heal=True, dry_run=True)
    with stopped_in_step(3):
        run()
    work = (llama.folder / ".out.partial").rglob("*")
    written = sum(path.stat().st_blocks * 512 for path in work)
    disk(plan.disk_bytes + 40 * plan.coverage.weights - written)
    run()
