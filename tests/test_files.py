"""Files: reads and writes at any position, hashes taken on the way, atomic writes, and locks."""

import errno
import fcntl
import multiprocessing
import os
import resource
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from runs import check_verified
from safetensors import SafetensorError

from emp_llm import prune
from emp_llm.checkpoint import files
from emp_llm.checkpoint.files import (
    FilePool,
    FileReader,
    FileWriter,
    RunningHash,
    explain_disk_error,
    file_hash,
    lock,
    write_bytes,
)
from emp_llm.common import machine
from emp_llm.common.errors import ReadError, UserError, disk_sentence, format_bytes

CONTENT = bytes(range(256)) * 40
PAGE = 4096
every_system = pytest.mark.parametrize("system", ["direct", "no direct", "short", "refused"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with CONTENT."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def make_system(patch: pytest.MonkeyPatch, system: str) -> None:
    """A system that has no direct calls, refuses them after all, or does a part of what it is
    asked.
    """
    preadv = os.preadv
    pwrite = os.pwrite

    def check(file: int) -> None:
        if system == "refused" and fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "no")

    def read(file: int, raws: list[Any], offset: int) -> int:
        check(file)
        return preadv(file, [raws[0][: 2 * PAGE]] if system == "short" else raws, offset)

    def write(file: int, raw: Any, offset: int) -> int:
        check(file)
        some = 2 * PAGE if len(raw) > 2 * PAGE else len(raw) // 2 + 1
        return pwrite(file, raw[:some] if system == "short" else raw, offset)

    patch.setattr(files, "PIECE", 4 * PAGE)
    patch.setattr(os, "preadv", read)
    patch.setattr(os, "pwrite", write)
    if system == "no direct":
        patch.delattr(os, "O_DIRECT", raising=False)


@every_system
@pytest.mark.parametrize(
    "cuts", [[], [PAGE, 2 * PAGE], [1, 5000, 5000, 60_000], [3 * PAGE - 1, 12 * PAGE]], ids=str
)
def test_write_in_order_and_out_of_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, cuts: list[int]
) -> None:
    content = CONTENT * 8 + b"end"
    pieces = list(pairwise([0, *cuts, len(content)]))
    (tmp_path / "source").write_bytes(content)
    make_system(monkeypatch, system)
    for name, order in (
        ("in order", pieces),
        ("backward", pieces[::-1]),
        ("again", [*pieces, *pieces]),
    ):
        with FileWriter(tmp_path / name) as output, FileReader(tmp_path / "source") as source:
            for start, end in order:
                output.write(source.take(start, end - start).data, start)
        assert (tmp_path / name).read_bytes() == content


@every_system
@pytest.mark.parametrize(
    "place", [(0, 16 * PAGE), (3, 9 * PAGE), (PAGE, 5 * PAGE + 7), (7, None)], ids=str
)
def test_reads_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, place: tuple[int, int]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT * 8 + b"end")
    make_system(monkeypatch, system)
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
        with pytest.raises(
            UserError,
            match=r"file: it ends before byte \d+; it changed while it was read",
        ):
            file.read(raw, 0)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(UserError, match=r"file: it cannot be read \(broken\)"):
            file.read(raw, 0)
    with pytest.raises(UserError, match=r"absent: it cannot be read"):
        FileReader(path.with_name("absent"))


