"""Killed, stopped or failed at any moment: never half an output, and the same command again ends with the same bytes.

What `scripts/torture.py` does by the thousand is done here a few times; the rest is said one by one.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import oracle
import pytest
import torture
from runs import report_of

from emp_llm.calibrate import calibrate
from emp_llm.models import journal, pruning
from emp_llm.models.blockwise import Step
from emp_llm.models.checkpoint import Matrix
from emp_llm.models.errors import UserError
from emp_llm.models.locks import Lock
from emp_llm.models.output import OutputFolder
from emp_llm.models.work import Work
from emp_llm.models.writing import Writer
from emp_llm.prune import prune

Models = Callable[[str], Path]
CASES = ["prune, rows", "prune, a matrix at a time", "prune, all targets as one", "prune with calibration", "calibrate"]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "BLOCK_WEIGHTS", 500)
    monkeypatch.setattr(journal, "_SECONDS", 0.0)
    monkeypatch.setattr(journal, "_RATIO", 0)


class Tortured:
    """A case, and what it ends with when nothing disturbs it."""

    def __init__(self, case: torture.Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        folder.mkdir()
        self.whole, self.writes, self.calls, self.seconds = torture.undisturbed(case, folder)

    def check(self, disturb: Callable[[Path], str | None]) -> bool:
        """Disturb, go on, compare; whether there was work to go on with."""
        wrong, resumed = torture.tried(self.case, self.folder, self.whole, disturb)
        assert wrong is None, wrong
        return resumed


@pytest.fixture(params=CASES)
def tortured(request: pytest.FixtureRequest, models: Models, text: Path, tmp_path: Path) -> Tortured:
    cases = {case.name: case for case in torture.cases(models("llama"), str(text), samples=2, seqlen=32)}
    return Tortured(cases[request.param], tmp_path / "run")


def test_kills_and_faults(tortured: Tortured) -> None:
    case, resumed = tortured.case, 0
    for share in (0.4, 0.75, 0.97):
        resumed += tortured.check(torture.killed_at(case, round(share * tortured.writes)))
    assert resumed, "there was something to go on with"
    for share, code in ((0.5, errno.EIO), (0.9, errno.EIO), (0.7, errno.ENOSPC)):
        tortured.check(torture.faulty_at(case, round(share * tortured.calls), code))
    tortured.check(torture.killed_after(case, True, tortured.seconds / 10, signal.SIGKILL, -9))


def test_faults_of_the_last_calls(models: Models, tmp_path: Path) -> None:
    """Where the report and manifest are written, all is put on the disk and the folder gets its name."""
    tortured = Tortured(torture.cases(models("llama"))[0], tmp_path / "run")
    for call in range(tortured.calls - 17, tortured.calls, 2):
        tortured.check(torture.faulty_at(tortured.case, call, errno.EIO))


class _Killed(BaseException):
    pass


def stop_at(monkeypatch: pytest.MonkeyPatch, block: int) -> list[int]:
    """Let the writing of the n-th block of rows end the run; yields the list of rows as they are written."""
    written: list[int] = []
    write = Matrix.write

    def counted(self: Matrix, file: int, first: int, rows: Any) -> None:
        if len(written) == block:
            raise _Killed
        write(self, file, first, rows)
        written.append(first)

    monkeypatch.setattr(Matrix, "write", counted)
    return written


def killed(monkeypatch: pytest.MonkeyPatch, block: int, options: dict[str, Any]) -> None:
    """A prune that ends at the n-th block of rows."""
    with monkeypatch.context() as patch:
        stop_at(patch, block)
        with pytest.raises(_Killed):
            prune(**options)


@pytest.mark.parametrize("group", ["row", "matrix"])
def test_finished_rows_are_not_written_again(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    options: dict[str, Any] = {"model": str(models("llama")), "method": "emp-magnitude", "group": group}
    with monkeypatch.context() as patch:
        whole = stop_at(patch, -1)
        prune(output=tmp_path / "whole" / "out", **options)
    killed(monkeypatch, len(whole) * 3 // 4, options | {"output": tmp_path / "killed" / "out"})
    assert not (tmp_path / "killed" / "out").exists()
    done = json.loads((tmp_path / "killed" / ".out.partial" / "manifest.json").read_text())["pruned"]
    assert done["segments"] > 4
    with monkeypatch.context() as patch:
        again = stop_at(patch, -1)
        prune(output=tmp_path / "killed" / "out", **options)
    assert len(again) < len(whole) * 0.6
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["out"]


def test_a_finished_calibration_is_not_run_again(
    models: Models, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"model": str(models("llama")), "calibration": str(text), "samples": 4, "seqlen": 64}
    common |= {"output": tmp_path / "out", "device_map": "disk"}
    killed(monkeypatch, 0, common)
    monkeypatch.setattr(Step, "run", lambda *_: pytest.fail("calibrated again"))
    report = prune(**common)
    assert set(report["stages"]) >= {"load", "calibrate", "prune"}, "the report tells of what the first run did"


@pytest.fixture
def unfinished(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a run that was killed and left work."""
    model = Path(shutil.copytree(models("llama"), tmp_path / "model"))
    options: dict[str, Any] = {"model": str(model), "output": tmp_path / "out", "method": "emp-magnitude"}
    killed(monkeypatch, 30, options)
    assert (tmp_path / ".out.partial" / "manifest.json").is_file()
    return options


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"beta": 1.5}, r"recipe\.beta 1\.0, this one has 1\.5"),
        ({"method": "magnitude"}, r"recipe\.method emp-magnitude, this one has magnitude"),
        ({"targets": "all-linear"}, r"recipe\.targets mlp, this one has all-linear"),
        ({"blocks": "model.layers"}, r"blocks None, this one has model\.layers"),
        ({"method": "emp-wanda"}, r"recipe\.method"),
    ],
)
def test_another_run_is_refused(unfinished: dict[str, Any], tmp_path: Path, text: Path, change: Any, named: str) -> None:
    before = oracle.digest(tmp_path)
    others = {"calibration": str(text), "samples": 2, "seqlen": 32}
    with pytest.raises(UserError, match=rf"out: .*\.out\.partial holds .* unfinished run with {named}.*--overwrite or delete"):
        prune(**unfinished | others | change)
    assert oracle.digest(tmp_path).keys() == before.keys()
    assert (tmp_path / ".out.partial" / "manifest.json").is_file()
    prune(**unfinished | others | change, overwrite=True)
    prune(**unfinished | others | change | {"output": tmp_path / "fresh"})
    assert (tmp_path / "out" / "emp_manifest.json").read_bytes() == (tmp_path / "fresh" / "emp_manifest.json").read_bytes()
    assert not (tmp_path / ".out.partial").exists()


