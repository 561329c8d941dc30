"""Outputs: the same bytes for the same content, nothing left beside them, and an older output
replaced as a whole or kept.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torture
from runs import NAMES, report_of
from stops import Killed, stopped, stopped_when

from emp_llm import pack, prune, report, unpack
from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint import output
from emp_llm.checkpoint.files import FileLock, lock, write_bytes
from emp_llm.checkpoint.output import OutputFile, OutputFolder, write_folder
from emp_llm.common.errors import UserError
from emp_llm.common.paths import CARD_MARK
from emp_llm.records.base import CalibrationRecord


def test_activations_file_depends_only_on_its_content(tmp_path: Path) -> None:
    """Files that are compared by hash must have the same bytes in every run."""
    ones = torch.ones(3)
    activations = Activations(
        {"norm": {"a": ones, "b": ones}}, {"a": "a", "b": "a"}, CalibrationRecord(model="m")
    )
    written = set()
    for _ in range(6):
        activations.save(tmp_path / "norms.safetensors")
        written.add((tmp_path / "norms.safetensors").read_bytes())
    assert len(written) == 1


def test_interrupt_between_the_renames_of_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_folder(out, {"page": b"old"}, False, "page")
    replace = os.replace

    def first(source: Path, target: Path) -> None:
        replace(source, target)
        monkeypatch.setattr(os, "replace", replace)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", first)
    with pytest.raises(KeyboardInterrupt):
        write_folder(out, {"page": b"new"}, True, "page")
    assert (out / "page").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_older_output_is_kept_until_it_is_replaced(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is killed between the two renames, fails at the second, or is killed after both: one
    whole output is there.
    """
    source = tiny_llama
    out = tmp_path / "out"
    before = oracle.digest(source)
    options = {"model": source, "output": out, "method": "emp-magnitude"}
    prune(**options, beta=0.5)
    old = torture.snapshot(tmp_path)
    replace = os.replace
    for error in (Killed, OSError(errno.EIO, "input/output error")):

        def second(source: Any, target: Any, error: Any = error) -> None:
            if Path(target) == out and Path(source).name == "files":
                raise error
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", second)
            with pytest.raises((Killed, UserError)):
                prune(**options, overwrite=True)
        if error is Killed:
            assert not out.exists()
            with pytest.raises(UserError, match=r"out: it exists"):
                prune(**options)
        assert torture.snapshot(tmp_path) == old

    with stopped(OutputFolder, "_remove"):
        prune(**options, overwrite=True)
    assert (tmp_path / ".out.partial" / "replaced").is_dir()
    prune(**options, overwrite=True, beta=2.0)
    assert report_of(out)["recipe"]["counts"]["effective"]["beta"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"], (
        "nothing is left beside the output"
    )
    assert oracle.digest(source) == before


def test_output_that_appears_during_the_run(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output of another run is not replaced without --overwrite: neither at the start of this
    run, nor at its end.
    """
    options = {
        "model": tiny_llama,
        "output": tmp_path / "out",
        "method": "emp-magnitude",
    }
    opened = OutputFolder._open
    completed = OutputFolder.complete

    def after_another_run(method: Any) -> Any:
        def call(self: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(OutputFolder, "_open", opened)
                patch.setattr(OutputFolder, "complete", completed)
                prune(**options | {"output": tmp_path / "other"}, beta=0.5)
            os.replace(tmp_path / "other", tmp_path / "out")
            method(self)

        return call

    for name, left in (("_open", {"out"}), ("complete", {"out", ".out.partial"})):
        with monkeypatch.context() as patch:
            patch.setattr(OutputFolder, name, after_another_run(getattr(OutputFolder, name)))
            with pytest.raises(
                UserError,
                match=r"out: it exists; name another folder, or add --overwrite",
            ):
                prune(**options)
        assert report_of(tmp_path / "out")["recipe"]["counts"]["effective"]["beta"] == 0.5
        assert {path.name for path in tmp_path.iterdir()} == left
        shutil.rmtree(tmp_path / "out")
    prune(**options)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_between_the_renames(tmp_path: Path) -> None:
    """The work folder holds no finished work, but the older output."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "emp_report.json").write_text("{}")
    with (
        stopped_when(os, "replace", lambda source, _: Path(source).name == "files"),
        OutputFolder(tmp_path / "out", [], 0, overwrite=True) as out,
    ):
        out.begin({})
        out.complete()
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"out: it exists"), OutputFolder(tmp_path / "out", [], 0):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "emp_report.json"]


