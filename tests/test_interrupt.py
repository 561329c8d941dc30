"""A run that is stopped half-way leaves nothing behind, and what stood there before stands there still."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Ends the process, as Ctrl-C or a scheduler would, when the first matrix has been written.
PROGRAM = """
import os, sys
from emp_llm.cli import run
from emp_llm.models.pruning import Pruner
from emp_llm.prune import prune, show
whole = Pruner._prune
def then_stop(self, *arguments):
    outcome = whole(self, *arguments)
    os.kill(os.getpid(), int(sys.argv.pop()))
    return outcome
Pruner._prune = then_stop
run(prune, show, sys.argv[1:-1])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_half_way(models: Any, tmp_path: Path, number: int, code: int) -> None:
    old = tmp_path / "out"
    old.mkdir()
    (old / "emp_report.json").write_text("{}")
    line = [sys.executable, "-c", PROGRAM, "--model", models("llama"), "--method", "magnitude", "--output", old, "--overwrite"]
    done = subprocess.run(
        [*map(str, line), str(int(number))], capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [old]
    assert [path.name for path in old.iterdir()] == ["emp_report.json"]
