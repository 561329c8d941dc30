"""scripts/on_gpu.sh and the table of scripts/bench_gpu.py, tried without a GPU."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_gpu
import bench_helpers
import bench_runtime_gpu
import pytest
import torch
import train_witness
from _pytest.mark.expression import Expression
from conftest import Run

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "on_gpu.sh"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The commands of the script."""
    folder = tmp_path_factory.mktemp("dry")
    environment = os.environ | {"DRY_RUN": "1", "OUT": str(folder), "SCRATCH": str(folder), "PYTHON": sys.executable}
    done = subprocess.run(["bash", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_is_valid_bash(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    elsewhere = subprocess.run(["bash", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert elsewhere.returncode == 2
    assert "Run it from the root of the repository" in elsewhere.stderr


def test_every_file_and_option_exists(printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"\b(?:scripts|tests)/\w+\.(?:py|sh)\b", printed + SCRIPT.read_text()))
    assert {"scripts/bench_gpu.py", "tests/test_cuda.py", "tests/test_runtime_cuda.py"} <= named
    assert all((ROOT / name).is_file() for name in named)
    with pytest.raises(SystemExit) as end:
        bench_gpu.main(["--help"])
    assert end.value.code == 0
    usage = capsys.readouterr().out
    (*lines,) = (line for line in printed.splitlines() if "bench_gpu.py" in line)
    assert [re.findall(r"--only (\w+)", line) for line in lines] == [[section] for section in bench_gpu.SECTIONS]
    for line in lines:
        options = [word for word in shlex.split(line.split("bench_gpu.py")[1]) if word.startswith("--")]
        assert options
        assert all(option in usage for option in options)


def test_the_witness_is_trained_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = os.environ | {"DRY_RUN": "1", "OUT": str(tmp_path), "SCRATCH": str(tmp_path), "WITNESS": "texts"}
    done = subprocess.run(["bash", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    (line,) = (line for line in done.stdout.splitlines() if ".py" in line)
    with pytest.raises(SystemExit):
        train_witness.main(["--help"])
    usage = capsys.readouterr().out
    options = [word for word in shlex.split(line.split("train_witness.py")[1]) if word.startswith("--")]
    assert "--text" in options
    assert all(option in usage for option in options)


def test_the_steps_take_less_than_ten_minutes() -> None:
    """Each step gets the time that is left, and fifteen seconds more to end."""
    (limit,) = re.findall(r"SECONDS_IN_ALL:-(\d+)", SCRIPT.read_text())
    assert int(limit) + 15 < 600


def test_every_test_is_in_one_group(printed: str) -> None:
    """Names of tests stand in for pytest's own collection, which takes seconds for each of the groups."""
    groups = [line.split(" -k ") for line in printed.splitlines() if " -m pytest " in line]
    for file in ("tests/test_cuda.py", "tests/test_runtime_cuda.py"):
        expressions = [expression.strip() for command, expression in groups if command.endswith(file)]
        for test in re.findall(r"^ *def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE):
            for case in cases(test):
                found = [text for text in expressions if not text or Expression.compile(text).evaluate(case.__contains__)]
                assert len(found) == 1, f"{file}: {case} is in {found}"


def cases(test: str) -> list[str]:
    """Names of a test with the parameters by which the groups are chosen."""
    if test.startswith("test_checkpoints"):
        return [f"{test}[{method}]" for method in ("emp-wanda", "magnitude")]
    return [test]


def test_the_table_has_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> None:
    """On the CPU, with a tiny model; the prunes run within this process."""

    def prune_here(line: list[str]) -> int:
        assert line[:3] == [sys.executable, "-m", "emp_llm.prune"]
        done = command("prune", *line[3:])
        assert done.returncode == 0, done.stderr
        return 10**9

    monkeypatch.setattr(bench_gpu, "run_and_watch", prune_here)
    (tmp_path / "tests.tsv").write_text("masks\t9 passed, 2 skipped\t31\n")
    line = ["--device", "cpu", "--size", "tiny", "--seconds", "0", "--repeats", "1", "--folder", str(tmp_path / "work")]
    with pytest.raises(SystemExit) as end:
        bench_gpu.main([*line, "--output", str(tmp_path / "gpu.md"), "--tests", str(tmp_path / "tests.tsv")])
    page = (tmp_path / "gpu.md").read_text()
    assert end.value.code == 0, page
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines() if row.startswith("| ")][1:]
    assert all(len(row) == 7 and row[2] for row in rows)
    counts = {section: len([row for row in rows if row[0] == section]) for section in ("tests", *bench_gpu.SECTIONS)}
    assert counts == {"tests": 1, "masks": 2 * (1 + 3 * 5), "calibration": 7, "prune": 4}
    names = " ".join(row[1] for row in rows)
    for words in ("copy", "emp-wanda: kernel", "plain forward pass", "whole model", "offloaded to disk", "cp -r", "masks: cpu"):
        assert words in names
    assert "`bash scripts/on_gpu.sh`" in page
    assert f"torch {bench_gpu.torch.__version__.partition('+')[0]}" in page
    assert all(row[5] == "1.00 GB" for row in rows if row[0] == "prune" and "emp-" in row[1])


def test_a_failure_has_a_row_and_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(bench_gpu.bench_masks, "cpu_times", fail)
    with pytest.raises(SystemExit) as end:
        bench_gpu.main(["--device", "cpu", "--size", "tiny", "--only", "masks", "--output", str(tmp_path / "gpu.md")])
    assert end.value.code == 1
    assert (tmp_path / "gpu.md").read_text().count("failed: RuntimeError: no kernel image |") == 10


def test_a_gpu_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        bench_gpu.main(["--only", "masks"])
    assert end.value.code == 2
    assert "--device cuda needs an NVIDIA GPU" in capsys.readouterr().err


def test_measurements_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(bench_helpers, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def broken() -> None:
        order.append("broken")
        raise OSError(28, "No space left on device")

    def stopped() -> None:
        order.append("stopped")
        if order.count("stopped") == 3:
            raise KeyboardInterrupt

    def measure(run: object) -> float:
        run()  # type: ignore[operator]
        return 1.0

    ways = {"one": lambda: order.append("one"), "broken": broken, "stopped": stopped}
    found, failed = bench_helpers.in_turn(ways, 5, measure=measure)
    assert order == ["one", "broken", "stopped", "one", "stopped", "one", "stopped"]
    assert found == {"one": [1.0] * 3, "broken": [], "stopped": [1.0] * 2}
    assert failed == {"broken": "OSError: no space left on device"}
    found, _ = bench_helpers.in_turn({"one": lambda: None}, 5, seconds=15, measure=measure, warm_up=True)
    assert found == {"one": [1.0]}, "a second round would end too late"


def test_the_table_of_packed_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--device", "cpu", "--shapes", "64x96", "--zeros", "40", "60", "--tokens", "1", "20", "--repeats", "1"]
    bench_runtime_gpu.main([*line, "--output", str(tmp_path / "runtime_gpu.md")])
    page = (tmp_path / "runtime_gpu.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines() if row.startswith("| 64")]
    assert [row[:3] for row in rows] == [["64 x 96", zeros, tokens] for zeros in ("40 %", "60 %") for tokens in ("1", "20")]
    assert all(len(row) == len(bench_runtime_gpu.COLUMNS) and float(row[5]) > 0 and float(row[6]) > 1 for row in rows)
    assert all(" ".join(row) in " ".join(capsys.readouterr().out.replace("|", "").split()) for row in rows[:1])
    with pytest.raises(SystemExit, match=r"the packed product is wrong by"):
        bench_runtime_gpu.check_result(torch.ones(1, 2), torch.ones(2, 3), torch.ones(1, 3))
    with pytest.raises(SystemExit) as end:
        bench_runtime_gpu.main(["--device", "cpu", "--tune"])
    assert end.value.code == 2
    assert "--tune needs --device cuda" in capsys.readouterr().err
