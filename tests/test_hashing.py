"""Hashes taken while files are written or read: those of the whole files, whatever the order of the pieces."""

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from emp_llm.common.errors import UserError
from emp_llm.prune import prune
from emp_llm.storage import hashing
from emp_llm.storage.hashing import FileHasher, ReadHasher
from emp_llm.checkpoint.files import file_hash
from emp_llm.verify import verify

CONTENT = bytes(range(256)) * 40


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, len(CONTENT)])
def test_hash_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(hashing, "_CHUNK", 1000)
    path = tmp_path / "file"
    path.write_bytes(CONTENT[:size])
    assert file_hash(path) == blake3(CONTENT[:size]).hexdigest()
    assert file_hash(path, "sha256") == hashlib.sha256(CONTENT[:size]).hexdigest()


def test_pieces_from_memory_and_from_the_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(CONTENT)
    second.write_bytes(CONTENT[::-1])
    with FileHasher() as both:
        waiting = [both.add(first, 0, memoryview(CONTENT)[:10]), both.add(second, 0, memoryview(CONTENT[::-1])[:99])]
        assert both.add(first, 50, memoryview(CONTENT)[50:60]) is None, "a piece out of order is read from the file at the end"
        both.advance(first, 10, 50)
        both.advance(second, 99, len(CONTENT), last=True)
        assert all(future is not None for future in waiting)
        found = both.finish()
    assert found == {"first": blake3(CONTENT).hexdigest(), "second": blake3(CONTENT[::-1]).hexdigest()}


def test_files_that_are_read_in_order_and_out_of_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_CHUNK", 1000)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for path in (first, second, third):
        path.write_bytes(CONTENT)
    reads = ReadHasher([first, second])
    for start in range(0, len(CONTENT), 512):
        reads.add(first, start, memoryview(CONTENT)[start : start + 512])
    reads.add(second, 0, memoryview(CONTENT)[:100])
    reads.add(second, 200, memoryview(CONTENT)[200:300])
    reads.add(third, 0, memoryview(CONTENT))
    assert reads.finish() == dict.fromkeys(("first", "second"), blake3(CONTENT).hexdigest())


def test_another_hash_function(tmp_path: Path) -> None:
    class Crc:
        def __init__(self) -> None:
            self.value = 0

        def update(self, content: memoryview) -> None:
            self.value = zlib.crc32(content, self.value)

        def hexdigest(self) -> str:
            return f"{self.value:08x}"

    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with FileHasher({"known": "1"}, new=Crc) as some:
        some.advance(path, 0, len(CONTENT), last=True)
        assert some.finish() == {"known": "1", "file": f"{zlib.crc32(CONTENT):08x}"}


def test_a_file_that_disappears(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with FileHasher() as some:
        path.unlink()
        some.advance(path, 0, len(CONTENT))
        some._thread.submit(lambda: None).result()
        with pytest.raises(UserError, match="it cannot be read"):
            some.advance(path, len(CONTENT), len(CONTENT) + 1)


def test_a_model_folder_with_an_empty_file(models: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in models("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "added_vocabulary.txt").touch()
    prune(model=source, output=tmp_path / "out", method="emp-magnitude")
    assert (tmp_path / "out" / "added_vocabulary.txt").read_bytes() == b""
    assert verify(tmp_path / "out", source=str(source)).differences == []
