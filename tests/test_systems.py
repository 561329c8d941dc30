"""What other systems lack or do in another way: Windows, and macOS."""

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from emp_llm.checkpoint import files
from emp_llm.common.machine import ran_out
from emp_llm.models import blockwise

WINDOWS = (
    "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = sys.modules['resource'] = None"
)
SENTENCE = r"emp-llm runs on Linux and macOS\. On Windows, install and run it in WSL: https://\S+\n"


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("import emp_llm", 1, rf"Traceback .*\nImportError: {SENTENCE}"),
        (
            "sys.argv[0] = r'C:\\Scripts\\emp-llm.exe'; from emp_llm.cli import main; main()",
            2,
            f"error: {SENTENCE}",
        ),
        (
            "import runpy; sys.argv = ['-m']; runpy.run_module('emp_llm.prune', {}, '__main__')",
            2,
            f"error: {SENTENCE}",
        ),
    ],
    ids=["import", "command", "module"],
)
def test_windows_is_told_where_to_go(code: str, status: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{WINDOWS}; {code}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert re.fullmatch(told, done.stderr, re.DOTALL), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("fails", [False, True])
def test_files_reach_the_disk_of_a_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """By F_FULLFSYNC, or by fsync where the file system does not have it."""
    calls = []

    def full(file: int, call: int) -> None:
        calls.append(f"full {call}")
        if fails:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    files.write_bytes(tmp_path / "file", b"content")
    assert calls == ["full 51", *["fsync"] * fails] * 2  # the file, and its folder
    assert (tmp_path / "file").read_bytes() == b"content"


def test_large_files_are_read_and_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS refuses 2 GB in one call."""
    monkeypatch.setattr(files, "_MOST", 3)
    sizes = []
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(
        os, "preadv", lambda file, raw, at: (sizes.append(len(raw[0])), read(file, raw, at))[1]
    )
    monkeypatch.setattr(
        os, "pwrite", lambda file, raw, at: (sizes.append(len(raw)), write(file, raw, at))[1]
    )
    path = tmp_path / "file"
    with path.open("w+b") as file:
        files.write_exactly(file.fileno(), memoryview(b"1234567"), 0)
        raw = memoryview(bytearray(7))
        files.read_exactly(file.fileno(), raw, 0, path)
    assert raw == b"1234567"
    assert sizes == [3, 3, 1] * 2


@pytest.mark.parametrize(("needed", "place"), [(40, "device"), (60, "disk")])
def test_hidden_states_stay_in_the_one_memory_of_a_mac(
    monkeypatch: pytest.MonkeyPatch, needed: int, place: str
) -> None:
    monkeypatch.setattr(blockwise, "available_memory", lambda: 100)
    assert blockwise.choose_place("auto", needed, torch.device("mps")) == place


def test_memory_that_runs_out_on_a_mac() -> None:
    assert ran_out(RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, ...)"))
