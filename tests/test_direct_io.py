"""Reads and writes at any position, past the page cache and through it: the same bytes on any system."""

import errno
import os
import posix
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emp_llm.common.errors import UserError
from emp_llm.storage import direct_io, stream
from emp_llm.storage.background_work import BackgroundQueue
from emp_llm.storage.buffers import PAGE, BufferPool, address_of
from emp_llm.checkpoint.files import bytes_of
from emp_llm.checkpoint.files import FileReader
from emp_llm.storage.direct_io import FileWriter
from emp_llm.checkpoint.files import FilePool
from emp_llm.storage.stream import StreamWriter

SIZE = 20 * PAGE + 123
CONTENT = np.random.default_rng(0).bytes(SIZE)
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)
few_examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True, scope="module")
def _flushes() -> Iterator[None]:
    """Here files are flushed, because only flushed pages leave the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", posix.fsync)
        yield


def write(path: Path, buffers: BufferPool, cuts: list[int], aligned: bool) -> None:
    """Write CONTENT in pieces, starting with the last one."""
    sink = FileWriter(path)
    for start, end in reversed(list(zip([0, *cuts], [*cuts, SIZE], strict=True))):
        block = buffers.take((1, end - start), np.uint8, start + (not aligned))
        bytes_of(block)[:] = CONTENT[start:end]
        sink.write(bytes_of(block), start)
        buffers.give(block)
    sink.sync()
    sink.close()


@few_examples
@given(cuts=st.lists(st.integers(0, SIZE), max_size=6).map(sorted), aligned=st.booleans(), past_cache=st.booleans())
def test_write_in_pieces(tmp_path: Path, cuts: list[int], aligned: bool, past_cache: bool) -> None:
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if not past_cache:
            patch.setattr(direct_io, "_DIRECT", 0)
        write(path, BufferPool(), cuts, aligned)
    assert path.read_bytes() == CONTENT


@few_examples
@given(
    cuts=st.lists(st.integers(0, SIZE), max_size=9).map(sorted),
    offset=st.integers(0, 2 * PAGE) | st.just(0),
    collected=st.sampled_from([PAGE, 3 * PAGE, 1 << 22]),
)
def test_stream_of_pieces(tmp_path: Path, cuts: list[int], offset: int, collected: int) -> None:
    path, buffers, writes = tmp_path / "file", BufferPool(), []
    path.write_bytes(b"." * offset)
    sink = FileWriter(path)
    with pytest.MonkeyPatch.context() as patch, BackgroundQueue() as behind:
        patch.setattr(stream, "_COLLECTED", collected)
        patch.setattr(sink, "write", lambda raw, at: writes.append((at, len(raw))) or FileWriter.write(sink, raw, at))
        writer = StreamWriter(sink, offset, buffers, behind)
        for start, end in zip([0, *cuts], [*cuts, SIZE], strict=True):
            piece = bytearray(CONTENT[start:end])
            writer.write(memoryview(piece))
            piece[:] = bytes(len(piece))  # the caller may reuse its memory
        writer.close()
    sink.close()
    assert path.read_bytes() == b"." * offset + CONTENT
    assert all((at + size) % PAGE == 0 for at, size in writes[:-1]), "only the last block may end within a page"
    assert len(writes) <= 2 + SIZE // max(PAGE, collected - PAGE)


@few_examples
@given(places=st.lists(ranges, min_size=1, max_size=4), cold=st.booleans(), dtype=st.sampled_from([np.uint8, np.uint16]))
def test_read_anywhere(tmp_path: Path, places: list[list[int]], cold: bool, dtype: type[Any]) -> None:
    path, buffers = tmp_path / "file", BufferPool()
    if not path.exists():
        path.write_bytes(CONTENT)
    with FileReader(path) as source:
        if cold:
            os.fsync(source.file)
            os.posix_fadvise(source.file, 0, 0, os.POSIX_FADV_DONTNEED)
        for start, end in places:
            block = buffers.take((1, (end - start) // np.dtype(dtype).itemsize), dtype, start)
            source.read(bytes_of(block), start)
            assert bytes(bytes_of(block)) == CONTENT[start : start + block.nbytes]
            buffers.give(block)


def test_whole_pages_are_written_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of a block is written through the direct descriptor, its ends through the other."""
    sink = FileWriter(tmp_path / "file")
    if sink._direct is None:
        pytest.skip("this file system has no direct I/O")
    calls: list[tuple[bool, int]] = []
    pwrite = os.pwrite

    def watched(file: int, raw: Any, offset: int) -> int:
        calls.append((file == sink._direct, len(raw)))
        return pwrite(file, raw, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    block = BufferPool().take((1, 3 * PAGE), np.uint8, 100)
    sink.write(bytes_of(block), 100)
    assert calls == [(False, PAGE - 100), (True, 2 * PAGE), (False, 100)]
    sink.close()


def test_uncached_pages_bypass_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with FileReader(path) as source:
        if source._direct is None or source._cache._map is None:
            pytest.skip("this system does not report cached pages")
        assert source._cache.share(0, 20 * PAGE) == 1
        os.fsync(source.file)
        os.posix_fadvise(source.file, 0, 0, os.POSIX_FADV_DONTNEED)
        assert source._cache.share(0, 20 * PAGE) < 0.5
        block = BufferPool().take((1, 20 * PAGE), np.uint8, 0)
        source.read(bytes_of(block), 0)
        assert source._cache.share(0, 20 * PAGE) < 0.5, "the read went through the cache"
        assert bytes(bytes_of(block)) == CONTENT[: 20 * PAGE]


def short_write(file: int, raw: Any, offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
    return pwrite(file, raw[: PAGE * 2] if len(raw) > PAGE * 2 else raw[: len(raw) // 2 + 1], offset)


def refused_direct_write(file: int, raw: Any, offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
    if len(raw) >= PAGE and len(raw) % PAGE == 0:
        raise OSError(errno.EINVAL, "no")
    return pwrite(file, raw[: PAGE - 1], offset)


@pytest.mark.parametrize("pwrite", [short_write, refused_direct_write])
def test_short_and_refused_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pwrite: Any) -> None:
    monkeypatch.setattr(os, "pwrite", pwrite)
    write(tmp_path / "file", BufferPool(), [5000, 60000], aligned=True)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_refused_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = tmp_path / "file", os.preadv
    path.write_bytes(CONTENT)
    with FileReader(path) as source:
        if source._direct is None:
            pytest.skip("this file system has no direct I/O")

        def refusing(file: int, raw: Any, offset: int) -> int:
            if file == source._direct:
                raise OSError(errno.EINVAL, "no")
            return preadv(file, raw, offset)

        monkeypatch.setattr(os, "preadv", refusing)
        monkeypatch.setattr(source._cache, "share", lambda *_: 0.0)
        block = BufferPool().take((1, SIZE), np.uint8, 0)
        source.read(bytes_of(block), 0)
        assert bytes(bytes_of(block)) == CONTENT


def test_errors_of_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    block = BufferPool().take((1, SIZE + 1), np.uint8, 0)
    with FileReader(path) as source:
        with pytest.raises(UserError, match=r"file: it ends before byte \d+"):
            source.read(bytes_of(block), 0)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(UserError, match=r"file: it cannot be read \(broken\)"):
            source.read(bytes_of(block), 0)
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="broken"):
        FileWriter(path).write(bytes_of(block), 0)
    with pytest.raises(UserError, match=r"absent: it cannot be read"):
        FileReader(tmp_path / "absent")


def test_returned_memory_is_reused() -> None:
    buffers = BufferPool()
    first = buffers.take((100, 100), np.uint16, 6)
    assert first.shape == (100, 100)
    assert (address_of(first) - 6) % PAGE == 0
    memory = first.base
    buffers.give(first)
    second = buffers.take((50, 100), np.uint32, 4)
    assert np.shares_memory(second, memory)
    assert (address_of(second) - 4) % PAGE == 0
    assert not np.shares_memory(buffers.take((1, 1), np.uint32), second), "no memory is used twice at a time"


def test_number_of_open_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few shards of a large model are open at a time; each is synced before it is closed."""
    synced: list[str] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    before, most = len(os.listdir("/proc/self/fd")), 0
    names = [f"shard {number}" for number in range(100)]
    with FilePool() as pool:
        for place in (0, 10):
            for name in names:
                pool.writer(tmp_path / name).write(memoryview(bytearray(name.ljust(10).encode())), place)
                content = memoryview(bytearray(10))
                pool.reader(tmp_path / names[0]).read(content, 0)
                pool.reader(tmp_path / name).read(content, place)
                assert bytes(content) == name.ljust(10).encode()
                most = max(most, len(os.listdir("/proc/self/fd")))
        pool.sync()
    assert {path: synced.count(path) for path in synced} == {str(tmp_path / name): 2 for name in names}
    assert most - before < 100
    assert len(os.listdir("/proc/self/fd")) == before
