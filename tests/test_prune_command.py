"""`emp-llm prune` and `prune(...)` as users call them: dry runs, Python's forms of the arguments, the package's front door."""

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from transformers import AutoModelForCausalLM

import emp_llm
from emp_llm import prune as prune_module
from emp_llm.common.errors import UserError
from emp_llm.prune import prune
from emp_llm.records.run_report import RunReport

Models = Callable[[str], Path]


def test_a_dry_run_beside_an_existing_output(models: Models, tmp_path: Path, command: Run) -> None:
    """The default output of an earlier run is no obstacle, and stays; a folder of other files is refused."""
    shutil.copytree(models("llama"), tmp_path / "model")
    line = ("prune", "--model", "model", "--method", "magnitude")
    assert command(*line).returncode == 0
    before = (tmp_path / "model-magnitude" / "emp_report.json").stat().st_mtime_ns
    done = command(*line, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "at model-magnitude (it exists: name another --output, or add --overwrite)" in done.stdout
    assert "it exists" not in command(*line, "--dry-run", "--overwrite").stdout
    assert "it exists" in command(*line).stderr
    assert (tmp_path / "model-magnitude" / "emp_report.json").stat().st_mtime_ns == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    assert "not a model folder" in command(*line, "--dry-run", "--output", "out").stderr


def test_a_dry_run_shows_the_sparsity_at_each_beta(
    models: Models, norms: Callable[[str], Path], tmp_path: Path, command: Run
) -> None:
    """For methods without activations at once; for the others with an activations file, and a sentence without one."""
    line = ("prune", "--model", models("llama"), "--dry-run", "--output", "out", "--method")
    head = "emp-magnitude, order 2, group row: removed % at beta    0.5    0.6    0.7"
    done = command(*line, "emp-magnitude")
    assert done.returncode == 0, done.stderr
    assert head in done.stdout
    assert "reading the targets (30.7 kB)" in done.stderr
    assert (
        "emp-wanda, order 1, group all: removed % at beta"
        in command(*line, "emp-wanda", "--activations", norms("llama"), "--order", 1, "--group", "all").stdout
    )
    done = command(*line, "emp-wanda")
    assert "sparsity against beta: needs activations" in done.stdout
    assert "add --activations FILE" in done.stdout
    assert "removed %" not in done.stdout
    assert "reading" not in done.stderr
    assert "known only at the end" in command(*line, "emp-wanda", "--propagate", "pruned").stdout
    assert "beta" not in command(*line, "magnitude").stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("magnitude", {"calibration": "c4", "samples": 9, "resumable_calibration": False},
         "--calibration, --samples, --no-resumable-calibration have no effect: method magnitude needs no activations."),
        ("emp-magnitude", {"activations": "norms"}, "--activations has no effect: method emp-magnitude needs no activations."),
        ("magnitude", {}, None),
    ],
)  # fmt: skip
def test_options_without_effect_are_named(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: Any, options: dict[str, Any], named: str | None
) -> None:
    prune(model=models("llama"), output=tmp_path / "out", dry_run=True, method=method, **options)
    assert "no effect" not in caplog.text if named is None else named in caplog.text


def test_a_pruned_model_is_noticed(pruned: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = pruned("llama")
    assert "already pruned" not in caplog.text
    prune(model=source, output=tmp_path / "twice", method="emp-magnitude", dry_run=True)
    assert "llama is already pruned. Its zeros count as weights" in caplog.text


def test_the_package_is_its_front_door(models: Models, tmp_path: Path) -> None:
    """`from emp_llm import prune` can be called, and is documented, as the function in it; paths are models."""
    parameters = inspect.signature(prune_module).parameters
    assert parameters == inspect.signature(prune).parameters
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())
    report = prune_module(model=models("llama"), output=str(tmp_path / "out"), method="magnitude")
    assert isinstance(report, RunReport)
    assert report.source.model == str(models("llama"))
    assert json.loads((tmp_path / "out" / "emp_report.json").read_text()) == report.as_dict()
    with pytest.raises(UserError, match=r"--model must be a model folder or a Hub id .*LlamaForCausalLM.*save_pretrained"):
        prune(model=AutoModelForCausalLM.from_pretrained(models("llama")), output=tmp_path / "x")
    with pytest.raises(TypeError, match="methd"):
        prune(model="x", methd="magnitude")  # type: ignore[call-arg]
    public = [name for name in dir(emp_llm) if not name.startswith("_")]
    assert {"prune", "calibrate", "evaluate", "effective_mask", "effective_number"} <= set(public)
    for name in public:
        assert callable(getattr(emp_llm, name)) or inspect.ismodule(getattr(emp_llm, name)), name


def test_a_data_free_prune_needs_no_torch(models: Models, tmp_path: Path) -> None:
    """Heavy imports are most of the time of a small prune."""
    program = (
        "import sys\nfrom emp_llm.cli import main\n"
        f"main(['prune', '--model', {str(models('llama'))!r}, '--method', 'emp-magnitude', '--output', 'out'])\n"
        "print(sorted({'torch', 'transformers', 'numba', 'datasets', 'huggingface_hub', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "out" / "emp_manifest.json").is_file()


@pytest.mark.parametrize("moment", ["options", "command"])
def test_an_early_interrupt_leaves_no_traceback(tmp_path: Path, moment: str) -> None:
    """Ctrl-C before the first progress bar: while options are parsed, or while libraries are imported."""
    program = (
        "import signal, os, sys\nfrom importlib.abc import MetaPathFinder\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs of a shell ignore it
        "class Interrupt(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {'typer' if moment == 'options' else 'emp_llm.checkpoint.output'!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from emp_llm.cli import main\nmain(['prune', '--model', 'x', '--method', 'magnitude'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "interrupted" in done.stderr
