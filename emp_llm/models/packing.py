"""Packing a checkpoint: block after block out of each shard, counted, taken apart and written; see `packed` for the format."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from emp_llm.models.bits import WORD, Words, count_zeros
from emp_llm.models.checkpoint import OTHER_WEIGHTS, Checkpoint, StoredTensor, read_header, read_json
from emp_llm.models.codec import Zstd, encode
from emp_llm.models.errors import UserError
from emp_llm.models.files import read_exactly, write_exactly
from emp_llm.models.packed import (
    BLOCK,
    FORMAT,
    MANIFEST_NAME,
    METADATA_KEY,
    SUFFIX,
    Codec,
    Entry,
    Kind,
    bits_of,
    item_bytes,
    mask_bytes,
    packed_name,
    sparse_bytes,
)
from emp_llm.models.recipe import REPORT_NAME
from emp_llm.models.staging import Workers

_COPY_BYTES = 1 << 24
_NOT_OF_THE_MODEL = (".git", ".cache")  # what downloads leave: their own copies of all weights among it


class Packer:
    """Packs one checkpoint.

    Args:
        checkpoint: the source; only read.
        codec: "zstd" makes values smaller too.
        kind: "mask" leaves the values out.
        block: numbers to a block.

    Raises:
        UserError: the folder is packed already, zstd is not installed, or a mask would carry other weights along.
    """

    def __init__(self, checkpoint: Checkpoint, codec: Codec = "raw", kind: Kind = "packed", block: int = BLOCK) -> None:
        self.checkpoint = checkpoint
        self.codec, self.kind, self.block = codec, kind, block
        self._coder = Zstd("--zstd") if codec == "zstd" else None
        self.files = [path for path in _files(checkpoint.folder) if checkpoint.folder / path not in checkpoint.shards]
        for path in self.files:
            if path.name == MANIFEST_NAME or path.name.endswith(SUFFIX):
                raise UserError(f"{checkpoint.folder / path}: it is of a packed checkpoint; pack a folder that has none in it.")
            if kind == "mask" and path.suffix in OTHER_WEIGHTS and path.parts[0] != "emp_llm":
                raise UserError(f"{checkpoint.folder / path}: other weights, which a mask shall not carry; move the file away.")

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the packed files into a folder that exists.

        Returns:
            "dense_bytes" and "packed_bytes" of the shards, "file_bytes" of the others, "tensors", and how many are "sparse".

        Raises:
            UserError: a file changed while it was read.
        """
        sizes = {shard: shard.stat().st_size for shard in self.checkpoint.shards}
        counts = {"tensors": 0, "sparse": 0}
        packed = 0
        with Workers() as workers, tqdm(total=sum(sizes.values()), desc="pack", unit="B", unit_scale=True, disable=None) as bar:
            for shard in self.checkpoint.shards:
                target = folder / packed_name(shard.name)
                packing = _Shard(self, shard, target, workers, bar)
                packing.write()
                packed += target.stat().st_size
                counts["tensors"] += len(packing.told)
                counts["sparse"] += sum(entry["form"] == "sparse" for entry in packing.told.values())
        files = {path.as_posix(): copy_file(self.checkpoint.folder / path, folder / path) for path in self.files}
        manifest = {
            "format": FORMAT,
            "kind": self.kind,
            "codec": self.codec,
            "base": self._base(),
            "shards": {shard.name: {"bytes": size} for shard, size in sizes.items()},
            "files": {path: {"bytes": size, "sha256": digest} for path, (size, digest) in files.items()},
        }
        with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        file_bytes = sum(size for size, _ in files.values())
        return {"dense_bytes": sum(sizes.values()), "packed_bytes": packed, "file_bytes": file_bytes} | counts

    def _base(self) -> dict[str, Any] | None:
        path = self.checkpoint.folder / REPORT_NAME
        source = read_json(path).get("source") if path.is_file() else None
        return source if isinstance(source, dict) else None