def test_killed_after_the_rename(tmp_path: Path) -> None:
    """The same command says that the output exists, and cleans up."""

    def killed(self: OutputFolder) -> None:
        self._lock.release()  # as the system does
        raise Killed

    with (
        stopped(OutputFolder, "_remove", killed),
        OutputFolder(tmp_path / "out", [], 0) as out,
    ):
        out.begin({})
        (out.files / "emp_report.json").write_text("{}")
        out.complete()
    assert (tmp_path / ".out.partial").is_dir()
    with pytest.raises(UserError, match=r"out: it exists"), OutputFolder(tmp_path / "out", [], 0):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "emp_report.json"]


def test_work_of_another_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for machine in ("a, 1 thread", "a, 1 thread", "a, 2 threads"):
        assert not caplog.messages
        with OutputFolder(tmp_path / "out", [], 0) as out:
            out.begin({}, machine)
            out.note(part=1)
    assert (
        "out was begun with a, 1 thread; with a, 2 threads, norms and fitted weights differ"
    ) in caplog.text


def test_run_that_starts_while_the_work_folder_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run takes the lock as soon as it is released."""
    work, other = (OutputFolder(tmp_path / "out", [], 0) for _ in range(2))
    work._open()
    release = FileLock.release

    def released(self: FileLock) -> None:
        release(self)
        with monkeypatch.context() as patch:
            patch.setattr(FileLock, "release", release)
            other._open()
            other.begin({})

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "release", released)
        work._remove()
    assert {path.name for path in (tmp_path / ".out.partial").iterdir()} == {"lock", "files"}
    other._remove()
    assert not list(tmp_path.iterdir())


def _of_a_user(folder: Path) -> Path:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


@pytest.mark.parametrize("kind", ["work", "lock", "files", "manifest", "calibration", "hard link"])
def test_links_in_the_place_of_work(tiny_llama: Path, tmp_path: Path, kind: str) -> None:
    """A repository or an archive can hold them. They are neither followed nor emptied, and
    nothing appears behind them.
    """
    place = tmp_path / "place"
    place.mkdir()
    mine = _of_a_user(tmp_path / "mine")
    work = place / ".out.partial"
    if kind == "work":
        work.symlink_to(mine)
    elif kind == "calibration":
        (place / ".out.calibration").symlink_to(mine)
    else:
        work.mkdir()
        (work / "lock").touch()
    if kind == "lock":
        (work / "lock").unlink()
        (work / "lock").symlink_to(mine / "thesis.txt")
    elif kind == "hard link":
        os.link(mine / "thesis.txt", work / "manifest.json")
    elif kind == "manifest":
        (work / "manifest.json").symlink_to(mine / "thesis.txt")
    elif kind == "files":
        (work / "manifest.json").write_text('{"signature": {}, "shards": {}}')
        (work / "files").symlink_to(mine)
    for overwrite in (False, True):
        with pytest.raises(
            UserError,
            match=r"is a link. emp-llm makes none for its work and follows none; delete it",
        ):
            prune(tiny_llama, output=place / "out", method="emp-magnitude", overwrite=overwrite)
        assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
        assert (mine / "thesis.txt").read_text() == "years of work"
        assert not (place / "out").exists()


@pytest.mark.parametrize("name", ["manifest.json", "lock"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "another value", "nested"])
def test_what_is_no_file_of_ours_in_a_work_folder(
    tiny_llama: Path, tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Notes that have changed begin again; a lock that is none is refused, and so is a pipe."""
    with OutputFolder(tmp_path / "out", [], 0) as out:
        out.begin({})
        out.note(shards={"a": "b"})
    path = tmp_path / ".out.partial" / name
    noted = path.read_text() if path.exists() else "{}"
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 100_000 if kind == "nested" else noted.replace('"b"', "5"))
    how = {"method": "magnitude", "output": tmp_path / "out", "overwrite": True}
    if name == "lock" or kind == "pipe":
        with pytest.raises(UserError, match=r" is (a folder|a pipe|no lock of emp-llm)"):
            prune(tiny_llama, **how)
    else:
        prune(tiny_llama, **how)
        assert "manifest.json is damaged (" in caplog.text


