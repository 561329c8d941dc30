"""Progress without a terminal: a line from time to time, with the stage, the rate and the remaining time."""

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emp_llm.common import progress_bars
from emp_llm.common.progress_bars import progress_bar, progress_of
from emp_llm.prune import prune


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(progress_bars, "time", SimpleNamespace(monotonic=lambda: now[0]))
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


def test_the_rate_is_that_of_the_last_line(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run begins with work that took no time."""
    caplog.set_level(logging.INFO)
    with progress_of("calibrate"), progress_bar(1000, "calibrate", "tok") as bar:
        for count in (900, 10, 0, 0):
            clock[0] += 40
            bar.update(count)
    assert [line.partition(", ")[2] for line in caplog.messages[1:3]] == ["0.25tok/s, 06:00 left", "0.00tok/s"]
    assert caplog.messages[0].startswith("calibrate: 90 % of 1.00ktok")


@pytest.mark.usefixtures("clock")
def test_stages_of_a_run_are_named(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    minutes = itertools.count(step=60)
    monkeypatch.setattr(progress_bars, "time", SimpleNamespace(monotonic=lambda: float(next(minutes))))
    prune(model=models("llama"), output=tmp_path / "out", method="emp-magnitude")
    assert any(line.startswith("prune: ") and " % of " in line and " left" in line for line in caplog.messages)
