"""Architecture of the package: rooms and their imports, the command line, and the wheel outside
the checkout.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import regex
from conftest import Run
from import_graph import PACKAGE, ROOMS, import_graph, imported_files, order_of, python_files

import emp_llm
from emp_llm.cli import COMMANDS, help_of
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import is_named
from emp_llm.models.layers import Layer

ROOT = Path(__file__).parents[1]


def test_imports_go_one_way() -> None:
    folders = {path.parent for path in python_files()} - {PACKAGE, PACKAGE / "commands"}
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
def test_the_help_of_a_command_leaves_out_what_is_for_python(name: str) -> None:
    told = help_of(getattr(emp_llm, name))
    assert len(told) > 40
    assert not any(word in told for word in ("Returns", "Raises", "UserError", "Args:"))


DOORS = ("calibrate", "evaluate", "prune")


def test_the_root_holds_only_doors() -> None:
    """Whatever else a reader looks for is in a room."""
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files == {"__init__", "__main__", "cli", *DOORS}


@pytest.mark.parametrize("name", DOORS)
def test_a_door_runs_its_command(name: str, run: Run, tmp_path: Path) -> None:
    """With the options, output and exit code of the command, and no warning."""
    line = [sys.executable, "-W", "error", "-m", f"emp_llm.{name}"]
    for words, code in (["--version"], 2), (["--model", "x", "--seqlen", "much"], 2), (["-h"], 0):
        door = subprocess.run([*line, *words], capture_output=True, text=True, check=False)
        command = run(name, *words)
        assert door.returncode == command.returncode == code
        assert door.stderr == command.stderr


ORDERS = """
import inspect, sys, importlib

def check(found):
    assert inspect.isfunction(found) and found.__name__ == "prune", found
    assert "sparsity" in inspect.signature(found).parameters

def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "emp_llm"]:
        del sys.modules[name]

def of_package():
    from emp_llm import prune
    check(prune)

def attribute():
    import emp_llm
    check(emp_llm.prune)

def door():
    import emp_llm.prune
    check(emp_llm.prune)

def door_as():
    import emp_llm.prune as prune
    check(prune)
    check(importlib.import_module("emp_llm.prune"))

def from_door():
    from emp_llm.prune import prune
    check(prune)

def command():
    from emp_llm.commands.prune import prune
    check(prune)

def told():
    import pydoc
    assert "prune(model: " in pydoc.render_doc("emp_llm.prune", renderer=pydoc.plaintext)

ways = (of_package, attribute, door, door_as, from_door, command, told)
for first in ways:
    for second in ways:
        forget()
        first()
        second()
        attribute()
"""


def test_prune_is_a_function_whatever_was_imported_before() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", ORDERS], check=True)


def test_the_shell_starts_commands(run: Run, tmp_path: Path) -> None:
    usage = run("--help")
    assert usage.returncode == 0
    assert all(name in usage.stdout for name in COMMANDS)
    wrong = run("prnue")
    assert wrong.returncode == 2
    assert "'prnue' is not a command" in wrong.stderr
    without = run("prune --model x --beta much")
    assert without.returncode == 2
    assert "--beta" in without.stderr
    options = run("prune --help all")
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
    data += "eval/published/llama.json slurm/gpu-container/config.yaml"
    assert {f"emp_llm/data/{name}" for name in data.split()} <= names
    study = {"Snakefile", "profiles/default/config.yaml"}
    assert {f"emp_llm/study/{name}" for name in study} <= names
    assert not any(name.startswith(("tests", "scripts")) for name in names)
    # A user's file of that name is none of our business.
    (tmp_path / "eval.py").write_text("raise SystemExit('shadowed')")
    program = (
        "from emp_llm.calibration.texts import find_corpus\nfrom emp_llm import prune\n"
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
