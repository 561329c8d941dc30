"""The house itself: floors, the shell's way in, and the wheel away from the checkout."""

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

from emp_llm import cli
from emp_llm.cli import COMMANDS, _help

ROOT = Path(__file__).parents[1]
FLOORS = {"selection": 1, "models": 2, "services": 3}


def floor(module: str) -> int:
    """1 selection, 2 models, 3 services, 4 the commands; `emp_llm` itself and `cli` belong to the commands."""
    parts = module.split(".")
    return FLOORS.get(parts[1], 4) if len(parts) > 1 else 4


def imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    found += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in found if name.split(".")[0] == "emp_llm"]


def modules() -> dict[str, Path]:
    files = sorted((ROOT / "emp_llm").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


def test_nothing_goes_back_up() -> None:
    for module, path in modules().items():
        if module in ("emp_llm.__init__", "emp_llm.cli"):  # the front doors reach in by design
            continue
        for imported in imports(path):
            assert floor(imported) <= floor(module), f"{module} imports {imported}, a floor above it"
            if floor(module) == 4:
                assert floor(imported) < 4 or imported in ("emp_llm.cli", "emp_llm"), f"{module} imports the command {imported}"


def test_no_module_is_part_of_a_circle() -> None:
    graph = {module.removesuffix(".__init__"): imports(path) for module, path in modules().items()}

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"circle: {' -> '.join((*above, module))}"
        for imported in graph.get(module, []):
            visit(imported, (*above, module))

    for module in graph:
        if module != "emp_llm":
            visit(module, ())


def test_selection_imports_torch_and_nothing_of_ours_above_it() -> None:
    for module, path in modules().items():
        if floor(module) == 1:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
            names |= {
                alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
            }
            compilers = {"numba", "llvmlite", "numpy", "triton"} if ".kernels." in module else set()
            assert names <= {"emp_llm", "torch"} | compilers | sys.stdlib_module_names, f"{module}: {names}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_runs_as_a_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(cli, "run", lambda command, *more: called.append(command))
    monkeypatch.delitem(sys.modules, f"emp_llm.{name}", raising=False)
    runpy.run_module(f"emp_llm.{name}", run_name="__main__")
    assert [command.__name__ for command in called] == [name]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_leaves_out_what_is_for_python(name: str) -> None:
    told = _help(getattr(import_module(f"emp_llm.{name}"), name))
    assert len(told) > 40
    assert not any(word in told for word in ("Returns", "Raises", "UserError", "Args:"))


def test_commands_from_the_shell(run: Run) -> None:
    usage = run("__main__", "--help")
    assert usage.returncode == 0
    assert "prune" in usage.stdout
    assert "calibrate" in usage.stdout
    assert "evaluate" in usage.stdout
    wrong = run("__main__", "prnue")
    assert wrong.returncode == 2
    assert "'prnue' is not a command" in wrong.stderr
    options = run("prune", "--help")
    assert options.returncode == 0
    assert "Prune a causal language model" in options.stdout
    for flag in ("--method", "--beta", "--order", "--match", "--dry-run", "--device-map", "--neff-dtype", "--evaluate"):
        assert flag in options.stdout
    assert run("prune").returncode == 2
    assert run("prune", "--model", "x", "--beta", "much").returncode == 2


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
    assert {"emp_llm/calibration/wikitext2.toml", "emp_llm/calibration/demo.txt", "emp_llm/eval/perplexity.toml"} <= names
    assert {"emp_llm/eval/demo/demo_facts.yaml", "emp_llm/eval/demo/questions.py", "emp_llm/eval/published/llama.json"} <= names
    assert not any(name.startswith(("tests", "scripts")) for name in names)
    (tmp_path / "eval.py").write_text("raise SystemExit('shadowed')")  # a user's file of that name is none of our business
    program = (
        "from emp_llm.models.corpora import data_folder, find_corpus; import emp_llm\n"
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
