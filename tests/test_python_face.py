"""The functions that users import are typed, and described where `help` looks."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import write_stub

import emp_llm
from emp_llm.cli import COMMANDS
from emp_llm.common import machine
from emp_llm.common.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = ("python.md",)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WRONG = """
from emp_llm import DryRun, RunReport, prune, recipe_of, runtime

plan: DryRun = prune("model", dry_run=True)
report: RunReport = prune("model", method="wanda")
prune("model", metod="wanda")
prune("model", sparsity="0.5")
recipe_of("wanda").counts.beta
runtime.load("pruned", least_zero=0.4)
"""


def test_the_stub_is_that_of_the_options() -> None:
    """To update it: python scripts/write_stub.py."""
    assert write_stub.STUB.read_text(encoding="utf-8") == write_stub.stub_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_every_argument(name: str) -> None:
    command = getattr(emp_llm, name)
    about = inspect.getdoc(command) or ""
    for argument in inspect.signature(command).parameters:
        assert re.search(rf"^    {argument}: \w", about, re.MULTILINE), argument


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: emp_llm.prune("x", methd="wanda"),
            r"prune\(\) .* Did you mean method\?",
        ),
        (
            lambda: emp_llm.evaluate("x", sute="demo"),
            r"evaluate\(\) .* Did you mean suite\?",
        ),
        (lambda: emp_llm.Recipe(scor=None), r"Recipe\(\) got .* 'scor'. Did you mean score\?"),
        (
            lambda: emp_llm.Recipe(score=emp_llm.Wanda(), sparsity=0.5),
            r"Recipe\(\) got .* 'sparsity'. Did you mean counts=Effective\(sparsity=\.\.\.\) or "
            r"counts=Share\(sparsity=\.\.\.\)\?",
        ),
        (lambda: emp_llm.Recipe(qqq=1), r"Recipe\(\) got an unexpected keyword argument 'qqq'\.$"),
    ],
)
def test_a_wrong_word_names_the_function_and_the_nearest(
    call: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        call()


def test_every_public_name_is_there() -> None:
    assert all(getattr(emp_llm, name) is not None for name in emp_llm.__all__)
    stub = write_stub.STUB.read_text(encoding="utf-8")
    for name in emp_llm.__all__:
        assert re.search(rf"^(def {name}\(|from .* import {name} as {name}$)", stub, re.MULTILINE)


def test_a_program_of_yours_keeps_its_peaks_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a command of the shell sets them back, and measures its own."""
    resets = []
    monkeypatch.setattr(machine, "_reset_peaks", lambda: resets.append(None))
    records = []
    for in_shell in (False, True):
        monkeypatch.setattr(UserError, "in_shell", in_shell)
        stopwatch = machine.Stopwatch()
        with stopwatch("prune"):
            pass
        records.append(set(stopwatch.record["prune"]) - {"peak_cuda_bytes"})
        assert len(resets) == in_shell
    assert records == [{"seconds"}, {"seconds", "peak_bytes"}]


def test_types(tmp_path: Path) -> None:
    """The examples of the pages pass mypy; wrong calls do not."""
    files = []
    for page in PAGES:
        blocks = _BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
        assert blocks
        files.append(tmp_path / page.replace("-", "_").replace(".md", ".py"))
        files[-1].write_text("\n".join(blocks))
    files.append(tmp_path / "wrong.py")
    files[-1].write_text(WRONG)
    command = [sys.executable, "-m", "mypy", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.findall(r"(\w+\.py):(\d+): error: (.*)", done.stdout)
    assert [(file, int(line)) for file, line, _ in found] == [
        ("wrong.py", 6),
        ("wrong.py", 6),
        ("wrong.py", 7),
        ("wrong.py", 8),
        ("wrong.py", 9),
    ], done.stdout + done.stderr
