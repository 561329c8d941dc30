"""What runs write: the same bytes for the same content, nothing beside it, and an older output replaced whole."""

import os
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from conftest import Run

from emp_llm.models.activations import Activations
from emp_llm.models.plain_output import write_folder
from emp_llm.prune import prune


def test_activations_file_is_a_function_of_its_content(tmp_path: Path) -> None:
    """The same bytes from every run: what is compared, cached or resumed by hash has to be."""
    activations = Activations({"a": torch.ones(3)}, {"a": "a", "b": "a"}, {"model": "m"})
    written = set()
    for _ in range(12):
        activations.save(tmp_path / "norms.safetensors")
        written.add((tmp_path / "norms.safetensors").read_bytes())
    assert len(written) == 1


def test_no_temporary_files_are_left(
    models: Callable[[str], Path], text: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    arguments = ("--calibration", text, "--samples", 4, "--seqlen", 64, "--device-map", "disk")
    done = run("prune", "--model", models("llama"), "--output", tmp_path / "out", *arguments)
    assert done.returncode == 0, done.stderr
    assert not list(temporary.glob("emp-llm*"))


def test_overwriting_replaces_and_leaves_the_source(models: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = models("llama"), tmp_path / "out"
    before = oracle.digest(source)
    prune(model=str(source), output=out, method="magnitude")
    (out / "of the older run.txt").touch()
    half = {name: value for name, (value, _) in oracle.digest(out).items()}
    prune(model=str(source), output=out, method="magnitude", sparsity=0.25, overwrite=True)
    quarter = {name: value for name, (value, _) in oracle.digest(out).items()}
    assert half.keys() - quarter.keys() == {"of the older run.txt"}
    assert any(half[name] != quarter[name] for name in quarter if name.endswith(".safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing of the old folder is left beside it"
    assert oracle.digest(source) == before


def test_interrupted_between_the_renames_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write_folder(out, {"page": b"old"}, False, "page")
    replace = os.replace

    def first(source: Path, target: Path) -> None:
        replace(source, target)
        monkeypatch.setattr(os, "replace", replace)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", first)
    with pytest.raises(KeyboardInterrupt):
        write_folder(out, {"page": b"new"}, True, "page")
    assert (out / "page").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
