"""Files: reads and writes at any position, hashes taken on the way, atomic writes, and locks."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from emp_llm.checkpoint import files
from emp_llm.checkpoint.files import FilePool, FileReader, FileWriter, RunningHash, file_hash, write_bytes, write_exactly
from emp_llm.checkpoint.locks import locked
from emp_llm.common import machine
from emp_llm.common.errors import UserError, format_bytes
from emp_llm.prune import prune
from emp_llm.verify import verify

CONTENT = bytes(range(256)) * 40
PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with CONTENT."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def test_short_reads_and_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, raws, at: preadv(file, [raws[0][:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, raw, at: pwrite(file, raw[:1000], at))
    raw = bytearray(5000)
    with FileReader(path) as file:
        file.read(memoryview(raw), 3)
    assert raw == CONTENT[3:5003]
    with path.open("r+b") as output:
        write_exactly(output.fileno(), memoryview(raw), 0)
    assert path.read_bytes() == CONTENT[3:5003] + CONTENT[5000:]


def short_write(file: int, raw: Any, offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
    return pwrite(file, raw[: 2 * PAGE] if len(raw) > 2 * PAGE else raw[: len(raw) // 2 + 1], offset)


def refused_direct_write(file: int, raw: Any, offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
    if fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
        raise OSError(errno.EINVAL, "no")
    return pwrite(file, raw[: PAGE - 1], offset)


@pytest.mark.parametrize("system", ["direct", "no direct", "short", "refused"])
@pytest.mark.parametrize("cuts", [[], [PAGE, 2 * PAGE], [1, 5000, 5000, 60_000], [3 * PAGE - 1, 12 * PAGE]], ids=str)
def test_write_in_order_and_out_of_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, cuts: list[int]) -> None:
    monkeypatch.setattr(files, "PIECE", 4 * PAGE)
    if system == "no direct":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    content = CONTENT * 8 + b"end"
    pieces = list(pairwise([0, *cuts, len(content)]))
    (tmp_path / "source").write_bytes(content)
    for name, order in (("in order", pieces), ("backward", pieces[::-1]), ("again", [*pieces, *pieces])):
        with monkeypatch.context() as patch, FileWriter(tmp_path / name) as output, FileReader(tmp_path / "source") as source:
            if system in ("short", "refused"):
                patch.setattr(os, "pwrite", short_write if system == "short" else refused_direct_write)
            for start, end in order:
                output.write(source.take(start, end - start).data, start)
        assert (tmp_path / name).read_bytes() == content


def test_pages_of_a_file_are_written_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of `take` go past the page cache, all but those of the first and the last page; other bytes do not."""
    (tmp_path / "source").write_bytes(CONTENT * 8)
    direct, pwrite = [], os.pwrite

    def noted(file: int, raw: memoryview, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append((offset, len(raw)))
        return pwrite(file, raw, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    with FileWriter(tmp_path / "copy") as output, FileReader(tmp_path / "source") as source:
        if output._direct < 0:
            pytest.skip("the file system has no direct writes")
        output.write(source.take(5, 5 * PAGE).data, 5)
        output.write(memoryview(bytearray(CONTENT)), 5 * PAGE + 5)
    assert direct == [(PAGE, 4 * PAGE)]


def test_write_that_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space left"), FileWriter(tmp_path / "file") as output:
        output.write(memoryview(bytearray(files.PIECE)), 0)


@pytest.mark.parametrize("system", ["direct", "no direct", "refused", "short"])
@pytest.mark.parametrize("place", [(0, 16 * PAGE), (3, 9 * PAGE), (PAGE, 5 * PAGE + 7), (7, None)], ids=str)
def test_reads_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, place: tuple[int, int]) -> None:
    path, preadv = tmp_path / "file", os.preadv
    path.write_bytes(CONTENT * 8 + b"end")

    def limited(file: int, raws: list[Any], offset: int) -> int:
        if system == "refused" and fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "no")
        return preadv(file, [raws[0][: 2 * PAGE]] if system == "short" else raws, offset)

    monkeypatch.setattr(files, "PIECE", 4 * PAGE)
    monkeypatch.setattr(os, "preadv", limited)
    if system == "no direct":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    wanted = path.read_bytes()[slice(*place)]
    digest = RunningHash(path)
    with FileReader(path, digest, once=True) as file:
        assert file.take(place[0], len(wanted)).tobytes() == wanted
        assert file.take(0, 5 * PAGE).tobytes() == path.read_bytes()[: 5 * PAGE]
        with pytest.raises(UserError, match="it ends before byte"):
            file.take(path.stat().st_size - 5, 4 * PAGE)
    assert digest.finish() == file_hash(path)