def test_other_weights_are_refused(unfinished: dict[str, Any], tmp_path: Path) -> None:
    oracle.edited_copy(tmp_path / "model", tmp_path / "other", "model.norm.weight", lambda bits: bits.fill(0))
    with pytest.raises(UserError, match=r"unfinished run with source\.sha256_of_samples"):
        prune(**unfinished | {"model": str(tmp_path / "other")})


def test_overwrite_goes_on_as_well(unfinished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about an older output: the same command again, whatever it was, goes on."""
    written = stop_at(monkeypatch, -1)
    prune(**unfinished, overwrite=True)
    resumed = len(written)
    prune(**unfinished, overwrite=True)
    assert resumed < len(written) - resumed


def test_two_runs_on_one_output(unfinished: dict[str, Any], models: Models, text: Path, tmp_path: Path) -> None:
    """The second says who holds the first; when that ends, however it ends, its lock is gone."""

    def hold() -> None:
        Lock(tmp_path / ".out.partial" / "lock", "it").acquire()
        Lock(tmp_path / ".norms.lock", "it").acquire()
        os.kill(os.getpid(), signal.SIGSTOP)

    child = torture.in_fork(hold, tmp_path / "log")
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(UserError, match=rf"out: another run is at work on it \(process {child} on .*, since 20.*\)"):
            prune(**unfinished)
        with pytest.raises(UserError, match=rf"norms: another run is at work on it \(process {child} on"):
            calibrate(model=str(models("llama")), output=tmp_path / "norms", calibration=str(text), samples=1, seqlen=16)
    finally:
        os.kill(child, signal.SIGKILL)
        torture.ended(child)
    prune(**unfinished)
    calibrate(model=str(models("llama")), output=tmp_path / "norms", calibration=str(text), samples=1, seqlen=16)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "norms", "log"}


def test_no_locks_on_this_file_system(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    prune(model=str(models("llama")), output=tmp_path / "out", method="magnitude")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_source_that_changes(unfinished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = next((tmp_path / "model").glob("*.safetensors"))
    read = Matrix.read

    def touched(self: Matrix, *arguments: Any) -> Any:
        os.utime(shard, ns=(0, 12345))
        return read(self, *arguments)

    monkeypatch.setattr(Matrix, "read", touched)
    with pytest.raises(UserError, match=rf"{shard.name}: it changed while it was read"):
        prune(**unfinished)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, "what was made of two files does not count"


def test_a_source_that_ends_early(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(UserError, match=r"safetensors: it ends before byte \d+; it changed while it was read"):
        prune(model=str(models("llama")), output=tmp_path / "out", method="magnitude")
    assert not list(tmp_path.iterdir())


def test_a_source_that_cannot_be_read_at_the_moment(
    unfinished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: torture.fail(errno.EIO))
        with pytest.raises(UserError, match=r"it cannot be read \(input/output error\)\. Run the command again"):
            prune(**unfinished)
    assert ".out.partial; the same command goes on from there" in caplog.text
    prune(**unfinished)


def test_a_full_disk_keeps_what_is_finished(
    unfinished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: torture.fail(errno.ENOSPC))
        with pytest.raises(
            UserError, match=r"disk is full\. Free some space.*kept in .*\.out\.partial; the same command goes on"
        ):
            prune(**unfinished)
    prune(**unfinished)


def test_an_older_output_stands_until_the_new_one_does(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two renames, and failed at the second: the older output is there, or comes back."""
    options: dict[str, Any] = {"model": str(models("llama")), "output": tmp_path / "out", "method": "emp-magnitude"}
    prune(**options, beta=0.5)
    old, replace = torture.snapshot(tmp_path), os.replace
    for error in (_Killed, OSError(errno.EIO, "input/output error")):

        def second(source: Any, target: Any, error: Any = error) -> None:
            if Path(target) == tmp_path / "out" and Path(source).name == "files":
                raise error
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", second)
            with pytest.raises((_Killed, UserError)):
                prune(**options, overwrite=True)
        if error is _Killed:
            assert not (tmp_path / "out").exists()
            with pytest.raises(UserError, match=r"out: it exists"):
                prune(**options)
        assert torture.snapshot(tmp_path) == old
    prune(**options, overwrite=True)
    assert torture.snapshot(tmp_path) != old
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_paths_in_other_scripts_and_a_source_that_is_read_only(models: Models, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "módèle 模型 'q' \"d\" $HOME \n x"
    source = Path(shutil.copytree(models("llama"), folder / "in put"))
    for path in [*source.iterdir(), source]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = oracle.digest(source)
    out = folder / "öut put"
    prune(model=str(source), output=out, calibration=str(text), samples=2, seqlen=32)
    assert oracle.digest(source) == before
    assert all(os.access(path, os.W_OK) for path in out.iterdir())
    assert {path.name for path in folder.iterdir()} == {"in put", "öut put"}


def test_two_runs_give_the_same_bytes(models: Models, text: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        prune(model=str(models("llama")), output=tmp_path / name / "out", calibration=str(text), samples=2, seqlen=32)
        runs.append(torture.snapshot(tmp_path / name))
    assert runs[0] == runs[1]


def test_another_run_that_ends_first(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that appears after we looked is not replaced unasked: neither before this run's work, nor at its end."""
    options: dict[str, Any] = {"model": str(models("llama")), "output": tmp_path / "out", "method": "emp-magnitude"}
    opened, published = Work.open, OutputFolder.publish

    def first(run: Any) -> Any:
        def ended(self: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(Work, "open", opened)
                patch.setattr(OutputFolder, "publish", published)
                prune(**options | {"output": tmp_path / "other"}, beta=0.5)
            os.replace(tmp_path / "other", tmp_path / "out")
            run(self)

        return ended

    for patched, name, left in ((Work, "open", {"out"}), (OutputFolder, "publish", {"out", ".out.partial"})):
        with monkeypatch.context() as patch:
            patch.setattr(patched, name, first(getattr(patched, name)))
            with pytest.raises(UserError, match=r"out: it exists; name another folder, or add --overwrite"):
                prune(**options)
        assert report_of(tmp_path / "out")["recipe"]["beta"] == 0.5
        assert {path.name for path in tmp_path.iterdir()} == left
        shutil.rmtree(tmp_path / "out")
    prune(**options)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_behind_both_renames(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was replaced is still there beside what replaced it, and in nobody's way."""
    options: dict[str, Any] = {"model": str(models("llama")), "output": tmp_path / "out", "method": "emp-magnitude"}
    prune(**options, beta=0.5)

    def end(self: Work) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(Work, "remove", end)
        with pytest.raises(_Killed):
            prune(**options, overwrite=True)
    assert (tmp_path / ".out.partial" / "replaced").is_dir()
    prune(**options, overwrite=True, beta=2.0)
    assert report_of(tmp_path / "out")["recipe"]["beta"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_interrupted_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in the work that is worth keeping, but the older output in it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "emp_report.json").write_text("{}")
    replace = os.replace

    def second(source: Any, target: Any) -> None:
        if Path(source).name == "files":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", second)
        with suppress(KeyboardInterrupt), OutputFolder(tmp_path / "out", [], 0, overwrite=True) as out:
            out.begin({})
            out.publish()
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"out: it exists"), OutputFolder(tmp_path / "out", [], 0):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "emp_report.json"]


def test_work_that_another_run_takes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment the lock of what is being deleted is free."""
    work, other = (Work(tmp_path / "work", "it") for _ in range(2))
    work.open()
    release = Lock.release

    def released(self: Lock) -> None:
        release(self)
        with monkeypatch.context() as patch:
            patch.setattr(Lock, "release", release)
            other.open()
            other.begin({}, anew=False)

    with monkeypatch.context() as patch:
        patch.setattr(Lock, "release", released)
        work.remove()
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"lock", "files"}
    other.remove()
    assert not list(tmp_path.iterdir())


def test_stopped_before_the_figures_of_a_matrix_are_noted(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all its rows are written, and N_eff and s_eff of the whole are not."""
    options: dict[str, Any] = {"model": str(models("llama")), "method": "emp-magnitude", "group": "matrix"}
    prune(output=tmp_path / "whole" / "out", **options)

    def end(*_: Any) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "note", end)
        with pytest.raises(_Killed):
            prune(output=tmp_path / "killed" / "out", **options)
    prune(output=tmp_path / "killed" / "out", **options)
    assert torture.snapshot(tmp_path / "killed") == torture.snapshot(tmp_path / "whole")


def test_progress_that_is_damaged(models: Models, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"model": str(models("llama")), "output": tmp_path / "out", "calibration": str(text)}
    options |= {"samples": 2, "seqlen": 32, "execution": "blocks", "device_map": "cpu"}
    run = Step.run

    def second(self: Step, **more: Any) -> None:
        if self.index:
            raise _Killed
        run(self, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", second)
        with pytest.raises(_Killed):
            calibrate(**options)
    (sums,) = (tmp_path / ".out.progress").glob("sums-*.safetensors")
    sums.write_bytes(sums.read_bytes()[:100])
    with pytest.raises(UserError, match=r"\.out\.progress: its progress cannot be read .*Delete the folder"):
        calibrate(**options)