def test_number_of_open_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have more shards than the system lets a process open."""
    monkeypatch.setattr(files, "_OPEN", 8)
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    paths = [tmp_path / f"shard {number:03}" for number in range(100)]
    with FilePool() as pool:
        for path in paths:
            path.write_text(path.name)
            pool.reader(paths[0])
            assert pool.reader(path).take(0, 9).tobytes() == path.name.encode()
            most = max(most, len(os.listdir("/proc/self/fd")))
    assert most - before <= 9
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, len(CONTENT)])
def test_hash_of_a_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:size])
    assert file_hash(path) == blake3(CONTENT[:size]).hexdigest()


@pytest.mark.parametrize("cuts", [[0, 512, 5000, 10240], [0, 100], [200, 300], []])
def test_hash_of_bytes_in_order_and_out_of_order(path: Path, cuts: list[int]) -> None:
    """Bytes that do not follow those before are read at the end."""
    digest = RunningHash(path)
    with FilePool({path: digest}) as pool:
        for start, end in pairwise(cuts):
            pool.reader(path).take(start, end - start)
            pool.reader(path).take(start, end - start)
    assert digest.finish() == blake3(CONTENT).hexdigest()


def test_many_writers_of_one_file(path: Path) -> None:
    """Each write is whole, no writer disturbs another, and nothing is left beside the file."""
    problems = []

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
    assert (len(set(path.read_bytes())), len(path.read_bytes())) == (1, 5000)
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
    with lock(path):
        held.set()
        done.wait(60)


def test_lock_of_an_output_file(tmp_path: Path) -> None:
    """A second run on one output is refused before it works for hours; the first one is not
    disturbed.
    """
    context = multiprocessing.get_context("fork")
    held = context.Event()
    done = context.Event()
    output = tmp_path / "new" / "results.json"
    first = context.Process(target=_hold, args=(output, held, done))
    first.start()
    assert held.wait(60)
    match = (
        rf"--output .*results\.json: another run is working on it \(process {first.pid} on "
        r".*Wait for that run, or stop it"
    )
    with pytest.raises(UserError, match=match), lock(output):
        pass
    done.set()
    first.join()
    with lock(output):
        pass
    assert not list(output.parent.iterdir())
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            UserError,
            match=r"cannot be written there",
        ),
        lock(tmp_path / "file" / "results.json"),
    ):
        pass


def test_cores_of_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert machine.available_cores() == 7


def test_sizes_in_messages() -> None:
    counts = (0, 999, 1000, 221_234, 999_960, 999_949_999, 999_960_000_000, 2.5e12)
    said = ["0 B", "999 B", "1.0 kB", "221.2 kB", "1.0 MB", "999.9 MB", "1.00 TB", "2.50 TB"]
    assert list(map(format_bytes, counts)) == said


def test_a_model_folder_with_an_empty_file(tiny_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    out = tmp_path / "out"
    (source / "added_vocabulary.txt").touch()
    prune(model=source, output=out, method="emp-magnitude")
    assert (out / "added_vocabulary.txt").read_bytes() == b""
    check_verified(out, source)


def test_pages_of_a_file_are_written_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of `take` go past the page cache, all but those of the first and the last page;
    other bytes do not.
    """
    (tmp_path / "source").write_bytes(CONTENT * 8)
    direct = []
    pwrite = os.pwrite

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


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
        RuntimeError("[enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0"),
        OSError("1024 requested and 512 written"),  # of numpy
    ],
)
def test_a_full_disk_in_the_words_of_other_libraries(tmp_path: Path, error: Exception) -> None:
    told = explain_disk_error(error, tmp_path / "out", [])
    assert told is not None
    assert "out: the disk is full. Free some space" in str(told)
    assert explain_disk_error(RuntimeError("a defect"), tmp_path / "out", []) is None


def test_a_limit_of_the_size_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named; also where a library only says that less was written."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (102_400, 102_400))
    for error in (OSError(errno.EFBIG, "File too large"), OSError("8 requested and 0 written")):
        told = str(explain_disk_error(error, tmp_path / "out", []))
        assert "out: ulimit -f allows no file of more than 102.4 kB. Raise the limit" in told
        assert "102.4 kB. Raise the limit; then run" in str(disk_sentence(error))
    monkeypatch.undo()
    error = OSError(errno.EFBIG, "File too large", "a.bin")  # of the file system
    assert str(disk_sentence(error)).startswith("a.bin: file too large. ")


def test_json_on_a_failing_disk_may_be_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "_open_now", fail)
    with pytest.raises(ReadError, match=r"cannot be read .* Run the command again"):
        files.read_json(path)


def test_a_failing_disk_in_the_words_of_torch(tmp_path: Path) -> None:
    """Loading an offloaded weight opens its shard."""
    error = RuntimeError(
        "unable to open file </m/1.safetensors> in read-only mode: Input/output error (5)"
    )
    told = explain_disk_error(error, tmp_path / "out", [])
    assert "out: a file cannot be read or written (unable to open file </m/1.safe" in str(told)
    assert "/m/1.safetensors" in str(disk_sentence(error))
    assert disk_sentence(RuntimeError("a defect (5)")) is None
