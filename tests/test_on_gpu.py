"""scripts/on_gpu.sh and the table of scripts/bench_gpu.py, tried without a GPU."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import bench_gpu
import bench_runtime_gpu
import pytest
import torch
import train_witness
from _pytest.mark.expression import Expression
from conftest import Run

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "on_gpu.sh"


def printed(folder: Path, code: int = 0, **more: str) -> str:
    """What the script prints."""
    environment = (
        os.environ
        | {"DRY_RUN": "1", "OUT": str(folder), "SCRATCH": str(folder), "PYTHON": sys.executable}
        | more
    )
    done = subprocess.run(
        ["bash", SCRIPT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def check_options(
    line: str, name: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options of a script in a command exist."""
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    usage = capsys.readouterr().out
    options = [word for word in shlex.split(line.split(name)[1]) if word.startswith("--")]
    assert options
    assert [option for option in options if option not in usage] == []


def test_every_file_and_option_exists(
    tmp_path: Path, command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPT.read_text()
    shown = printed(tmp_path)
    named = set(re.findall(r"\b(?:scripts|tests)/\w+\.(?:py|sh)\b", shown + script))
    assert {"scripts/bench_gpu.py", "tests/test_cuda.py", "tests/test_runtime_cuda.py"} <= named
    kinds = re.findall(r"^== (road|tests|timing)", shown, re.MULTILINE)
    assert list(dict.fromkeys(kinds)) == ["road", "tests", "timing"]
    roads = [line.split(" -m emp_llm ")[1] for line in shown.splitlines() if "-m emp_llm " in line]
    assert len(roads) == 7
    for name, *words in (line.split() for line in roads):
        usage = command(name, "--help", "all").stdout
        assert [word for word in words if word.startswith("--") and word not in usage] == []
    assert all((ROOT / name).is_file() for name in named)
    lines = [line for line in shown.splitlines() if "bench_gpu.py" in line]
    assert [
        re.findall(
            r"--only (\w+)",
            line,
        )
        for line in lines
    ] == [[section] for section in bench_gpu.SECTIONS]
    for line in lines:
        check_options(line, "bench_gpu.py", bench_gpu, capsys)
    (line,) = (line for line in printed(tmp_path, WITNESS="texts").splitlines() if ".py" in line)
    assert "--text" in line
    check_options(line, "train_witness.py", train_witness, capsys)
    (limit,) = re.findall(r"SECONDS_IN_ALL:-(\d+)", script)
    assert int(limit) + 15 < 600, (
        "each step gets the time that is left, and fifteen seconds more to end"
    )
    elsewhere = subprocess.run(
        ["bash", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (elsewhere.returncode, "Run it from the root of the repository" in elsewhere.stderr) == (
        2,
        True,
    )
    # Every test is in one group. Names stand in for pytest's own collection, which takes seconds
    # for each of the groups.
    groups = [line.split(" -k ") for line in shown.splitlines() if " -m pytest " in line]
    for file in ("tests/test_cuda.py", "tests/test_runtime_cuda.py", "tests/test_update_cuda.py"):
        expressions = [expression.strip() for start, expression in groups if start.endswith(file)]
        for test in re.findall(r"^ *def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE):
            if "compiles" in test:  # needs no GPU
                continue
            for case in (
                [f"{test}[emp-wanda]", f"{test}[magnitude]"]
                if test.startswith("test_checkpoints")
                else [test]
            ):
                found = [
                    text
                    for text in expressions
                    if not text or Expression.compile(text).evaluate(case.__contains__)
                ]
                assert len(found) == 1, f"{file}: {case} is in {found}"


def test_a_row_for_each_step(tmp_path: Path) -> None:
    """As it ends, whether it passes, fails or finds no time; by an interpreter that does nothing,
    and fails for one command.
    """
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "    *'emp_llm heal'*) exit 3 ;;\n    *pytest*) echo 7 passed, 1 skipped in 2 s ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    tables = []
    for seconds, code in (("300", 1), ("18", 0)):
        printed(tmp_path, DRY_RUN="", PYTHON=str(python), SECONDS_IN_ALL=seconds, code=code)
        rows = (tmp_path / "on_gpu.md").read_text().split("|---|---|---:|\n")[1].splitlines()
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        tables.append({name: result for name, result, _ in cells})
    results, late = tables
    assert results["road: prune"] == "passed"
    assert results["road: heal"] == "failed: exit code 3"
    assert results["tests: masks"] == "7 passed, 1 skipped"
    assert list(results)[-1] == "timing: prune"
    assert set(late.values()) == {"not run: no time left"}
    assert [name for name in late if ":" in name] == [
        name for name in results if not name.startswith("tests")
    ]


def test_the_table_has_every_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the CPU, with a tiny model; the commands run within this process. A failure has a row,
    and does not stop the others.
    """

    def run_here(line: list[str]) -> int:
        assert line[:2] == [sys.executable, "-m"]
        command(*(["prune"] if line[2] == "emp_llm.prune" else []), *line[3:])
        return 10**9

    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(bench_gpu, "run_and_watch", run_here)
    line = ["--device", "cpu", "--size", "tiny", "--output", str(tmp_path / "gpu.md")]
    more = [
        "--seconds",
        "0",
        "--repeats",
        "1",
        "--folder",
        str(tmp_path / "work"),
    ]
    with pytest.raises(SystemExit, match="0"):
        bench_gpu.main([*line, *more])
    page = (tmp_path / "gpu.md").read_text()
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in page.splitlines()
        if row.startswith("| ")
    ][1:]
    assert all(len(row) == 7 and row[2] for row in rows)
    counts = {
        section: len([row for row in rows if row[0] == section]) for section in bench_gpu.SECTIONS
    }
    assert counts == {
        "commands": 5,
        "masks": 2 * (1 + 3 * 5),
        "calibration": 7,
        "prune": 4,
    }
    assert "`bash scripts/on_gpu.sh`" in page
    assert f"torch {torch.__version__.partition('+')[0]}" in page
    assert all(row[5] == "1.00 GB" for row in rows if row[0] == "prune" and "emp-" in row[1])
    monkeypatch.setattr(bench_gpu.bench_masks, "cpu_times", fail)
    with pytest.raises(SystemExit, match="1"):
        bench_gpu.main([*line, "--only", "masks"])
    assert (tmp_path / "gpu.md").read_text().count("failed: RuntimeError: no kernel image |") == 10
    monkeypatch.setattr(bench_gpu.torch.cuda, "is_available", lambda: False)
    for script, options in (
        (bench_gpu, ["--only", "masks"]),
        (bench_runtime_gpu, ["--device", "cpu", "--tune"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            script.main(options)
        assert (
            f"{'--tune' if script is bench_runtime_gpu else '--device cuda'} needs"
        ) in capsys.readouterr().err


def test_the_table_of_packed_layers(tmp_path: Path) -> None:
    line = [
        "--device",
        "cpu",
        "--shapes",
        "64x96",
        "--zeros",
        "40",
        "60",
        "--tokens",
        "1",
        "20",
        "--repeats",
        "1",
    ]
    bench_runtime_gpu.main([*line, "--output", str(tmp_path / "runtime_gpu.md")])
    page = (tmp_path / "runtime_gpu.md").read_text()
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in page.splitlines()
        if row.startswith("| 64")
    ]
    assert [row[:3] for row in rows] == [
        ["64 x 96", zeros, tokens] for zeros in ("40 %", "60 %") for tokens in ("1", "20")
    ]
    assert all(
        len(row) == len(bench_runtime_gpu.COLUMNS) and float(row[5]) > 0 and float(row[6]) > 1
        for row in rows
    )
    with pytest.raises(SystemExit, match=r"the packed product is wrong by"):
        bench_runtime_gpu.check_result(torch.ones(1, 2), torch.ones(2, 3), torch.ones(1, 3))
