"""Packed checkpoints: the format, and how it is read with suspicion.

A packed folder holds, of a model folder, every shard `NAME.safetensors` as `NAME.packed.safetensors`, every other file as it
is, and `emp_pack.json`, which lists them. Packed shards are safetensors files that anybody can open, and from which every byte
of the shard can be restored.

**emp_pack.json**: `format` is "emp-llm pack 2"; `kind` "weights" or "mask"; `codec` "raw" or "zstd"; `block`, a number of
words, a multiple of 64; `shards` maps the name of each original shard to its size in `bytes`, its `xxh3_128` (which finds
damage, as a SHA-256 does, at ten times the speed) and the text of its `header`; `files` maps the path of each other file to its
`bytes` and `sha256`; `base` is what the report of the pruning run says of the model that was pruned, or null.

**Tensors** are rows of words: numbers of 1, 2, 4 or 8 bytes in the order in which they were stored, whatever the shape; of
numbers of less than 8 bits, bytes. Zero is a word of which no bit is set; -0.0 is a value. In the files they are

- dense, raw: `NAME`, as it was. (A mask would cost more than the zeros.)
- sparse, raw: `NAME.mask`, U8: a bit for every word, lowest bit of the first byte first, one where it is not zero; filled up
  with zeros to a multiple of 8 bytes. `NAME.values`, of the original's dtype and of one dimension: the other words, in order.
- dense or sparse, zstd: `NAME.frames`, U8: of every `block` words some zstd frames, one after another; in the end filled up
  with zeros to a multiple of 8 bytes. `NAME.sizes`, U32, shape (blocks, frames to a block): their sizes. If sparse, the first
  frame of a block is its mask. The others are byte planes of its values, the highest plane first, each value turned left by one
  bit, so that the sign stands with the lowest bits of the mantissa. Of BF16 and F32 the highest plane, which is the exponent,
  is written as 15 frequent bytes; then half a byte for each byte of the plane, the low half first, which is its place in that
  list, or 15 for a byte that is not in it or to fill up the last pair; then the bytes that are not in it.
- in a folder of kind "mask": the mask alone, `NAME.mask` or its frames; nothing for a tensor without zeros.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

import numpy as np

from emp_llm.models.bits import WORD, Bytes, Words, mask_bytes
from emp_llm.models.checkpoint import PACK_NAME, Checkpoint
from emp_llm.models.codec import Zstd
from emp_llm.models.direct import Source
from emp_llm.models.errors import ReadError, UserError, reason
from emp_llm.models.headers import BITS, INDEX_LIMIT, StoredTensor, check_links, parse_header, read_header, read_json, shown

FORMAT = "emp-llm pack 2"
SUFFIX = ".packed.safetensors"
BLOCK = 1 << 20
_LARGEST_BLOCK = 1 << 23

Kind = Literal["weights", "mask"]
Codec = Literal["raw", "zstd"]
Form = Literal["sparse", "dense", "base"]


def word_bytes(tensor: StoredTensor) -> int:
    """Bytes of the words in which a tensor is taken."""
    return max(1, BITS[tensor.dtype] // 8)


def words_in(tensor: StoredTensor) -> int:
    """How many words a tensor is."""
    return (tensor.end - tensor.start) // word_bytes(tensor)


def packed_bytes(words: int, size: int, zeros: int) -> int:
    """What so many words of `size` bytes take when packed raw: a mask and values, or themselves where that is no more."""
    return min(words * size, mask_bytes(words) + (words - zeros) * size)


def read_words(file: Source, tensor: StoredTensor, first: int, count: int) -> Words:
    """Some words of a tensor from an open shard."""
    size = word_bytes(tensor)
    words = np.empty(count, dtype=WORD[size])
    if count:
        file.read(words.view(np.uint8).data, tensor.start + first * size)
    return words


@dataclass(frozen=True)
class Manner:
    """How a folder is packed; the words as in emp_pack.json."""

    kind: Kind = "weights"
    codec: Codec = "raw"
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.kind not in ("weights", "mask") or self.codec not in ("raw", "zstd"):
            raise ValueError(f"its kind is {shown(str(self.kind))}, its codec {shown(str(self.codec))}")
        if type(self.block) is not int or not 64 <= self.block <= _LARGEST_BLOCK or self.block % 64:
            raise ValueError("its block is not a multiple of 64 within bounds")

    def blocks(self, tensor: StoredTensor) -> Iterator[tuple[int, int]]:
        """(first word, words) of each block of a tensor."""
        words = words_in(tensor)
        return ((first, min(self.block, words - first)) for first in range(0, words, self.block))

    def frames(self, tensor: StoredTensor, form: Form) -> int:
        """How many frames a block of a tensor has, by zstd."""
        return (form == "sparse") + (word_bytes(tensor) if self.kind == "weights" else 0)

    def parts(self, tensor: StoredTensor, form: Form) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """Names, dtypes and shapes of what a packed shard holds of a tensor; None for lengths that depend on its values."""
        name, mask = tensor.name, ("U8", (mask_bytes(words_in(tensor)),))
        if form == "base":
            return {}
        if self.codec == "zstd":
            sizes = (-(-words_in(tensor) // self.block), self.frames(tensor, form))
            return {f"{name}.frames": ("U8", (None,)), f"{name}.sizes": ("U32", sizes)}
        if form == "dense":
            return {name: (tensor.dtype, tensor.shape)}
        if self.kind == "mask":
            return {f"{name}.mask": mask}
        return {f"{name}.mask": mask, f"{name}.values": (tensor.dtype, (None,))}


class PackedShard:
    """One packed shard; read-only.

    Attributes:
        path: the file.
        header: the header of the original, in bytes, its length before it.
        size, xxh3_128: of the original.
        tensors: those of the original, in the order of their bytes, which are counted in the original.
        forms: of each of them.

    Raises:
        UserError: it is not such a file, or contradicts itself.
    """

    def __init__(self, path: Path, manner: Manner, told: dict[str, Any]) -> None:
        self.path, self.manner = path, manner
        if not path.is_file():
            raise UserError(f"{path}: it is missing; {PACK_NAME} beside it names it. Download it again.")
        self._parts = {tensor.name: tensor for tensor in read_header(path)}
        try:
            text = told["header"].encode("utf-8")
            self.header = len(text).to_bytes(8, "little") + text
            self.size, self.xxh3_128 = _natural(told["bytes"]), str(told["xxh3_128"])
            self.tensors = parse_header(text, path, self.size)
            self.forms = {tensor.name: self._form(tensor) for tensor in self.tensors}
            used: set[str] = set()
            for tensor in self.tensors:
                parts = manner.parts(tensor, self.forms[tensor.name])
                for name, (dtype, shape) in parts.items():
                    self._check(name, dtype, shape)
                used |= parts.keys()
            if used != self._parts.keys():
                raise ValueError(f"{shown(min(self._parts.keys() - used))} is of no tensor of the original")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            damaged(path, error)

    def part(self, tensor: StoredTensor, suffix: str = "") -> StoredTensor:
        """A tensor of the packed file that belongs to one of the original; ValueError where there is none."""
        name = tensor.name + suffix
        if name not in self._parts:
            raise ValueError(f"it holds no {shown(name)}")
        return self._parts[name]

    def masks(self, file: Source, tensor: StoredTensor, coder: Zstd | None) -> Callable[[int], Bytes]:
        """A function that reads the mask of a block of a sparse tensor, given its number, from the open file."""
        words, block = words_in(tensor), self.manner.block
        if coder is not None:
            frames = Frames(self, file, tensor)
            return lambda number: coder.mask(frames.read(number, 1)[0], min(block, words - number * block))
        part = self.part(tensor, ".mask")
        return lambda number: read_words(file, part, number * block // 8, mask_bytes(min(block, words - number * block)))

    def _form(self, tensor: StoredTensor) -> Form:
        """What the parts of a tensor say of its form."""
        if self.manner.codec == "zstd":
            sizes = self._parts.get(f"{tensor.name}.sizes")
            if sizes is None:
                return "base" if self.manner.kind == "mask" else "dense"
            return "sparse" if sizes.shape[1:] == (self.manner.frames(tensor, "sparse"),) else "dense"
        if self.manner.kind == "mask":
            return "sparse" if f"{tensor.name}.mask" in self._parts else "base"
        return "dense" if tensor.name in self._parts else "sparse"

    def _check(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
        found = self._parts.get(name)
        if found is None:
            raise ValueError(f"it holds no {shown(name)}")
        alike = len(found.shape) == len(shape) and all(a in (None, b) for a, b in zip(shape, found.shape, strict=True))
        if found.dtype != dtype or not alike:
            raise ValueError(f"{shown(name)} is not of the dtype and shape that its original asks for")


class Frames:
    """The frames of a tensor in an open packed shard; ValueError where their sizes cannot be."""

    def __init__(self, shard: PackedShard, file: Source, tensor: StoredTensor) -> None:
        self._file = file
        sizes, self._frames = shard.part(tensor, ".sizes"), shard.part(tensor, ".frames")
        self._sizes = read_words(file, sizes, 0, sizes.numel).reshape(sizes.shape).astype(np.int64)
        ends = self._sizes.sum(axis=1).cumsum()
        self._starts = ends - self._sizes.sum(axis=1)
        total = int(ends[-1]) if ends.size else 0
        if total + -total % 8 != self._frames.numel:
            raise ValueError(f"the frames of {shown(tensor.name)} are not as long as announced")
        if self._sizes.size and int(self._sizes.max()) > 2 * shard.manner.block + 1024:
            raise ValueError("a frame is longer than any of a block can be")

    def read(self, number: int, frames: int | None = None) -> list[memoryview]:
        """All frames of a block, or the first few."""
        sizes = self._sizes[number, :frames].tolist()
        raw = memoryview(bytearray(sum(sizes)))
        self._file.read(raw, self._frames.start + int(self._starts[number]))
        ends = np.cumsum(sizes).tolist()
        return [raw[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class PackedFolder:
    """A folder that `emp_llm.pack` wrote; read-only.

    Attributes:
        manner: how it is packed.
        base: what the pruning run's report says of the model that was pruned.
        shards: original name -> packed shard.
        files: path -> (bytes, SHA-256) of the other files.

    Raises:
        UserError: there is no such folder, or it contradicts itself, or a path in it leads elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / PACK_NAME
        if not path.is_file():
            raise UserError(f"{folder}: no {PACK_NAME} in it. Give a folder that python -m emp_llm.pack wrote.")
        check_links(folder)
        told = read_json(path, unique=True, limit=INDEX_LIMIT)
        try:
            if told.get("format") != FORMAT:
                raise ValueError(f"its format is {shown(str(told.get('format')))}, and this version reads {FORMAT!r}")
            self.manner = Manner(told["kind"], told["codec"], told["block"])
            self.base: dict[str, Any] = dict(told["base"] or {})
            self.files = {_plain(name): (_natural(e["bytes"]), str(e["sha256"])) for name, e in told["files"].items()}
            shards = {_plain(name): dict(entry) for name, entry in told["shards"].items()}
            if not shards or shards.keys() & self.files.keys():
                raise ValueError("it names no shards, or a shard as another file")
            if any("/" in name or not name.endswith(".safetensors") for name in shards):
                raise ValueError("its shards are not plain names of safetensors files")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            damaged(path, error)
        self.shards = {name: PackedShard(folder / packed_name(name), self.manner, entry) for name, entry in shards.items()}

    @property
    def bytes(self) -> int:
        """What all files have when unpacked."""
        return sum(shard.size for shard in self.shards.values()) + sum(size for size, _ in self.files.values())

    @cached_property
    def coder(self) -> Zstd | None:
        """What decodes its frames; None where it has none."""
        return Zstd(str(self.folder)) if self.manner.codec == "zstd" else None

    @property
    def base_name(self) -> str:
        """What the model that was pruned is called."""
        name, revision = self.base.get("model"), self.base.get("revision")
        return f"{shown(str(name))}{f' at {shown(str(revision))}' if revision else ''}" if name else "the model that was pruned"


