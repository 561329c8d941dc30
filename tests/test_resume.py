"""Runs killed, interrupted or failed at any moment: no incomplete output, and the same command
resumes to the same bytes.

`scripts/torture.py` disturbs runs thousands of times; a few of its disturbances are repeated here.
"""

import errno
import fcntl
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torture
import transformers
from stops import Killed, save_each_block

from emp_llm import calibrate, prune
from emp_llm.checkpoint.files import FileLock
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError
from emp_llm.models.blockwise import Step
from emp_llm.options.recipe import Score
from emp_llm.pruning import writing
from emp_llm.update.update import Update

CASES = [
    "prune, rows",
    "prune, all targets as one",
    "prune with calibration",
    "prune with a refit",
    "calibrate",
    "calibrate, a model in memory",
]


@pytest.fixture(scope="module")
def sharded(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several shards, as large models are."""
    folder = tmp_path_factory.mktemp("sharded")
    source = tiny_llama
    transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(
        folder, max_shard_size="20KB"
    )
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _fine_grained_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks of rows, and the state of a calibration after each decoder block."""
    row_chunks = Matrix.row_chunks
    monkeypatch.setattr(
        Matrix, "row_chunks", lambda self, weights: row_chunks(self, min(weights, 1000))
    )
    save_each_block(monkeypatch)


class Tortured:
    """A case, and the files and calls of its undisturbed run."""

    def __init__(self, name: str, model: Path, text: Path, folder: Path) -> None:
        (self.case,) = (
            case
            for case in torture.cases(model, str(text), samples=2, seqlen=32)
            if case.name == name
        )
        self.folder = folder / "run"
        self.folder.mkdir()
        self.complete, self.writes, self.calls, self.seconds = torture.undisturbed(
            self.case, self.folder
        )

    def check(self, disturb: Callable[[Path], str | None]) -> bool:
        """Disturb a run, run it again, and compare the files; returns whether there was work to
        resume.
        """
        problem, resumed = torture.disturb_and_rerun(self.case, self.folder, self.complete, disturb)
        assert problem is None, problem
        return resumed


@pytest.mark.parametrize("name", CASES)
def test_kills_and_faults(name: str, sharded: Path, text: Path, tmp_path: Path) -> None:
    tortured = Tortured(name, sharded, text, tmp_path)
    resumed = 0
    case = tortured.case
    for share in (0.4, 0.75, 0.97):
        resumed += tortured.check(torture.killed_at(case, round(share * tortured.writes)))
    starts_over = ("prune, all targets as one", "calibrate, a model in memory")
    assert resumed or case.name in starts_over, "at least one killed run left work to resume"
    for share, code in ((0.9, errno.EIO), (0.7, errno.ENOSPC)):
        tortured.check(torture.faulty_at(case, round(share * tortured.calls), code))
    tortured.check(torture.killed_after(case, True, tortured.seconds / 10, signal.SIGKILL, -9))


def test_a_fork_of_a_process_with_threads(tmp_path: Path) -> None:
    """The threads of torch do not exist in a fork, which would wait for them."""
    square = torch.ones(600, 600)
    try:
        torch.set_num_threads(2)
        square @ square.exp()
        child = torture.in_fork(lambda: square @ square.exp(), tmp_path / "log")
        until = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
        assert ended == (child, 0)
    finally:
        torch.set_num_threads(1)


def test_faults_of_the_last_calls(sharded: Path, text: Path, tmp_path: Path) -> None:
    """These write the report and the manifest, flush everything to disk and rename the folder."""
    tortured = Tortured(CASES[0], sharded, text, tmp_path)
    for call in [*range(tortured.calls - 17, tortured.calls, 3), tortured.calls - 1]:
        tortured.check(torture.faulty_at(tortured.case, call, errno.EIO))


def kill_at(monkeypatch: pytest.MonkeyPatch, target: int) -> list[str]:
    """Kill the run when it writes the n-th target; returns a list that grows by the name of each
    target that is begun.
    """
    begun = []
    put_rows = writing._ShardFile.put_rows

    def counted(file: Any, of: Any, chunks: Any) -> Any:
        if len(begun) == target:
            raise Killed
        begun.append(of.name)
        return put_rows(file, of, chunks)

    monkeypatch.setattr(writing._ShardFile, "put_rows", counted)
    return begun


def run_killed(monkeypatch: pytest.MonkeyPatch, target: int, options: dict[str, Any]) -> None:
    """Prune, and kill the run at the n-th target."""
    with monkeypatch.context() as patch:
        kill_at(patch, target)
        with pytest.raises(Killed):
            prune(**options)


@pytest.mark.parametrize("group", ["row", "matrix"])
def test_finished_shards_are_not_written_again(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    options = {"model": sharded, "method": "emp-magnitude", "group": group}
    with monkeypatch.context() as patch:
        written = kill_at(patch, -1)
        prune(output=tmp_path / "whole" / "out", **options)
    run_killed(monkeypatch, len(written) - 1, options | {"output": tmp_path / "killed" / "out"})
    assert not (tmp_path / "killed" / "out").exists()
    noted = json.loads((tmp_path / "killed" / ".out.partial" / "manifest.json").read_text())[
        "shards"
    ]
    assert 0 < len(noted) < len(list(sharded.glob("*.safetensors")))
    with monkeypatch.context() as patch:
        written_again = kill_at(patch, -1)
        # It replaces an output, not the work of the run.
        prune(output=tmp_path / "killed" / "out", overwrite=True, **options)
    assert 0 < len(written_again) < len(written)
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["out"]


def test_finished_calibration_is_not_run_again(
    sharded: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {
        "model": sharded,
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
    }
    common |= {"output": tmp_path / "out", "device_map": "disk", "check": False}
    run_killed(monkeypatch, 0, common)
    monkeypatch.setattr(Step, "run", lambda *_: pytest.fail("calibrated again"))
    report = prune(**common)
    assert set(report["stages"]) >= {"load", "calibrate", "prune"}, (
        "the report includes the stages of the first run"
    )


@pytest.fixture
def unfinished(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a killed run that left work."""
    model = Path(shutil.copytree(sharded, tmp_path / "model"))
    options = {
        "model": str(model),
        "output": tmp_path / "out",
        "method": "emp-magnitude",
    }
    run_killed(monkeypatch, 5, options)
    assert (tmp_path / ".out.partial" / "manifest.json").is_file()
    return options


OWN = """
from dataclasses import dataclass

import numpy as np
from emp_llm.options.recipe import Score
from emp_llm.selection.criteria import own_criterion
from emp_llm.update.update import Admm


def tabled(weight):
    return weight.double().abs() ** float(np.load("table.npy"))


tabled.reads = ["table.npy"]


class Squared:
    def __call__(self, weight):
        return weight.double() ** 2


squared = Squared()


@dataclass(frozen=True)
class Powers(Score):
    name = "powers"
    table: str = "table.npy"

    @property
    def reads(self):
        return [self.table]

    @property
    def criterion(self):
        return own_criterion(tabled, self.name)


@dataclass(frozen=True, kw_only=True)
class Moved(Admm):
    name = "moved"
"""


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        *((what, "own_code.py") for what in ("tabled", "squared", "powers", "moved")),
        *((what, "table.npy") for what in ("tabled", "powers")),
    ],
)
def test_a_run_by_other_code_of_the_user_is_refused(
    sharded: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    changed: str,
) -> None:
    """Or by other files that a score says that it reads; the same code resumes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(Score, "kinds", dict(Score.kinds))
    monkeypatch.setattr(Update, "kinds", dict(Update.kinds))
    code = Path("own_code.py")
    code.write_text(OWN)
    np.save("table.npy", 1.0)

    def options() -> dict[str, Any]:
        """Those of a new process."""
        sys.modules.pop("own_code", None)
        module = importlib.import_module("own_code")
        common = {"model": sharded, "output": tmp_path / "out", "check": False}
        if what == "moved":
            common |= {"calibration": str(text), "samples": 2, "seqlen": 32, "device_map": "cpu"}
        if what in ("powers", "moved"):
            return common | {"method": f"emp-{what}"}
        return common | {"criterion": getattr(module, what)}

    run_killed(monkeypatch, 5, options())
    before = Path(changed).read_bytes()
    if changed == "table.npy":
        np.save(changed, 2.0)
    else:
        code.write_text(OWN + "# changed")
    with pytest.raises(UserError, match=r"unfinished run with recipe\.(score|source of)"):
        prune(**options())
    Path(changed).write_bytes(before)
    prune(**options())
    if changed == "table.npy":
        Path(changed).unlink()
        with pytest.raises(UserError, match=r"reads table.npy: no such file"):
            prune(**options() | {"output": tmp_path / "other"})
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"beta": 1.5}, r"recipe\.counts\.effective\.beta 1\.0, this one has 1\.5"),
        ({"targets": "all-linear"}, r"recipe\.targets\.layers mlp, this one has all-linear"),
        ({"method": "emp-wanda"}, r"recipe\.score magnitude, this one has wanda"),
    ],
)
def test_run_with_other_options_is_refused(
    unfinished: dict[str, Any],
    tmp_path: Path,
    text: Path,
    change: Any,
    difference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once: before torch is loaded, and before the text is read."""
    match = (
        rf"out: .*\.out\.partial holds .* unfinished run with {difference}.*--overwrite or "
        r"delete"
    )
    options = unfinished | {"calibration": str(text), "samples": 2, "seqlen": 32} | change
    with monkeypatch.context() as patch:
        patch.setattr(
            "emp_llm.runs.prune_run.load_packages", lambda: pytest.fail("torch is loaded")
        )
        with pytest.raises(UserError, match=match):
            prune(**options)
    oracle.edited_copy(
        tmp_path / "model", tmp_path / "other", "model.norm.weight", lambda bits: bits.fill(0)
    )
    with pytest.raises(
        UserError,
        match=r"unfinished run with another source: model-0000\d-of-0000\d\.safetensors",
    ):
        prune(**unfinished | {"model": str(tmp_path / "other")})
    assert (tmp_path / ".out.partial" / "manifest.json").is_file()
    prune(**options, overwrite=True)
    prune(**options | {"output": tmp_path / "fresh"})
    assert (tmp_path / "out" / "emp_manifest.json").read_bytes() == (
        tmp_path / "fresh" / "emp_manifest.json"
    ).read_bytes()
    assert not (tmp_path / ".out.partial").exists()


def test_two_runs_on_one_output(
    unfinished: dict[str, Any], sharded: Path, text: Path, tmp_path: Path
) -> None:
    """The second run names the process of the first. The lock is released when that process is
    killed.
    """

    def hold() -> None:
        FileLock(tmp_path / ".out.partial" / "lock", "it").acquire()
        FileLock(tmp_path / ".norms.lock", "it").acquire()
        os.kill(os.getpid(), signal.SIGSTOP)

    child = torture.in_fork(hold, tmp_path / "log")
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(
            UserError,
            match=rf"out: another run is working on it \(process {child} "
            r"on .*, since 20.*\)",
        ):
            prune(**unfinished)
        with pytest.raises(
            UserError,
            match=r"norms: another run is working on it \(process "
            rf"{child} on",
        ):
            calibrate(
                model=sharded,
                output=tmp_path / "norms",
                calibration=str(text),
                samples=1,
                seqlen=16,
            )
    finally:
        os.kill(child, signal.SIGKILL)
        torture.exit_code(child)
    prune(**unfinished)
    calibrate(model=sharded, output=tmp_path / "norms", calibration=str(text), samples=1, seqlen=16)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "norms", "log"}


def test_file_system_without_locks(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    prune(model=sharded, output=tmp_path / "out", method="magnitude")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_source_that_changes(
    unfinished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = next((tmp_path / "model").glob("*.safetensors"))
    read = Matrix.read

    def touched(self: Matrix, *arguments: Any) -> Any:
        os.utime(shard, ns=(0, 12345))
        return read(self, *arguments)

    monkeypatch.setattr(Matrix, "read", touched)
    with pytest.raises(UserError, match=rf"{shard.name}: it changed while it was read"):
        prune(**unfinished)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(
        UserError,
        match=r"safetensors: it ends before byte \d+; it changed while it was read",
    ):
        prune(**unfinished)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, (
        "work based on two versions of the source is discarded"
    )


@pytest.mark.parametrize(
    ("call", "code", "match"),
    [
        ("preadv", errno.EIO, r"it cannot be read \(input/output error\)\. Run the command again"),
        (
            "pwrite",
            errno.ENOSPC,
            r"disk is full\. Free some space.*kept in .*\.out\.partial; the "
            r"same command resumes",
        ),
    ],
)
def test_faults_keep_finished_work(
    unfinished: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
    match: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *_: torture.fail(code))
        with pytest.raises(UserError, match=match) as caught:
            prune(**unfinished)
    assert ".out.partial; the same command resumes" in caplog.text + str(caught.value)
    caplog.clear()
    with pytest.raises(UserError, match="holds the work of an unfinished run with"):
        prune(**unfinished | {"beta": 1.5})
    assert "the same command resumes" not in caplog.text
    prune(**unfinished)


def test_unusual_paths_and_a_read_only_source(sharded: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "módèle 模型 'q' \"d\" $HOME \n x"
    source = Path(shutil.copytree(sharded, folder / "in put"))
    for path in [*source.iterdir(), source]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = oracle.digest(source)
    out = folder / "öut put"
    prune(model=str(source), output=out, calibration=str(text), samples=2, seqlen=32)
    assert oracle.digest(source) == before
    assert all(os.access(path, os.W_OK) for path in out.iterdir())
    assert {path.name for path in folder.iterdir()} == {"in put", "öut put"}
