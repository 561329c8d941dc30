"""Progress without a terminal: a line from time to time, with the stage, the rate and the
remaining time; -q and -v.
"""

import itertools
import logging
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Run

import emp_llm
from emp_llm import evaluate, prune
from emp_llm.cli import COMMANDS
from emp_llm.common import progress
from emp_llm.common.errors import UserError
from emp_llm.common.progress import progress_bar, progress_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(
        progress, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    )
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    return now


def test_a_line_every_thirty_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with progress_of("evaluate dense"), progress_bar(12_000_000, "perplexity", "tok") as bar:
        for _ in range(6):
            clock[0] += 10
            bar.update(500_000)
    with progress_bar(100, "pack", "B") as bar:
        bar.update(50)
    assert caplog.messages == [
        "evaluate dense: perplexity: 12 % of 12.0Mtok, 50.0ktok/s, 03:30 left",
        "evaluate dense: perplexity: 25 % of 12.0Mtok, 50.0ktok/s, 03:00 left",
    ]


def test_the_rate_is_that_of_the_last_line(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run begins with work that took no time."""
    caplog.set_level(logging.INFO)
    with progress_of("calibrate"), progress_bar(1000, "calibrate", "tok") as bar:
        for count in (900, 10, 0, 0):
            clock[0] += 40
            bar.update(count)
    assert caplog.messages[0].startswith("calibrate: 90 % of 1.00ktok")
    assert [line.partition(", ")[2] for line in caplog.messages[1:3]] == [
        "0.25tok/s, 06:00 left",
        "0.00tok/s",
    ]


def test_packages_that_take_seconds_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, on a terminal; elsewhere, like all progress, after half a minute."""
    monkeypatch.setattr(progress, "_PACKAGES", ("xdrlib_of_nobody", "wave"))
    monkeypatch.setitem(sys.modules, "xdrlib_of_nobody", SimpleNamespace())
    for terminal, times in ((False, 0), (True, 1), (True, 0)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=terminal: shown, raising=False)
        if times or not terminal:
            sys.modules.pop("wave", None)
        with progress_of("calibrate"):
            progress.load_packages()
        assert "wave" in sys.modules
        assert (
            capsys.readouterr().err.count("calibrate: load torch and transformers:   0%") == times
        )


def test_stages_and_tasks_of_a_run_are_named(
    evaluable_llama: Path,
    task_suite: Path,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    minutes = itertools.count(step=60.0)
    clock = SimpleNamespace(monotonic=lambda: next(minutes), perf_counter=time.perf_counter)
    monkeypatch.setattr(progress, "time", clock)
    prune(
        model=evaluable_llama,
        output=tmp_path / "out",
        method="emp-magnitude",
        evaluate=str(task_suite),
    )
    lines = [line for line in caplog.messages if " % of " in line]
    titles = {line.rpartition(": ")[0] for line in lines}
    for stage in ("evaluate dense", "evaluate pruned"):
        assert {
            f"{stage}: {part}" for part in ("perplexity", "sums", "sums_text", "sums_shown")
        } <= titles
    assert any(line.startswith("prune: ") and " left" in line for line in lines)
    assert any(
        line.startswith("evaluate dense: sums: ") and "req, " in line and " left" in line
        for line in lines
    )


@pytest.mark.parametrize("quiet", [False, True])
def test_bars_of_tasks_on_a_terminal(
    evaluable_llama: Path,
    task_suite: Path,
    tmp_path: Path,
    monkeypatch: Any,
    capfd: pytest.CaptureFixture[str],
    quiet: bool,
) -> None:
    """lm-eval's own bars do not say which model they are about, nor which task."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    evaluate(model=evaluable_llama, suite=str(task_suite), output=tmp_path / "r.json", quiet=quiet)
    drawn = capfd.readouterr().err
    if quiet:
        assert drawn == ""
        return
    assert "Running loglikelihood" not in drawn
    for part in ("perplexity: 100%", "sums: 100%", "sums_text: 100%", "sums_shown: 100%"):
        assert f"evaluate llama: {part}" in drawn
    assert "36/36" in drawn
    assert "req/s]" in drawn


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_quiet_or_verbose(name: str, command: Run) -> None:
    told = command(name, "--help").stdout
    assert "-v, --verbose" in told
    assert "-q, --quiet" in told
    function = getattr(emp_llm, name)
    given = {
        "model": "m",
        "folder": "f",
        "output": "o",
        "packed": "p",
        "repository": "a/b",
        "runs": ["r"],
        "prompt": "t",
    }
    given |= {"image": "i", "study": "s", "dense": "d"}
    known = {key: value for key, value in given.items() if key in function.options()}
    with pytest.raises(UserError, match="--verbose and --quiet exclude each other; give one"):
        function(**known, verbose=True, quiet=True)


def test_a_quiet_run_shows_its_result_and_warnings(
    tiny_llama: Path, tmp_path: Path, command: Run
) -> None:
    line = f"prune --method emp-magnitude --overwrite --output out --model {tiny_llama}"
    usual = command(line)
    quiet = command(line, "-q")
    assert "written to out" in usual.stderr
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, usual.stdout, "")
    assert command(line, "-q", "--samples", 3).stderr == (
        "warning: --samples has no effect: method emp-magnitude needs no activations.\n"
    )
    wrong = command(line, "--quiet", "--beta", 0, code=2)
    assert wrong.stderr.startswith("error: --beta must be a number above 0")
    command(line, "-q", "-v", code=2)
    assert "written to out" in command(line).stderr, "the next run is as usual"


def test_a_verbose_run_tells_sizes_times_and_memory(
    tiny_llama: Path, text: Path, command: Run
) -> None:
    line = (
        f"prune --samples 4 --seqlen 64 --output out --model {tiny_llama} --calibration {text}",
    )
    done = command(*line, "--device-map", "cpu", "-v")
    told = [
        "emp-llm prune: ",
        " of memory available.",
        "calibrate: begins.",
        "llama: loaded in ",
        "bfloat16, ",
        " kB on cpu.",
    ]
    told += [
        "sequences of 64 tokens, 4 at a time, the whole model at once",
        "calibrate: 256tok in ",
        "prune: begins.",
    ]
    told += ["peak memory ", "prune: finished in ", "emp-llm prune: finished in "]
    assert [words for words in told if words not in done.stderr] == []
    packed = command("pack out packed --verbose")
    assert re.search(r"^pack: [\d.]+kB in ", packed.stderr, re.MULTILINE)
    assert "emp-llm pack: finished in " in packed.stderr
    assert "begins" not in command("pack out packed --overwrite").stderr


def test_small_numbers_are_whole(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """16 jobs, not 16.0 jobs."""
    caplog.set_level(logging.DEBUG)
    with progress_bar(16, "study", " jobs") as bar:
        clock[0] += 40
        bar.update(4)
    assert caplog.messages == [
        "study: 25 % of 16 jobs, 0.10 jobs/s, 02:00 left",
        "study: 16 jobs in 40.0 s.",
    ]
