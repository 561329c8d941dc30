"""Architecture of the package: rooms and their imports, the command line, and the wheel outside
the checkout.
"""

import os
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import regex
from conftest import Run
from import_graph import PACKAGE, ROOMS, import_graph, imported_files, order_of, python_files

import emp_llm
from emp_llm import cli
from emp_llm.cli import COMMANDS, help_of
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import is_named
from emp_llm.models.layers import Layer

ROOT = Path(__file__).parents[1]


def test_imports_go_one_way() -> None:
    folders = {path.parent for path in python_files()} - {PACKAGE}
    assert {folder.relative_to(PACKAGE).as_posix() for folder in folders} == set(ROOMS)
    for room, imported in import_graph().items():
        for other, lines in imported.items():
            assert order_of(other) < order_of(room), f"{room} imports {other}: {lines}"


def test_no_file_imports_itself_through_others() -> None:
    graph = {
        path: [
            target
            for target in imported_files(path, for_types=False)
            if target.name != "__init__.py"
        ]
        for path in python_files()
    }
    TopologicalSorter(graph).prepare()  # an error shows the circle


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_runs_as_a_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its help leaves out what is for Python."""
    called: list[Any] = []
    monkeypatch.setattr(cli, "run", lambda command, *more: called.append(command))
    monkeypatch.setattr(emp_llm, name, getattr(emp_llm, name))  # the package keeps its own module
    monkeypatch.delitem(sys.modules, f"emp_llm.{name}", raising=False)
    runpy.run_module(f"emp_llm.{name}", run_name="__main__")
    assert [command.__name__ for command in called] == [name]
    told = help_of(getattr(import_module(f"emp_llm.{name}"), name))
    assert len(told) > 40
    assert not any(word in told for word in ("Returns", "Raises", "UserError", "Args:"))


def test_the_shell_starts_commands(run: Run, tmp_path: Path) -> None:
    usage = run("__main__", "--help")
    assert usage.returncode == 0
    assert all(name in usage.stdout for name in COMMANDS)
    wrong = run("__main__", "prnue")
    assert wrong.returncode == 2
    assert "'prnue' is not a command" in wrong.stderr
    without = run("prune", "--model", "x", "--beta", "much")
    assert without.returncode == 2
    assert "--beta" in without.stderr
    options = run("prune", "--help", "all")
    assert options.returncode == 0
    assert "Prune a causal language model" in options.stdout
    for flag in (
        "--method",
        "--beta",
        "--order",
        "--match",
        "--dry-run",
        "--device-map",
        "--neff-dtype",
        "--evaluate",
    ):
        assert flag in options.stdout


def test_nothing_heavy_is_imported() -> None:
    """`--help` answers at once, without torch and numpy; the mathematics need no transformers."""
    program = (
        "import contextlib, sys\nfrom emp_llm.cli import main\n"
        "for name in ('prune', 'report'):\n  with contextlib.suppress(SystemExit):\n    "
        "main([name, '--help', 'all'])\nprint({'torch', 'numpy', 'transformers', 'numba', "
        "'datasets', 'safetensors'} & set(sys.modules))\nfrom emp_llm import "
        "effective_mask\nprint('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["set()", "False"]
    for words in (
        "Prune a causal language model",
        "--beta",
        "--neff-dtype",
        "Report on finished runs",
    ):
        assert words in done.stdout


def test_wheel_works_outside_the_checkout(tmp_path: Path, models: Callable[[str], Path]) -> None:
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options], check=True, capture_output=True
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extractall(site)
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    data = (
        "calibration/wikitext2.toml eval/perplexity.toml eval/demo/demo_facts.yaml "
        "eval/demo/questions.py "
    )
    data += "eval/published/llama.json slurm/job.sh slurm/gpu-container.toml"
    assert {f"emp_llm/data/{name}" for name in data.split()} <= names
    assert not any(name.startswith(("tests", "scripts")) for name in names)
    # A user's file of that name is none of our business.
    (tmp_path / "eval.py").write_text("raise SystemExit('shadowed')")
    program = (
        "from emp_llm.calibration.texts import find_corpus\nfrom emp_llm.prune import prune\n"
        f"prune(model={str(models('llama'))!r}, method='magnitude', "
        "output='out')\nprint(find_corpus('demo').samples)"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("64\n"), done.stderr
    assert (tmp_path / "out" / "emp_report.json").is_file()


def test_targets_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def fullmatch(*_: object, timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(regex, "fullmatch", fullmatch)
    with pytest.raises(
        UserError,
        match=r"takes more than 2 seconds on the name a\.b\. Write it without repeats "
        r"inside repeats",
    ):
        is_named(Layer("a.b", "mlp", 0), "(a*)*")