@pytest.mark.parametrize("name", [".out.partial", ".out.calibration"])
@pytest.mark.parametrize("beside", ["", "manifest.json", "lock", "state.json"])
def test_a_folder_of_the_user_with_a_name_of_ours(
    tiny_llama: Path, tmp_path: Path, name: str, beside: str
) -> None:
    """It is the user's as soon as it holds a file of another name, whatever lies beside that."""
    mine = _of_a_user(tmp_path / name)
    if beside:
        (mine / beside).touch()
    before = torture.snapshot(mine)
    for overwrite in (False, True):
        with pytest.raises(
            UserError,
            match=r"thesis.txt.*, which emp-llm did not put there, so "
            r"the folder is neither used",
        ):
            prune(
                tiny_llama,
                output=tmp_path / "out",
                method="emp-magnitude",
                overwrite=overwrite,
            )
        assert torture.snapshot(mine) == before


def test_a_folder_named_files_is_no_proof_of_our_work(tmp_path: Path) -> None:
    _of_a_user(tmp_path / ".out.partial").rename(tmp_path / "thesis")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / "thesis").rename(tmp_path / ".out.partial" / "files")
    with pytest.raises(UserError, match="holds files, which emp-llm did not put there"):
        write_folder(tmp_path / "out", {"page": b""}, False, "page")
    assert (tmp_path / ".out.partial" / "files" / "thesis.txt").exists()


@pytest.mark.parametrize("name", [".results.json.lock", ".results.json.partial"])
def test_links_in_the_place_of_work_on_a_file(tmp_path: Path, name: str) -> None:
    thesis = _of_a_user(tmp_path / "mine") / "thesis.txt"
    (tmp_path / name).symlink_to(thesis)
    with pytest.raises(UserError, match="is a link"), lock(tmp_path / "results.json"):
        write_bytes(tmp_path / "results.json", b"{}")
    assert thesis.read_text() == "years of work"
    (tmp_path / name).unlink()
    (tmp_path / ".results.json.lock").write_text("a note")
    with pytest.raises(UserError, match="is no lock of emp-llm"), lock(tmp_path / "results.json"):
        pass
    assert (tmp_path / ".results.json.lock").read_text() == "a note"


