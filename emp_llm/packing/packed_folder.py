"""Reads packed folders. They may come from anybody, so everything in them is checked. `packed_format` describes the format."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np
from blake3 import blake3

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.folder_checks import check_links
from emp_llm.checkpoint.identity import identity_from_files
from emp_llm.checkpoint.safetensors_header import StoredTensor, parse_header, read_header
from emp_llm.checkpoint.words import mask_bytes, read_words, words_in
from emp_llm.common.errors import ReadError, UserError, reason
from emp_llm.common.file_names import PACK_NAME
from emp_llm.common.wording import quotable
from emp_llm.packing.bits import Bytes
from emp_llm.packing.packed_format import FORMAT, OLD_FORMAT, Form, PackLayout, packed_name
from emp_llm.packing.zstd_codec import Zstd
from emp_llm.storage.direct_io import FileReader
from emp_llm.storage.json_files import INDEX_LIMIT, read_json


class PackedShard:
    """One packed shard; read-only.

    Args:
        path: the file.
        layout: that of the folder.
        entry: the shard's entry in emp_pack.json.

    Attributes:
        path, layout: as given.
        header: the original's header with the eight bytes of its length.
        size, digest: of the original; `hasher` computes such digests, of the kind `kind`.
        packed_digest: BLAKE3 of the file itself; None if an earlier version wrote it.
        tensors: those of the original, in the order of their bytes; their offsets are those in the original.
        forms: the form of each, by name.

    Raises:
        UserError: the file is missing, is no packed shard, or contradicts its entry.
    """

    def __init__(self, path: Path, layout: PackLayout, entry: dict[str, Any]) -> None:
        self.path, self.layout = path, layout
        if not path.is_file():
            raise UserError(f"{path}: it is missing, but {PACK_NAME} names it. Download it again.")
        self._parts = {tensor.name: tensor for tensor in read_header(path)}
        try:
            text = entry["header"].encode("utf-8")
            self.header = len(text).to_bytes(8, "little") + text
            self.size = _natural(entry["bytes"])
            self.kind = "blake3" if "blake3" in entry else "xxh3_128"
            self.digest = str(entry[self.kind])
            packed = entry.get("packed")
            self.packed_digest = None if packed is None else str(packed["blake3"])
            self.tensors = parse_header(text, path, self.size)
            self.forms = {tensor.name: self._form(tensor) for tensor in self.tensors}
            used: set[str] = set()
            for tensor in self.tensors:
                parts = layout.parts(tensor, self.forms[tensor.name])
                for name, (dtype, shape) in parts.items():
                    self._check(name, dtype, shape)
                used |= parts.keys()
            if used != self._parts.keys():
                raise ValueError(f"{quotable(min(self._parts.keys() - used))} belongs to no tensor of the original")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            damaged(path, error)

    def hasher(self) -> Any:
        """A new hash object of the kind of `digest`; UserError if its package is missing."""
        if self.kind == "blake3":
            return blake3()
        try:
            from xxhash import xxh3_128
        except ImportError as error:
            raise UserError(
                f"{self.path}: an older emp-llm packed it, and its hashes need xxhash. Install it: pip install xxhash"
            ) from error
        return xxh3_128()

    def part(self, tensor: StoredTensor, suffix: str = "") -> StoredTensor:
        """The entry of the packed file for a tensor of the original; ValueError if there is none."""
        name = tensor.name + suffix
        if name not in self._parts:
            raise ValueError(f"it holds no {quotable(name)}")
        return self._parts[name]

    def masks(self, file: FileReader, tensor: StoredTensor, coder: Zstd | None) -> Callable[[int], Bytes]:
        """A function that reads the mask of a block of a sparse tensor from the open file, by the block's number."""
        words, block = words_in(tensor), self.layout.block
        if coder is not None:
            frames = Frames(self, file, tensor)
            return lambda number: coder.mask(frames.read(number, 1)[0], min(block, words - number * block))
        part = self.part(tensor, ".mask")
        return lambda number: read_words(file, part, number * block // 8, mask_bytes(min(block, words - number * block)))

    def _form(self, tensor: StoredTensor) -> Form:
        """The form of a tensor, from the entries that it has."""
        if self.layout.codec == "zstd":
            sizes = self._parts.get(f"{tensor.name}.sizes")
            if sizes is None:
                return "base" if self.layout.kind == "mask" else "dense"
            return "sparse" if sizes.shape[1:] == (self.layout.frames(tensor, "sparse"),) else "dense"
        if self.layout.kind == "mask":
            return "sparse" if f"{tensor.name}.mask" in self._parts else "base"
        return "dense" if tensor.name in self._parts else "sparse"

    def _check(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
        found = self._parts.get(name)
        if found is None:
            raise ValueError(f"it holds no {quotable(name)}")
        alike = len(found.shape) == len(shape) and all(a in (None, b) for a, b in zip(shape, found.shape, strict=True))
        if found.dtype != dtype or not alike:
            raise ValueError(f"{quotable(name)} does not have the dtype and the shape that its original requires")


class Frames:
    """The frames of a tensor in an open packed shard; ValueError for impossible sizes."""

    def __init__(self, shard: PackedShard, file: FileReader, tensor: StoredTensor) -> None:
        self._file = file
        sizes, self._frames = shard.part(tensor, ".sizes"), shard.part(tensor, ".frames")
        self._sizes = read_words(file, sizes, 0, sizes.numel).reshape(sizes.shape).astype(np.int64)
        ends = self._sizes.sum(axis=1).cumsum()
        self._starts = ends - self._sizes.sum(axis=1)
        total = int(ends[-1]) if ends.size else 0
        if total + -total % 8 != self._frames.numel:
            raise ValueError(f"the frames of {quotable(tensor.name)} do not have the announced length")
        if self._sizes.size and int(self._sizes.max()) > 2 * shard.layout.block + 1024:
            raise ValueError("a frame is too long for a block")

    def read(self, number: int, frames: int | None = None) -> list[memoryview]:
        """The frames of a block, by its number: all, or the first few."""
        sizes = self._sizes[number, :frames].tolist()
        raw = memoryview(bytearray(sum(sizes)))
        self._file.read(raw, self._frames.start + int(self._starts[number]))
        ends = np.cumsum(sizes).tolist()
        return [raw[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class PackedFolder:
    """A folder that `emp-llm pack` wrote; read-only.

    Attributes:
        layout: how it is packed.
        base: the model that was pruned, as the report of the pruning run names it.
        shards: original name -> packed shard.
        files: path -> (bytes, kind of hash, hash) of the other files.

    Raises:
        UserError: it is no packed folder, it contradicts itself, or a path in it leads out of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / PACK_NAME
        if not path.is_file():
            raise UserError(f"{folder}: no {PACK_NAME} in it. Give a folder that emp-llm pack wrote.")
        check_links(folder)
        index = read_json(path, unique=True, limit=INDEX_LIMIT)
        _check_format(path, index.get("format"))
        try:
            self.layout = PackLayout(index["kind"], index["codec"], index["block"])
            self.base: dict[str, Any] = dict(index["base"] or {})
            self.files = {_plain(name): _file_entry(entry) for name, entry in index["files"].items()}
            shards = {_plain(name): dict(entry) for name, entry in index["shards"].items()}
            if not shards or shards.keys() & self.files.keys():
                raise ValueError("it names no shards, or a shard among the other files")
            if any("/" in name or not name.endswith(".safetensors") for name in shards):
                raise ValueError("its shards are not plain names of safetensors files")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            damaged(path, error)
        self.shards = {name: PackedShard(folder / packed_name(name), self.layout, entry) for name, entry in shards.items()}

    @property
    def bytes(self) -> int:
        """The size of all files when unpacked."""
        return sum(shard.size for shard in self.shards.values()) + sum(size for size, _, _ in self.files.values())

    @property
    def identity(self) -> str | None:
        """The identity of the original checkpoint; None if an earlier version packed it, with other hashes."""
        if any(shard.kind != "blake3" for shard in self.shards.values()):
            return None
        return identity_from_files({name: (shard.size, shard.digest) for name, shard in self.shards.items()})

    @cached_property
    def coder(self) -> Zstd | None:
        """The decoder of its frames; None if it has none. UserError if zstandard is missing."""
        return Zstd(str(self.folder)) if self.layout.codec == "zstd" else None

    @property
    def base_name(self) -> str:
        """The name of the model that was pruned, for messages."""
        name, revision = self.base.get("model"), self.base.get("revision")
        return (
            f"{quotable(str(name))}{f' at {quotable(str(revision))}' if revision else ''}"
            if name
            else "the model that was pruned"
        )


class PackedCheckpoint(Checkpoint):
    """The names and shapes of a packed checkpoint, for finding its layers. Its weights cannot be read by their offsets."""

    def __init__(self, packed: PackedFolder) -> None:
        self.folder = packed.folder
        self.shards = [shard.path for shard in packed.shards.values()]
        self.tensors = {tensor.name: tensor for shard in packed.shards.values() for tensor in shard.tensors}


def damaged(path: Path, cause: Exception | str) -> NoReturn:
    """Raise the UserError for an unsound packed file."""
    if isinstance(cause, ReadError):
        raise cause
    why = cause if isinstance(cause, str) else f"it has no {cause}" if isinstance(cause, KeyError) else reason(cause)
    raise UserError(f"{path}: not a sound packed file ({why}). Download or pack it again.")


def _check_format(path: Path, name: Any) -> None:
    """Raise UserError for a format that this version does not read."""
    version = str(name).removeprefix("emp-llm pack ")
    if version.isdecimal() and name not in (FORMAT, OLD_FORMAT) and int(version) > int(FORMAT.rpartition(" ")[2]):
        raise UserError(
            f"{path}: a newer emp-llm wrote it ({quotable(str(name))}; this version reads up to {FORMAT!r}). Update emp-llm: "
            "pip install --upgrade emp-llm"
        )
    if name not in (FORMAT, OLD_FORMAT):
        damaged(path, f"its format is {quotable(str(name))}")


def _file_entry(entry: dict[str, Any]) -> tuple[int, str, str]:
    kind = "blake3" if "blake3" in entry else "sha256"
    return _natural(entry["bytes"]), kind, str(entry[kind])


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{quotable(str(value))} is not a size")
    return value


def _plain(name: str) -> str:
    """A path that stays within its folder on every system; ValueError for any other."""
    parts = name.split("/")
    inside = name == str(PurePosixPath(name)) and set(parts).isdisjoint({"", ".", ".."}) and name.isprintable()
    if not inside or any(letter in name for letter in "\\:"):
        raise ValueError(f"the path {quotable(name)} leads out of the folder")
    return name
