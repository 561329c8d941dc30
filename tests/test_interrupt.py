"""An interrupted run says how to resume it, and leaves an older output unchanged."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launch import launch

from emp_llm import prune
from emp_llm.pruning.masks import Pruner

TARGETS = "down_proj,lm_head"  # in two shards
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def stop_half_way(number: int) -> None:
    """Send this process a signal when a shard is finished and the next one begun, as Ctrl-C or a
    scheduler does.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    rows = Pruner.prune_target
    begun = [0]

    def stop(pruner: Any, target: Any, *arguments: Any) -> Any:
        begun[0] += 1
        if begun[0] == len(pruner.targets):
            while not Path(".out.partial/manifest.json").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)
            time.sleep(60)
        return rows(pruner, target, *arguments)

    Pruner.prune_target = stop  # type: ignore[method-assign]


@pytest.mark.parametrize("number", CODES)
def test_a_run_that_is_stopped_half_way(tiny_llama: Path, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "run"
    logs = tmp_path / "logs"
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "emp_report.json").write_text("{}")
    logs.mkdir()
    line = [f"prune --method magnitude --model {tiny_llama} --targets", TARGETS]
    line += ["--output", "out", "--overwrite"]
    done = launch(1, folder, logs, *line, prepare=lambda: stop_half_way(number))
    assert done.codes == [CODES[signal.Signals(number)]]
    assert "Traceback" not in done.error
    assert f"kept in {folder / '.out.partial'}; the same command resumes from there" in done.error
    assert {path.name for path in folder.iterdir()} == {"out", ".out.partial"}
    assert [path.name for path in (folder / "out").iterdir()] == ["emp_report.json"]
    prune(tiny_llama, method="magnitude", targets=TARGETS, output=folder / "out", overwrite=True)
    prune(tiny_llama, method="magnitude", targets=TARGETS, output=tmp_path / "whole")
    assert (folder / "out" / "emp_manifest.json").read_bytes() == (
        tmp_path / "whole" / "emp_manifest.json"
    ).read_bytes()
    assert {path.name for path in folder.iterdir()} == {"out"}
