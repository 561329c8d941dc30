"""An interrupted run says how to resume it, and leaves an older output unchanged."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emp_llm.prune import prune

# For each signal, a fork in a folder of its own runs a prune. When a matrix is written and recorded as finished, it sends
# itself the signal, as Ctrl-C or a scheduler does. The imports, which take longer than the runs, are done once.
PROGRAM = """
import os, pathlib, signal, sys, time
import emp_llm.architecture.skeleton, emp_llm.runs.prune_run, transformers.models.llama.modeling_llama
from emp_llm.cli import run
from emp_llm.prune import prune, show
from emp_llm.pruning.output.checkpoint_writer import CheckpointWriter
from emp_llm.storage.output import journal
journal._SECONDS = 0
whole = CheckpointWriter._target
count = 0
def then_stop(self, *arguments):
    global count
    outcome = whole(self, *arguments)
    count += 1
    while count > 1 and not pathlib.Path(".out.partial/manifest.json").exists():
        time.sleep(0.01)
    if count > 1:
        os.kill(os.getpid(), number)
        time.sleep(60)
    return outcome
CheckpointWriter._target = then_stop
for number in (signal.SIGINT, signal.SIGTERM):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
        os.chdir(str(int(number)))
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
        run(prune, show, sys.argv[1:])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    pathlib.Path(str(int(number)), "code").write_text(str(code))
"""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(scope="module")
def stopped(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds, for each signal by its number, the folder where it ended a run."""
    root = tmp_path_factory.mktemp("stopped")
    for number in CODES:
        (root / str(int(number)) / "out").mkdir(parents=True)
        (root / str(int(number)) / "out" / "emp_report.json").write_text("{}")
    line = [
        sys.executable,
        "-c",
        PROGRAM,
        "--model",
        models("llama"),
        "--method",
        "magnitude",
        "--output",
        "out",
        "--overwrite",
    ]
    subprocess.run([*map(str, line)], cwd=root, env=os.environ, check=True, timeout=100)
    return root


@pytest.mark.parametrize("number", CODES)
def test_a_run_that_is_stopped_half_way(models: Callable[[str], Path], stopped: Path, tmp_path: Path, number: int) -> None:
    folder = stopped / str(int(number))
    assert int((folder / "code").read_text()) == CODES[signal.Signals(number)]
    said = (folder / "stderr").read_text()
    assert "Traceback" not in said
    assert f"kept in {folder / '.out.partial'}; the same command resumes from there" in said
    assert {path.name for path in folder.iterdir()} == {"out", ".out.partial", "stderr", "code"}
    assert [path.name for path in (folder / "out").iterdir()] == ["emp_report.json"]
    prune(models("llama"), method="magnitude", output=folder / "out", overwrite=True)
    prune(models("llama"), method="magnitude", output=tmp_path / "whole")
    assert (folder / "out" / "emp_manifest.json").read_bytes() == (tmp_path / "whole" / "emp_manifest.json").read_bytes()
    assert {path.name for path in folder.iterdir()} == {"out", "stderr", "code"}