def test_errors_of_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    raw = memoryview(bytearray(len(CONTENT) + 1))
    with FileReader(path) as file:
        with pytest.raises(UserError, match=r"file: it ends before byte \d+; it changed while it was read"):
            file.read(raw, 0)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(UserError, match=r"file: it cannot be read \(broken\)"):
            file.read(raw, 0)
    with pytest.raises(UserError, match=r"absent: it cannot be read"):
        FileReader(path.with_name("absent"))


def test_number_of_open_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have more shards than the system lets a process open."""
    monkeypatch.setattr(files, "_OPEN", 8)
    before, most = len(os.listdir("/proc/self/fd")), 0
    names = [f"shard {number:03}".encode() for number in range(100)]
    for name in names:
        (tmp_path / name.decode()).write_bytes(name)
    with FilePool() as pool:
        for name in names:
            content = bytearray(9)
            pool.reader(tmp_path / names[0].decode()).read(memoryview(content), 0)
            pool.reader(tmp_path / name.decode()).read(memoryview(content), 0)
            assert content == name
            most = max(most, len(os.listdir("/proc/self/fd")))
    assert most - before <= 9
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, len(CONTENT)])
def test_hash_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(files, "PIECE", 1000)
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:size])
    assert file_hash(path) == blake3(CONTENT[:size]).hexdigest()
    assert file_hash(path, "sha256") == hashlib.sha256(CONTENT[:size]).hexdigest()


@pytest.mark.parametrize("cuts", [[0, 512, 5000, 10240], [0, 100], [200, 300], []])
def test_hash_of_bytes_in_order_and_out_of_order(path: Path, cuts: list[int]) -> None:
    """Bytes that do not follow those before are read at the end."""
    digest, content = RunningHash(path), memoryview(CONTENT)
    for start, end in pairwise(cuts):
        digest.add(start, content[start:end])
        digest.add(start, content[start:end])
    assert digest.finish() == blake3(CONTENT).hexdigest()


def test_hash_taken_while_reading(path: Path) -> None:
    digest = RunningHash(path)
    with FilePool({path: digest}) as pool:
        for start in (0, 10, 100):
            pool.reader(path).read(memoryview(bytearray(10)), start)
    assert digest.finish() == blake3(CONTENT).hexdigest()


def test_many_writers_of_one_file(path: Path) -> None:
    """Each write is whole, no writer disturbs another, and nothing is left beside the file."""
    problems: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(20):
                write_bytes(path, bytes([number]) * 5000)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(set(path.read_bytes())) == 1
    assert len(path.read_bytes()) == 5000
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_write_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == CONTENT
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def _hold(path: Path, held: Any, done: Any) -> None:
    with locked(path):
        held.set()
        done.wait(60)


def test_lock_of_an_output_file(tmp_path: Path) -> None:
    """A second run on one output is refused before it works for hours; the first one is not disturbed."""
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    first = context.Process(target=_hold, args=(tmp_path / "new" / "results.json", held, done))
    first.start()
    assert held.wait(60)
    match = rf"--output .*results\.json: another run is working on it \(process {first.pid} on .*Wait for that run, or stop it"
    with pytest.raises(UserError, match=match), locked(tmp_path / "new" / "results.json"):
        pass
    done.set()
    first.join()
    with locked(tmp_path / "new" / "results.json"):
        pass
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written there"), locked(tmp_path / "file" / "results.json"):
        pass


def test_cores_of_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert machine.available_cores() == 7


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (221_234, "221.2 kB"), (999_960, "1.0 MB")),
        *((999_949_999, "999.9 MB"), (999_960_000_000, "1.00 TB"), (2.5e12, "2.50 TB")),
    ],
)
def test_sizes_in_messages(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_a_model_folder_with_an_empty_file(models: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in models("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "added_vocabulary.txt").touch()
    prune(model=source, output=tmp_path / "out", method="emp-magnitude")
    assert (tmp_path / "out" / "added_vocabulary.txt").read_bytes() == b""
    assert verify(tmp_path / "out", source=str(source)).differences == []