class PackedCheckpoint(Checkpoint):
    """The names and shapes of a packed checkpoint, for those who look for its layers; its weights cannot be read by place."""

    def __init__(self, packed: PackedFolder) -> None:
        self.folder = packed.folder
        self.shards = [shard.path for shard in packed.shards.values()]
        self.tensors = {tensor.name: tensor for shard in packed.shards.values() for tensor in shard.tensors}


def packed_name(shard: str) -> str:
    """What the packed file of a shard is called."""
    return shard.removesuffix(".safetensors") + SUFFIX


def damaged(path: Path, cause: Exception | str) -> NoReturn:
    """Raise the UserError for a packed file that cannot be believed."""
    if isinstance(cause, ReadError):
        raise cause
    why = cause if isinstance(cause, str) else f"it has no {cause}" if isinstance(cause, KeyError) else reason(cause)
    raise UserError(f"{path}: not a sound packed file ({why}). Download or pack it again.")


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{shown(str(value))} is not a size")
    return value


def _plain(name: str) -> str:
    """A path that stays within its folder, on every system."""
    parts = name.split("/")
    inside = name == str(PurePosixPath(name)) and set(parts).isdisjoint({"", ".", ".."}) and name.isprintable()
    if not inside or any(letter in name for letter in "\\:"):
        raise ValueError(f"the path {shown(name)} leads out of the folder")
    return name
