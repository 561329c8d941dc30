"""Architecture of the package: rooms and their imports, the command line, and the wheel outside the checkout."""

import ast
import os
import runpy
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from import_graph import COMMANDS as TOP
from import_graph import PACKAGE, ROOMS, import_graph, imported_files, order_of, python_files

from emp_llm import cli
from emp_llm.cli import COMMANDS, help_of

ROOT = Path(__file__).parents[1]
FOLDERS = sorted({path.parent for path in python_files()} - {PACKAGE})


def test_every_folder_has_its_place() -> None:
    assert {folder.relative_to(PACKAGE).as_posix() for folder in FOLDERS} == set(ROOMS)


def test_imports_go_one_way() -> None:
    for room, imported in import_graph().items():
        for other, lines in imported.items():
            assert order_of(other) < order_of(room), f"{room} imports {other}: {lines}"


def test_no_file_imports_itself_through_others() -> None:
    graph = {
        path: [target for target in imported_files(path, for_types=False) if target.name != "__init__.py"]
        for path in python_files()
    }
    finished: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, f"circle: {[str(each.relative_to(PACKAGE)) for each in (*above, path)]}"
        if path not in finished:
            for target in graph[path]:
                visit(target, (*above, path))
            finished.add(path)

    for path in graph:
        visit(path, ())


def test_selection_needs_only_common() -> None:
    assert set(import_graph()["selection"]) <= {"common"}


def test_every_room_says_what_it_is_for() -> None:
    for folder in FOLDERS:
        words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert 10 <= len(words.split()) <= 90, f"{folder.relative_to(PACKAGE)}: {words}"


def test_the_graph_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        import_module("import_graph").main([])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(room in printed for room in (*ROOMS, TOP))
    assert "not allowed" not in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_runs_as_a_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(cli, "run", lambda command, *more: called.append(command))
    monkeypatch.delitem(sys.modules, f"emp_llm.{name}", raising=False)
    runpy.run_module(f"emp_llm.{name}", run_name="__main__")
    assert [command.__name__ for command in called] == [name]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_leaves_out_what_is_for_python(name: str) -> None:
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
    options = run("prune", "--help", "all")
    assert options.returncode == 0
    assert "Prune a causal language model" in options.stdout
    for flag in ("--method", "--beta", "--order", "--match", "--dry-run", "--device-map", "--neff-dtype", "--evaluate"):
        assert flag in options.stdout


def test_wrong_options_are_answered_before_anything_is_loaded(command: Run) -> None:
    assert command("prune").returncode == 2
    wrong = command("prune", "--model", "x", "--beta", "much")
    assert wrong.returncode == 2
    assert "--beta" in wrong.stderr


def test_help_imports_nothing_heavy() -> None:
    """`--help` answers at once: neither torch nor numpy is imported for it."""
    program = "import sys\nfrom emp_llm.cli import main\ntry:\n main(['{}', '--help'])\nexcept SystemExit:\n pass\n"
    program += "print(sorted({{'torch', 'numpy', 'transformers', 'numba', 'datasets', 'safetensors'}} & set(sys.modules)))"
    for name in ("prune", "report"):
        done = subprocess.run([sys.executable, "-c", program.format(name)], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


def test_importing_the_mathematics_does_not_load_transformers() -> None:
    program = "import sys; from emp_llm import effective_mask; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    line = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(target),
        str(ROOT),
    ]
    subprocess.run(line, check=True, capture_output=True, text=True)
    (path,) = target.glob("*.whl")
    return path


def test_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path, models: object) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {
        "emp_llm/data/calibration/wikitext2.toml",
        "emp_llm/data/calibration/demo.txt",
        "emp_llm/data/eval/perplexity.toml",
    } <= names
    assert {
        "emp_llm/data/eval/demo/demo_facts.yaml",
        "emp_llm/data/eval/demo/questions.py",
        "emp_llm/data/eval/published/llama.json",
        "emp_llm/data/slurm/job.sh",
        "emp_llm/data/slurm/gpu-container.toml",
    } <= names
    assert not any(name.startswith(("tests", "scripts")) for name in names)
    (tmp_path / "eval.py").write_text("raise SystemExit('shadowed')")  # a user's file of that name is none of our business
    program = (
        "import emp_llm\n"
        "from emp_llm.calibration.texts import find_corpus; from emp_llm.common.paths import data_folder\n"
        "assert 'site' in emp_llm.__file__, emp_llm.__file__\n"
        "print(data_folder('eval').parent == data_folder('calibration').parent, find_corpus('demo').samples)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True 64\n", done.stderr
    folder = models("llama")  # type: ignore[operator]
    line = [sys.executable, "-m", "emp_llm.prune", "--model", folder, "--method", "magnitude", "--output", "out"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "emp_report.json").is_file()
