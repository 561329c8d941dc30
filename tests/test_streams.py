"""The streams that a command is started with: ASCII alone, closed, full."""

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run

from emp_llm import cli

# Python takes its own way out of LC_ALL=C, so the encoding is named.
PLAIN = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(line: str, folder: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """A line of bash with `$EMP` for the console script."""
    emp = f"{sys.executable} -c 'from emp_llm.cli import main; main()'"
    return subprocess.run(
        ["bash", "-c", line.replace("$EMP", emp)],
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": ""} | more,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_terminal_that_knows_only_ascii(tmp_path: Path) -> None:
    (tmp_path / "héé").mkdir()
    program = (
        "from emp_llm import cli; cli.ready_streams(); print('\\u00b1 \\u03b2 \\u2192 \\u6f22'); "
        "cli.main(['verify', 'h\\u00e9\\u00e9'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | PLAIN,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "+- beta -> \\u6f22\n"
    assert done.returncode == 2
    assert "h\\xe9\\xe9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, models: Callable[[str], Path], closed: str) -> None:
    """The work is done, and no file takes the number of a closed stream."""
    done = shell(
        f"$EMP prune {models('llama')} --method magnitude --sparsity 0.5 -o out {closed}", tmp_path
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    report = json.loads((tmp_path / "out/emp_report.json").read_text())
    assert report["targets"]["sparsity_of_targets"] == pytest.approx(0.5, abs=0.01)


def test_what_other_code_says_and_how_it_ends(
    command: Run,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No control characters reach the terminal. What other code ends has not succeeded."""
    handler = logging.StreamHandler()
    handler.setFormatter(cli._Visible("%(message)s"))
    handler.emit(logging.makeLogRecord({"msg": "red \x1b[31m\nline"}))
    assert capsys.readouterr().err == "red �[31m\nline\n"

    def ends(*_: object) -> None:
        sys.exit(0)

    monkeypatch.setattr("emp_llm.runs.prune_run.make_run", ends)
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\)"):
        command(f"prune --method magnitude --output out {tiny_llama}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_output(tmp_path: Path) -> None:
    done = shell("$EMP env >/dev/full", tmp_path)
    assert done.returncode == 2
    assert "standard output: no space left" in done.stderr
    assert "Traceback" not in done.stderr
    done = shell("$EMP --version >/dev/full; $EMP prnue 2>/dev/full", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done


def test_a_full_disk_that_no_command_expects(
    command: Run, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence wherever it happens, also without a folder for temporary files; other errors keep
    their traceback.
    """
    line = f"prune --method magnitude --output out {tiny_llama}"
    full = OSError(errno.ENOSPC, "No space left", "a.json")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    for error, told in (
        (full, "error: a.json: no space left"),
        (None, "temporary files can be written to. Set TMPDIR"),
        (KeyError("x"), None),
    ):

        def fails(*_: object, error: Exception | None = error) -> None:
            if error is None:
                tempfile.gettempdir()
            else:
                raise error

        monkeypatch.setattr("emp_llm.runs.prune_run.make_run", fails)
        if told is not None:
            assert told in command(line, code=2).stderr
        else:
            with pytest.raises(KeyError):
                command(line)
