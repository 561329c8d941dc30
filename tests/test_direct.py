"""Files by position, past the page cache and through it: the same bytes, whatever the places and whatever the system does."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emp_llm.models import direct, files
from emp_llm.models.direct import PAGE, Buffers, Sink, Source, bytes_of
from emp_llm.models.errors import UserError
from emp_llm.models.files import Behind, OpenFiles, Stream

SIZE = 20 * PAGE + 123
CONTENT = bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy())
DTYPES = [torch.uint8, torch.bfloat16]
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, buffers: Buffers, cuts: list[int], aligned: bool) -> None:
    """Write CONTENT in pieces, the last one first."""
    sink = Sink(path)
    for start, end in reversed(list(zip([0, *cuts], [*cuts, SIZE], strict=True))):
        block = buffers.take((1, end - start), torch.uint8, start + (not aligned))
        bytes_of(block)[:] = CONTENT[start:end]
        sink.write(bytes_of(block), start)
        buffers.give(block)
    sink.sync()
    sink.close()


@some
@given(cuts=st.lists(st.integers(0, SIZE), max_size=6).map(sorted), aligned=st.booleans(), direct_io=st.booleans())
def test_written_in_pieces(tmp_path: Path, cuts: list[int], aligned: bool, direct_io: bool) -> None:
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if not direct_io:
            patch.setattr(direct, "_DIRECT", 0)
        write(path, Buffers(), cuts, aligned)
    assert path.read_bytes() == CONTENT


@some
@given(
    cuts=st.lists(st.integers(0, SIZE), max_size=9).map(sorted),
    offset=st.integers(0, 2 * PAGE) | st.just(0),
    collected=st.sampled_from([PAGE, 3 * PAGE, 1 << 22]),
)
def test_a_stream_of_pieces(tmp_path: Path, cuts: list[int], offset: int, collected: int) -> None:
    path, buffers, writes = tmp_path / "file", Buffers(), []
    path.write_bytes(b"." * offset)
    sink = Sink(path)
    with pytest.MonkeyPatch.context() as patch, Behind() as behind:
        patch.setattr(files, "_COLLECTED", collected)
        patch.setattr(sink, "write", lambda raw, at: writes.append((at, len(raw))) or Sink.write(sink, raw, at))
        stream = Stream(sink, offset, buffers, behind)
        for start, end in zip([0, *cuts], [*cuts, SIZE], strict=True):
            piece = bytearray(CONTENT[start:end])
            stream.write(memoryview(piece))
            piece[:] = bytes(len(piece))  # it may be changed
        stream.close()
    sink.close()
    assert path.read_bytes() == b"." * offset + CONTENT
    assert all((at + size) % PAGE == 0 for at, size in writes[:-1]), "only the last may end within a page"
    assert len(writes) <= 2 + SIZE // max(PAGE, collected - PAGE)


@some
@given(
    places=st.lists(ranges, min_size=1, max_size=4), cold=st.booleans(), dtype=st.sampled_from([torch.uint8, torch.bfloat16])
)
def test_read_anywhere(tmp_path: Path, places: list[list[int]], cold: bool, dtype: torch.dtype) -> None:
    path, buffers = tmp_path / "file", Buffers()
    if not path.exists():
        path.write_bytes(CONTENT)
    with Source(path) as source:
        if cold:
            os.fsync(source.file)
            os.posix_fadvise(source.file, 0, 0, os.POSIX_FADV_DONTNEED)
        for start, end in places:
            block = buffers.take((1, (end - start) // dtype.itemsize), dtype, start)
            source.read(bytes_of(block), start)
            assert bytes(bytes_of(block)) == CONTENT[start : start + block.numel() * dtype.itemsize]
            buffers.give(block)


def test_whole_pages_go_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system can: the middle of a block by the direct descriptor, its ends by the other."""
    sink = Sink(tmp_path / "file")
    if sink._direct is None:
        pytest.skip("this file system has no direct access")
    calls: list[tuple[bool, int]] = []
    pwrite = os.pwrite

    def watched(file: int, raw: Any, offset: int) -> int:
        calls.append((file == sink._direct, len(raw)))
        return pwrite(file, raw, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    block = Buffers().take((1, 3 * PAGE), torch.uint8, 100)
    sink.write(bytes_of(block), 100)
    assert calls == [(False, PAGE - 100), (True, 2 * PAGE), (False, 100)]
    sink.close()


def test_the_cache_is_asked_first(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with Source(path) as source:
        if source._direct is None or source._cached._map is None:
            pytest.skip("this system does not tell")
        assert source._cached.share(0, 20 * PAGE) == 1
        os.fsync(source.file)
        os.posix_fadvise(source.file, 0, 0, os.POSIX_FADV_DONTNEED)
        assert source._cached.share(0, 20 * PAGE) < 0.5
        block = Buffers().take((1, 20 * PAGE), torch.uint8, 0)
        source.read(bytes_of(block), 0)
        assert source._cached.share(0, 20 * PAGE) < 0.5, "it was read past the cache"
        assert bytes(bytes_of(block)) == CONTENT[: 20 * PAGE]


def short(file: int, raw: Any, offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
    return pwrite(file, raw[: PAGE * 2] if len(raw) > PAGE * 2 else raw[: len(raw) // 2 + 1], offset)


def no_direct(file: int, raw: Any, offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
    if len(raw) >= PAGE and len(raw) % PAGE == 0:
        raise OSError(errno.EINVAL, "no")
    return pwrite(file, raw[: PAGE - 1], offset)


@pytest.mark.parametrize("system", [short, no_direct])
def test_what_the_system_does_by_halves_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: Any) -> None:
    monkeypatch.setattr(os, "pwrite", system)
    write(tmp_path / "file", Buffers(), [5000, 60000], aligned=True)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_system_that_opens_for_direct_reads_and_does_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = tmp_path / "file", os.preadv
    path.write_bytes(CONTENT)
    with Source(path) as source:
        if source._direct is None:
            pytest.skip("this file system has no direct access")

        def refusing(file: int, raw: Any, offset: int) -> int:
            if file == source._direct:
                raise OSError(errno.EINVAL, "no")
            return preadv(file, raw, offset)

        monkeypatch.setattr(os, "preadv", refusing)
        monkeypatch.setattr(source._cached, "share", lambda *_: 0.0)
        block = Buffers().take((1, SIZE), torch.uint8, 0)
        source.read(bytes_of(block), 0)
        assert bytes(bytes_of(block)) == CONTENT


def test_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    block = Buffers().take((1, SIZE + 1), torch.uint8, 0)
    with Source(path) as source:
        with pytest.raises(UserError, match=r"file: it ends before byte \d+"):
            source.read(bytes_of(block), 0)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(UserError, match=r"file: it cannot be read \(broken\)"):
            source.read(bytes_of(block), 0)
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="broken"):
        Sink(path).write(bytes_of(block), 0)
    with pytest.raises(UserError, match=r"absent: it cannot be read"):
        Source(tmp_path / "absent")


def test_memory_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.take((100, 100), torch.bfloat16, 6)
    assert first.shape == (100, 100)
    assert (first.data_ptr() - 6) % PAGE == 0
    memory = first.untyped_storage().data_ptr()
    buffers.give(first)
    second = buffers.take((50, 100), torch.float32, 4)
    assert second.untyped_storage().data_ptr() == memory
    assert (second.data_ptr() - 4) % PAGE == 0
    assert buffers.take((1, 1), torch.float32).untyped_storage().data_ptr() != memory, "what is taken is nobody else's"


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a large model: few are open at a time, and what is written to those that were closed is on the disk."""
    synced: list[str] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    before, most = len(os.listdir("/proc/self/fd")), 0
    names = [f"shard {number}" for number in range(100)]
    with OpenFiles() as opened:
        for place in (0, 10):
            for name in names:
                opened.writing(tmp_path / name).write(memoryview(bytearray(name.ljust(10).encode())), place)
                found = memoryview(bytearray(10))
                opened.reading(tmp_path / names[0]).read(found, 0)
                opened.reading(tmp_path / name).read(found, place)
                assert bytes(found) == name.ljust(10).encode()
                most = max(most, len(os.listdir("/proc/self/fd")))
        opened.sync()
    assert {path: synced.count(path) for path in synced} == {str(tmp_path / name): 2 for name in names}
    assert most - before < 100
    assert len(os.listdir("/proc/self/fd")) == before