class _Shard:
    """The packing of one shard."""

    def __init__(self, packer: Packer, shard: Path, target: Path, workers: Workers, bar: Any) -> None:
        self.packer, self.shard, self.target, self.workers, self.bar = packer, shard, target, workers, bar
        # Larger numbers first: so each tensor begins at a multiple of its own numbers' size.
        self.tensors = sorted(read_header(shard), key=lambda t: (-item_bytes(t.dtype), t.start, t.end))
        self.names = {tensor.name for tensor in self.tensors}
        self.told: dict[str, dict[str, str]] = {}  # of each tensor: form and digest
        self._parts: dict[str, tuple[str, list[int], int, int]] = {}  # of each tensor written: dtype, shape, start, end
        self._position = 0

    def write(self) -> None:
        """Write the packed shard, its header last: only then its sizes are known, but not its length exceeded."""
        base = len(self._header(self._largest()))
        self._here = os.open(self.shard, os.O_RDONLY)
        self._there = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._position = self._base = base
            for tensor in self.tensors:
                self._pack(tensor)
            header = self._header(self._parts)
            padded = header[8:].ljust(base - 8)
            write_exactly(self._there, memoryview(len(padded).to_bytes(8, "little") + padded), 0)
            os.fsync(self._there)
        finally:
            os.close(self._here)
            os.close(self._there)

    def _pack(self, tensor: StoredTensor) -> None:
        packer, entry = self.packer, Entry(tensor, "", "")
        digest, zeros = sha256(), 0
        for part, found in self.workers.map(self._jobs(entry, lambda words: (sha256(words).digest(), count_zeros(words)))):
            digest.update(part)
            zeros += found
        form = self._form(tensor, entry, zeros)
        self.told[tensor.name] = {"form": form, "digest": digest.hexdigest()}
        if form != "base":
            code = partial(encode, sparse=form == "sparse", values=packer.kind == "packed", coder=packer._coder)
            if packer.codec == "zstd":
                self._put_frames(entry, code)
            else:
                self._put_raw(entry, form, zeros, code)
        self.bar.update(tensor.end - tensor.start)

    def _form(self, tensor: StoredTensor, entry: Entry, zeros: int) -> str:
        name = tensor.name
        if self.packer.kind == "mask":
            return "sparse" if zeros else "base"
        pays = sparse_bytes(entry.words, entry.size, zeros) < entry.words * entry.size and bits_of(tensor.dtype) >= 8
        taken = {f"{name}{suffix}" for suffix in (".mask", ".values")} & self.names
        return "sparse" if pays and not taken else "dense"

    def _put_raw(self, entry: Entry, form: str, zeros: int, code: Callable[[Words], list[Any]]) -> None:
        name, words, dtype = entry.stored.name, entry.words, entry.stored.dtype
        if form == "dense":
            self._part(name, dtype, list(entry.stored.shape), self._stream(entry, code))
            return
        start = self._position
        self._part(f"{name}.mask", "U8", [mask_bytes(words)], mask_bytes(words))
        kept = 0
        for number, chunks in enumerate(self.workers.map(self._jobs(entry, code))):
            self._write(chunks[0], start + number * self.packer.block // 8)
            for values in chunks[1:]:
                self._write(values, self._position + kept * entry.size)
                kept += values.size
        padding = start + mask_bytes(words) - (end := start + -(-words // 8))
        self._write(np.zeros(padding, dtype=np.uint8), end)
        if self.packer.kind == "packed":
            if kept != words - zeros:
                raise UserError(f"{self.shard}: it changed while it was read. See what writes there, and run the command again.")
            self._part(f"{name}.values", dtype, [kept], kept * entry.size)

    def _put_frames(self, entry: Entry, code: Callable[[Words], list[Any]]) -> None:
        sizes: list[list[int]] = []
        total = 0
        for frames in self.workers.map(self._jobs(entry, code)):
            sizes.append([len(frame) for frame in frames])
            for frame in frames:
                self._write(frame, self._position + total)
                total += len(frame)
        self._write(bytes(-total % 8), self._position + total)
        total += -total % 8
        self._part(f"{entry.stored.name}.frames", "U8", [total], total)
        table = np.array(sizes, dtype="<u4").reshape(len(sizes), _frames(self.packer, entry, self.told))
        self._write(table, self._position)
        self._part(f"{entry.stored.name}.sizes", "U32", list(table.shape), table.nbytes)

    def _stream(self, entry: Entry, code: Callable[[Words], list[Any]]) -> int:
        """Write a tensor as it is; returns its size."""
        total = 0
        for chunks in self.workers.map(self._jobs(entry, code)):
            for chunk in chunks:
                self._write(chunk, self._position + total)
                total += chunk.nbytes
        return total

    def _jobs(self, entry: Entry, work: Callable[[Words], Any]) -> Iterator[Callable[[], Any]]:
        for _, first, count in entry.blocks(self.packer.block):
            yield partial(self._on_block, entry, first, count, work)

    def _on_block(self, entry: Entry, first: int, count: int, work: Callable[[Words], Any]) -> Any:
        return work(read_words(self._here, entry, first, count, self.shard))

    def _write(self, chunk: Any, offset: int) -> None:
        write_exactly(self._there, memoryview(chunk).cast("B") if len(chunk) else memoryview(b""), offset)

    def _part(self, name: str, dtype: str, shape: list[int], size: int) -> None:
        start = self._position - self._base
        self._parts[name] = (dtype, shape, start, start + size)
        self._position += size

    def _header(self, parts: dict[str, tuple[str, list[int], int, int]]) -> bytes:
        packer = self.packer
        told = {
            "format": FORMAT,
            "kind": packer.kind,
            "codec": packer.codec,
            "block": packer.block,
            "file": self.shard.name,
            "header": _header_text(self.shard),
            "tensors": self.told,
        }
        header: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(told, ensure_ascii=False)}}
        for name, (dtype, shape, start, end) in parts.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        raw = raw.ljust(-(-len(raw) // 8) * 8)
        return len(raw).to_bytes(8, "little") + raw

    def _largest(self) -> dict[str, tuple[str, list[int], int, int]]:
        """Parts whose header is at least as long as the one to be written."""
        parts = {}
        bound = 10 ** len(str(4 * self.shard.stat().st_size)) - 1
        for tensor in self.tensors:
            self.told[tensor.name] = {"form": "sparse", "digest": 64 * "0"}
            for suffix in (".frames", ".sizes"):
                parts[tensor.name + suffix] = (tensor.dtype, [*tensor.shape, bound, bound], bound, bound)
        return parts


def read_words(file: int, entry: Entry, first: int, count: int, path: Path) -> Words:
    """Some words of a tensor from an open shard."""
    words = np.empty(count, dtype=WORD[entry.size])
    if count:
        read_exactly(file, memoryview(words).cast("B"), entry.stored.start + first * entry.size, path)
    return words


def copy_file(source: Path, target: Path) -> tuple[int, str]:
    """Copy a file; returns its size and its SHA-256 in hexadecimal."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = sha256(), 0
    with source.open("rb") as here, target.open("xb") as there:
        while piece := here.read(_COPY_BYTES):
            digest.update(piece)
            there.write(piece)
            size += len(piece)
        there.flush()
        os.fsync(there.fileno())
    return size, digest.hexdigest()


def _frames(packer: Packer, entry: Entry, told: dict[str, dict[str, str]]) -> int:
    return (told[entry.stored.name]["form"] == "sparse") + (entry.size if packer.kind == "packed" else 0)


def _files(folder: Path) -> list[Path]:
    """Every file of a model folder, relative to it."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and relative.parts[0] not in _NOT_OF_THE_MODEL:
            found.append(relative)
    return found


def _header_text(shard: Path) -> str:
    with shard.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode("utf-8")
