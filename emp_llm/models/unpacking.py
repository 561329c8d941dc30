"""Unpacking: every byte of a packed checkpoint put back where it was; a mask put on the weights of its base."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from emp_llm.models.bits import WORD, Bytes, Words, count_ones
from emp_llm.models.checkpoint import Checkpoint, StoredTensor
from emp_llm.models.codec import Coder, Zstd, apply_mask, check_end, decode_frames, fill, mask_of
from emp_llm.models.errors import UserError
from emp_llm.models.files import read_exactly, write_exactly
from emp_llm.models.packed import MANIFEST_NAME, Entry, PackedFolder, PackedShard, damaged
from emp_llm.models.packing import copy_file, read_words
from emp_llm.models.staging import Workers


class Unpacker:
    """Unpacks one folder.

    Args:
        packed: the folder; only read.
        base: the checkpoint that a mask was made for; only read. None where nothing but the packed folder is needed.

    Raises:
        UserError: a mask without a base, or a base for what needs none; the base has not the mask's tensors; zstd is not
            installed.
    """

    def __init__(self, packed: PackedFolder, base: Checkpoint | None = None) -> None:
        self.packed = packed
        self.base = base
        self.coder: Coder | None = Zstd(f"{packed.folder}") if packed.codec == "zstd" else None
        if base is None and packed.kind == "mask":
            raise UserError(f"{packed.folder}: a mask holds no weights. Name the model it is for: --base {self.name_of_base()}")
        if base is not None and packed.kind != "mask":
            raise UserError(f"{packed.folder}: it holds its weights; leave --base out.")
        for shard in packed.shards.values() if base is not None else ():
            for name, entry in shard.entries.items():
                self.in_base(name, entry)

    def in_base(self, name: str, entry: Entry) -> StoredTensor:
        """A tensor of the base; UserError where it has none of that name, dtype and shape."""
        assert self.base is not None
        stored = self.base.tensors.get(name)
        if stored is None or (stored.dtype, stored.shape) != (entry.stored.dtype, entry.stored.shape):
            raise UserError(
                f"--base {self.base.folder}: it has no {name} of {entry.stored.dtype} {list(entry.stored.shape)}, so it is not the "
                f"model that the mask is for ({self.name_of_base()})."
            )
        return stored

    def name_of_base(self) -> str:
        """What the mask's own report calls it."""
        name, revision = self.packed.base.get("model"), self.packed.base.get("revision")
        return f"{str(name)[:200]}{f' at {str(revision)[:64]}' if revision else ''}" if name else "the model that was pruned"

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the model folder's files into a folder that exists.

        Returns:
            "bytes" of all files, and how many "files".

        Raises:
            UserError: a packed file is damaged, or the base holds other weights than those the mask was made for.
        """
        packed = self.packed
        total = sum(e.stored.end - e.stored.start for shard in packed.shards.values() for e in shard.entries.values())
        with Workers() as workers, tqdm(total=total, desc="unpack", unit="B", unit_scale=True, disable=None) as bar:
            for name, shard in packed.shards.items():
                with ExitStack() as stack:
                    _Shard(self, shard, folder / name, workers, bar, stack).write()
        for name, (size, digest) in packed.files.items():
            source = packed.folder / name
            if not source.is_file():
                raise UserError(f"{source}: it is missing; {MANIFEST_NAME} beside it names it. Download it again.")
            if source.stat().st_size != size or copy_file(source, folder / name) != (size, digest):
                damaged(source, f"it is not the file that {MANIFEST_NAME} names")
        return {"bytes": packed.bytes, "files": len(packed.shards) + len(packed.files)}


class _Shard:
    """The unpacking of one shard."""

    def __init__(self, unpacker: Unpacker, shard: PackedShard, target: Path, workers: Workers, bar: Any, stack: ExitStack) -> None:
        self.unpacker, self.shard, self.workers, self.bar, self._stack = unpacker, shard, workers, bar, stack
        self._files: dict[Path, int] = {}
        self._here = self._reading(shard.path)
        self._there = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        stack.callback(os.close, self._there)

    def write(self) -> None:
        """Header first, then tensor after tensor."""
        write_exactly(self._there, memoryview(self.shard.header), 0)
        for name, entry in self.shard.entries.items():
            digest = sha256()
            position = entry.stored.start
            try:
                for words, part in self.workers.map(self._jobs(name, entry)):
                    write_exactly(self._there, memoryview(words).cast("B"), position)
                    position += words.nbytes
                    digest.update(part)
            except UserError:
                raise
            except ValueError as error:
                damaged(self.shard.path, f"{name}: {error}", error)
            if digest.hexdigest() != entry.digest:
                if self.unpacker.base is None:
                    damaged(self.shard.path, f"{name}: its digest is another one than announced")
                raise UserError(
                    f"--base {self.unpacker.base.folder}: its {name} holds other weights than those the mask was made for "
                    f"({self.unpacker.name_of_base()}). Name that model."
                )
            self.bar.update(entry.stored.end - entry.stored.start)
        os.fsync(self._there)

    def _jobs(self, name: str, entry: Entry) -> Iterator[Callable[[], tuple[Words, bytes]]]:
        if self.unpacker.base is not None:
            stored = self.unpacker.in_base(name, entry)
            file, base = self._reading(stored.shard), Entry(stored, "", "")
            masks = list_masks(self.shard, entry, self._here, self.unpacker.coder) if entry.form == "sparse" else None
            for number, first, count in entry.blocks(self.shard.block):
                yield partial(self._masked, file, base, first, count, partial(masks, number, count) if masks else None)
        elif self.unpacker.coder is not None:
            frames = _Frames(self.shard, entry, self._here)
            for number, _, count in entry.blocks(self.shard.block):
                yield partial(self._decoded, entry, frames, number, count, self.unpacker.coder)
        elif entry.form == "sparse":
            yield from self._sparse(entry)
        else:
            dense = Entry(self.shard.part(entry), "", "")
            for _, first, count in entry.blocks(self.shard.block):
                yield partial(self._copied, dense, first, count)

    def _sparse(self, entry: Entry) -> Iterator[Callable[[], tuple[Words, bytes]]]:
        """The masks are read here, for they tell where the values of each block begin."""
        masks = list_masks(self.shard, entry, self._here, None)
        values = Entry(self.shard.part(entry, ".values"), "", "")
        used = 0
        for number, _, count in entry.blocks(self.shard.block):
            mask = masks(number, count)
            kept = count_ones(mask)
            if used + kept > values.words:
                raise ValueError(f"its mask has more bits set than its {values.words:,} values")
            yield partial(self._filled, mask, values, used, kept, count)
            used += kept
        if used != values.words:
            raise ValueError(f"its mask has {used:,} bits set, and {values.words:,} values are there")

    def _filled(self, mask: Bytes, values: Entry, first: int, kept: int, count: int) -> tuple[Words, bytes]:
        return _hashed(fill(mask, read_words(self._here, values, first, kept, self.shard.path), count))

    def _copied(self, dense: Entry, first: int, count: int) -> tuple[Words, bytes]:
        return _hashed(read_words(self._here, dense, first, count, self.shard.path))

    def _decoded(self, entry: Entry, frames: "_Frames", number: int, count: int, coder: Coder) -> tuple[Words, bytes]:
        return _hashed(decode_frames(frames.read(number), count, entry.size, entry.form == "sparse", coder))

    def _masked(self, file: int, base: Entry, first: int, count: int, mask: Callable[[], Bytes] | None) -> tuple[Words, bytes]:
        words = read_words(file, base, first, count, base.stored.shard)
        return _hashed(words if mask is None else apply_mask(mask(), words))

    def _reading(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, self._files[path])
        return self._files[path]


class _Frames:
    """The frames of a tensor; ValueError where their sizes cannot be."""

    def __init__(self, shard: PackedShard, entry: Entry, file: int) -> None:
        sizes, self._frames = shard.part(entry, ".sizes"), shard.part(entry, ".frames")
        self._file, self._path = file, shard.path
        table = np.empty(sizes.shape, dtype="<u4")
        if table.size:
            read_exactly(file, memoryview(table).cast("B"), sizes.start, shard.path)
        self._sizes = table.astype(np.int64)
        ends = self._sizes.sum(axis=1).cumsum()
        self._starts = ends - self._sizes.sum(axis=1)
        total = int(ends[-1]) if ends.size else 0
        if total + -total % 8 != self._frames.end - self._frames.start:
            raise ValueError("its frames are not as long as announced")
        if table.size and int(table.max()) > 2 * shard.block + 1024:
            raise ValueError("a frame is longer than any of a block can be")

    def read(self, number: int, frames: int | None = None) -> list[memoryview]:
        """All frames of a block, or the first few."""
        sizes = self._sizes[number, :frames].tolist()
        raw = memoryview(bytearray(sum(sizes)))
        read_exactly(self._file, raw, self._frames.start + int(self._starts[number]), self._path)
        ends = np.cumsum(sizes).tolist()
        return [raw[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def list_masks(shard: PackedShard, entry: Entry, file: int, coder: Coder | None) -> Callable[[int, int], Bytes]:
    """A function that reads the mask of block `number` of `count` words of a sparse tensor.

    It raises ValueError where a mask is not sound.
    """
    if coder is not None:
        frames = _Frames(shard, entry, file)
        return lambda number, count: mask_of(frames.read(number, 1)[0], count, coder)
    part = shard.part(entry, ".mask")

    def read(number: int, count: int) -> Bytes:
        start = part.start + number * shard.block // 8
        # The last block's is filled up with zeros, and these are looked at too.
        mask = np.empty(min(shard.block // 8, part.end - start), dtype=WORD[1])
        read_exactly(file, memoryview(mask), start, shard.path)
        check_end(mask, count)
        return mask

    return read


def _hashed(words: Words) -> tuple[Words, bytes]:
    return words, sha256(words).digest()
