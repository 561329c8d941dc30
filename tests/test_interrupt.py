"""A run that is stopped half-way says how to go on, and what stood at the output before stands there still."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emp_llm.prune import prune

# Ends the process, as Ctrl-C or a scheduler would, when a matrix has been written and is noted as finished.
PROGRAM = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from emp_llm.cli import run
from emp_llm.models import journal
from emp_llm.models.pruning import Pruner
from emp_llm.prune import prune, show
journal._SECONDS = 0
whole = Pruner._prune
count = 0
def then_stop(self, *arguments):
    global count
    outcome = whole(self, *arguments)
    count += 1
    while count > 1 and not pathlib.Path(".out.partial/manifest.json").exists():
        time.sleep(0.01)
    if count > 1:
        os.kill(os.getpid(), int(sys.argv.pop()))
        time.sleep(60)
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
        [*map(str, line), str(int(number))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        check=False,
        timeout=50,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert f"kept in {tmp_path / '.out.partial'}; the same command goes on from there" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partial"}
    assert [path.name for path in old.iterdir()] == ["emp_report.json"]
    prune(model=str(models("llama")), method="magnitude", output=old, overwrite=True)
    prune(model=str(models("llama")), method="magnitude", output=tmp_path / "whole")
    assert (old / "emp_manifest.json").read_bytes() == (tmp_path / "whole" / "emp_manifest.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}
