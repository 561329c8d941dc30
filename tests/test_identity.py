"""Weights are known by what they are, never by the date of their file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle
import pytest

from emp_llm import evaluate, heal, prune
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.common.errors import UserError
from emp_llm.options.criterion import find_criterion

Models = Callable[[str], Path]
UP = "model.layers.1.mlp.up_proj.weight"


def other_weights(folder: Path, scratch: Path) -> None:
    """Put other weights into a folder, with the old sizes and dates, as `cp -p` does."""
    other = oracle.edited_copy(folder, scratch, UP, lambda bits: np.put(bits, range(25), 0))
    for shard in folder.glob("*.safetensors"):
        old = shard.stat()
        shutil.copyfile(other / shard.name, shard)
        os.utime(shard, ns=(old.st_atime_ns, old.st_mtime_ns))
        assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)


@pytest.fixture
def folder(pruned: Models, tmp_path: Path) -> Path:
    """A pruned checkpoint whose identity is cached."""
    copy: Path = shutil.copytree(pruned("llama"), tmp_path / "pruned")
    identity_of(Checkpoint(copy))
    return copy


def test_other_weights_under_old_dates(
    folder: Path, evaluable: Models, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = identity_of(Checkpoint(folder))
    read = Checkpoint(folder)
    other_weights(folder, tmp_path / "other")
    assert identity_of(Checkpoint(folder)) != before
    with pytest.raises(UserError, match="it changed while it was read"):
        read.check_unchanged()
    with pytest.raises(UserError, match=r"not those of its emp_manifest\.json.*emp-llm verify"):
        heal(folder, dense=str(evaluable("llama")), calibration=str(text), seqlen=64, samples=4)


def test_stored_results_are_of_the_weights(
    evaluable: Models, task_suite: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pruned"
    prune(model=evaluable("llama"), output=folder, method="magnitude", sparsity=0.5)
    suite = task_suite.with_name("short.toml")
    output = tmp_path / "results.json"
    first = evaluate(folder, suite=suite, output=output, device_map="cpu").results
    assert first.pruned is not None
    other_weights(folder, tmp_path / "other")
    with pytest.raises(UserError, match=r"it holds other results \(model\.identity"):
        evaluate(folder, suite=suite, output=output, device_map="cpu")
    assert "not those that emp-llm wrote" in caplog.text
    found = evaluate(folder, suite=suite, output=output, overwrite=True, device_map="cpu").results
    assert found.pruned is None


def test_an_interrupted_run_does_not_resume_on_other_weights(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(models("llama"), tmp_path / "model")
    out = tmp_path / "out"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("emp_llm.checkpoint.output.OutputFolder.complete", stop)
        with pytest.raises(KeyboardInterrupt):
            prune(model=source, output=out, method="magnitude", sparsity=0.5)
    assert json.loads((tmp_path / ".out.partial" / "manifest.json").read_text())
    other_weights(source, tmp_path / "other")
    with pytest.raises(UserError, match=r"another source: \S+ has another size, inode or"):
        prune(model=source, output=out, method="magnitude", sparsity=0.5)


def test_a_criterion_is_run_again_after_a_change(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for factor in (2.0, 3.0):
        file.write_text(f"def score(weight, norms):\n    return weight * {factor}\n")
        os.utime(file, ns=(1, 1))
        assert find_criterion("mine", f"{file}:score").score(np.ones(1), None) == factor