def test_overwrite_deletes_nothing_of_the_user(tiny_llama: Path, tmp_path: Path) -> None:
    """Only an output in which emp-llm wrote every file is replaced: pruned, packed; not a dense
    model.
    """
    out = tmp_path / "out"
    options = {
        "model": tiny_llama,
        "output": out,
        "method": "emp-magnitude",
        "overwrite": True,
    }
    prune(**options)
    prune(**options)
    for name in ("notes.txt", ".git/config"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        with pytest.raises(
            UserError,
            match=rf"it also holds {name}, which emp-llm did not write "
            r"there.*Move that away",
        ):
            prune(**options)
        assert (out / name).read_text() == "mine"
        (out / name).unlink()
    shutil.rmtree(out / ".git")
    packed = tmp_path / "packed"
    for _ in range(2):
        pack(out, packed, overwrite=True)
    (packed / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"it also holds notes.txt"):
        prune(**options | {"output": packed})
    shutil.copytree(tiny_llama, tmp_path / "dense")
    with pytest.raises(UserError, match="it is not a model folder that emp-llm wrote"):
        prune(**options | {"output": tmp_path / "dense"})


def test_overwrite_of_a_report_deletes_nothing_of_the_user(tmp_path: Path) -> None:
    files = {"report.json": b"{}", "figures/a.svg": b"<svg/>"}
    write_folder(tmp_path / "report", files, False, "report.json")
    (tmp_path / "report" / "notes.txt").write_text("mine")
    with pytest.raises(
        UserError,
        match=r"it also holds notes.txt, which emp-llm did not write there",
    ):
        write_folder(tmp_path / "report", files, True, "report.json")
    (tmp_path / "report" / "notes.txt").rename(tmp_path / "report" / "figures" / "mine.svg")
    for content in (b"{}", b"[]", b'{"files": 5}'):
        (tmp_path / "report" / "report.json").write_bytes(content)
        with pytest.raises(UserError, match=r"it also holds figures/mine.svg"):
            write_folder(tmp_path / "report", files, True, "report.json")
    assert (tmp_path / "report" / "figures" / "mine.svg").read_text() == "mine"


def test_overwrite_replaces_all_that_emp_llm_wrote(
    tiny_llama: Path, runs: Path, tmp_path: Path
) -> None:
    """The card of a push, what a pack held beside the model, and figures that the next report
    does not have.
    """
    out = tmp_path / "out"
    packed = tmp_path / "packed"
    restored = tmp_path / "restored"
    options = {
        "model": tiny_llama,
        "output": out,
        "method": "emp-magnitude",
        "overwrite": True,
    }
    prune(**options)
    (out / "README.md").write_text(f"A card\n{CARD_MARK}")
    prune(**options)
    (out / "README.md").write_text("A card of my own")
    with pytest.raises(UserError, match=r"it also holds README\.md"):
        prune(**options)
    pack(out, packed)
    for _ in range(2):
        unpack(packed, restored, overwrite=True)
    (restored / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"it also holds notes\.txt"):
        unpack(packed, restored, overwrite=True)
    shutil.copytree(tiny_llama, tmp_path / "dense")
    with pytest.raises(UserError, match="it is not a model folder that emp-llm wrote"):
        unpack(packed, tmp_path / "dense", overwrite=True)
    report([runs / name for name in NAMES], output=tmp_path / "report")
    assert list((tmp_path / "report" / "figures").iterdir())
    report([runs / "half"], output=tmp_path / "report", overwrite=True)


def test_a_private_model_stays_private(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    out = tmp_path / "out"
    shutil.copytree(tiny_llama, source)
    for shard in source.glob("*.safetensors"):
        shard.chmod(0o600)
    (source / ".old.safetensors").symlink_to("nowhere")
    prune(source, output=out, method="emp-magnitude")
    assert {path.stat().st_mode & 0o077 for path in (out, *out.rglob("*"))} == {0}
    for shard in source.glob("model*.safetensors"):
        shard.chmod(0o640)
    prune(source, output=tmp_path / "group", method="emp-magnitude")
    assert {
        path.stat().st_mode & 0o777 for path in (tmp_path / "group").rglob("*") if path.is_file()
    } == {0o640}


def _failing(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _complete(path: Path, content: str, overwrite: bool = False) -> None:
    with OutputFolder(path, [], 0, overwrite, expected="page") as out:
        out.begin({})
        (out.files / "page").write_bytes(content.encode())
        out.note(page=True)
        out.complete()


@pytest.mark.parametrize("older", [True, False])
def test_nothing_new_stands_under_the_name_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """Not even where the last call fails, which flushes the name to the disk."""
    path = tmp_path / "out"
    if older:
        _complete(path, "old")
    sync = output.sync_path

    def fails_for_the_name(folder: Path) -> None:
        _failing() if folder == tmp_path else sync(folder)

    with monkeypatch.context() as patch:
        patch.setattr(output, "sync_path", fails_for_the_name)
        with pytest.raises(UserError, match=r"the same command resumes"):
            _complete(path, "new", overwrite=True)
    assert [file.read_text() for file in path.glob("*")] == ["old"] * older
    _complete(path, "new", overwrite=True)
    assert (path / "page").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_work_that_could_not_be_noted_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there without a note could not be told from a user's files."""
    with monkeypatch.context() as patch:
        patch.setattr(output, "write_own", _failing)
        with pytest.raises(UserError, match=r"--output") as caught:
            _complete(tmp_path / "out", "new")
    assert "resumes" not in str(caught.value)
    assert not os.listdir(tmp_path)
    _complete(tmp_path / "out", "new")


def test_an_output_is_finished_though_its_work_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "_remove", _failing)
        _complete(tmp_path / "out", "new")
    with pytest.raises(UserError, match="add --overwrite"):
        _complete(tmp_path / "out", "newer")
    assert (tmp_path / "out" / "page").read_text() == "new"


def test_a_file_that_may_not_be_on_disk_is_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "norms"
    monkeypatch.setattr(output, "sync_path", _failing)

    def write() -> None:
        with OutputFile(path) as out:
            path.write_text("whole")
            out.complete()

    with pytest.raises(UserError, match=r"input/output error"):
        write()
    assert not os.listdir(tmp_path)
