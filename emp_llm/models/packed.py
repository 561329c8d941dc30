"""Packed checkpoints: the format, and how it is read with suspicion.

A packed folder holds, of a model folder, every shard `NAME.safetensors` as `NAME.packed.safetensors`, every other file as it is,
and `emp_pack.json`, which lists them. Packed shards are safetensors files that anybody can open, and from which every byte of
the shard can be restored:

**emp_pack.json**: `format` is "emp-llm pack 1"; `kind` "packed" or "mask"; `codec` "raw" or "zstd"; `shards` maps the name of each
original shard to its size in `bytes`; `files` maps the path of each other file to its `bytes` and `sha256`; `base` is what the
report of the pruning run says of the model that was pruned, or null.

**Metadata of a packed shard**, under the key `emp_llm_pack`, a JSON object: `format`, `kind` and `codec` as above; `file`, the name
of the original shard; `header`, the text of its header to the last blank; `block`, a number of weights (1,048,576; always a multiple
of 64); `tensors`, for each tensor of the original its `form` ("sparse", "dense" or "base") and its `digest`.

**Tensors.** A tensor is a row of numbers, in the order in which they were stored, whatever its shape. Zero is a number of which no
bit is set; -0.0 is a value.

- sparse, raw: `NAME.mask`, U8: a bit for every number, lowest bit of the first byte first, one where it is not zero; zeros fill it up
  to a multiple of 8 bytes. `NAME.values`, of the original's dtype and of one dimension: the other numbers, one after another.
- dense, raw: `NAME`, as it was. (A mask would cost more than the zeros.)
- base: nothing; in masks only, where a tensor has no zeros.
- sparse and dense, zstd: numbers are taken in blocks of `block`. `NAME.frames`, U8: some zstd frames for every block, one after
  another, filled up with zeros to a multiple of 8 bytes. `NAME.sizes`, U32, shape (blocks, frames to a block): their sizes. If
  sparse, the first frame of a block is its mask (not filled up). The others are byte planes of its values, the highest plane first,
  each value turned left by one bit, so that the sign stands with the lowest bits of the mantissa. Of numbers of 2, 4 and 8 bytes the
  highest plane (of a bfloat16: the exponent) is written as 15 frequent bytes; then half a byte for each byte of the plane, the low
  half first, which is its place in that list, or 15 for a byte that is not in it or to fill up the last pair; then the bytes that are
  not in it. Numbers of less than 8 bits are taken as bytes.
- In masks `NAME.values`, and all frames but the first, are left out; every tensor with a zero has a mask.

The digest of a tensor is the SHA-256, in hexadecimal, of the SHA-256 digests of its blocks as they were before packing.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

from emp_llm.models.checkpoint import Checkpoint, StoredTensor, read_header, read_json
from emp_llm.models.errors import UserError, reason

FORMAT = "emp-llm pack 1"
METADATA_KEY = "emp_llm_pack"
MANIFEST_NAME = "emp_pack.json"
SUFFIX = ".packed.safetensors"
BLOCK = 1 << 20

Kind = Literal["packed", "mask"]
Codec = Literal["raw", "zstd"]

_LARGEST_BLOCK = 1 << 23
_BITS = {"BOOL": 8, "BF16": 16, "C64": 64, "F4": 4}


def bits_of(dtype: str) -> int:
    """Bits of a number of a safetensors dtype (BF16, F8_E4M3, F6_E2M3, ...); ValueError for what is none."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = dtype[1:].partition("_")[0]
    if dtype[:1] not in ("F", "I", "U") or digits not in ("6", "8", "16", "32", "64"):
        raise ValueError(f"{dtype[:20]!r} is not a dtype")
    return int(digits)


def item_bytes(dtype: str) -> int:
    """Bytes of the words in which a tensor is taken; 1 for numbers of less than 8 bits."""
    return max(1, bits_of(dtype) // 8)


def mask_bytes(numbers: int) -> int:
    """Size of the mask of so many numbers."""
    return -(-numbers // 64) * 8


def sparse_bytes(numbers: int, size: int, zeros: int) -> int:
    """What a tensor takes when packed (raw): a mask and values, or itself where that is no more."""
    return min(numbers * size, mask_bytes(numbers) + (numbers - zeros) * size)


@dataclass(frozen=True)
class Entry:
    """What a packed shard tells of one tensor of the original.

    Attributes:
        stored: the tensor as it was; its shard is the packed file, its bytes are counted in the original.
        form: "sparse", "dense" or "base".
        digest: in hexadecimal.
    """

    stored: StoredTensor
    form: str
    digest: str

    @property
    def size(self) -> int:
        """Bytes of a word."""
        return item_bytes(self.stored.dtype)

    @property
    def words(self) -> int:
        """How many of them."""
        return (self.stored.end - self.stored.start) // self.size

    def blocks(self, block: int) -> Iterator[tuple[int, int, int]]:
        """(number, first word, words) of each of its blocks."""
        for number, first in enumerate(range(0, self.words, block)):
            yield number, first, min(block, self.words - first)


class PackedShard:
    """One packed shard; read-only.

    Attributes:
        path: the file.
        kind, codec, block: see the format.
        header: the header of the original, in bytes, its length before it.
        entries: the tensors of the original by name, in the order of their bytes.
        parts: the tensors of the packed file by name.

    Raises:
        UserError: it is not such a file, or contradicts itself.
    """

    def __init__(self, path: Path, file: str, size: int) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path}: it is missing; {MANIFEST_NAME} beside it names it. Download it again.")
        self.parts = {tensor.name: tensor for tensor in read_header(path)}
        try:
            told = _metadata(path)
            if told.get("format") != FORMAT:
                raise ValueError(f"its format is {str(told.get('format'))[:40]!r}, and this version reads {FORMAT!r}")
            self.kind: Kind = _one_of(told, "kind", ("packed", "mask"))
            self.codec: Codec = _one_of(told, "codec", ("raw", "zstd"))
            self.block = told["block"]
            if type(self.block) is not int or not 64 <= self.block <= _LARGEST_BLOCK or self.block % 64:
                raise ValueError("its block is not a multiple of 64 within bounds")
            if told["file"] != file:
                raise ValueError(f"it is the shard of another file than {file}")
            raw = told["header"].encode("utf-8")
            self.header = len(raw).to_bytes(8, "little") + raw
            stored = _originals(told["header"], path, len(self.header))
            if (stored[-1].end if stored else len(self.header)) != size:
                raise ValueError(f"its tensors do not make up the {size:,} bytes of {file}")
            if told["tensors"].keys() != {tensor.name for tensor in stored}:
                raise ValueError("the tensors it tells of are not those of its header")
            self.entries = {
                tensor.name: Entry(tensor, str(entry["form"]), str(entry["digest"]))
                for tensor in stored
                for entry in (told["tensors"][tensor.name],)
            }
            used = {part for entry in self.entries.values() for part in self._check(entry)}
            if used != self.parts.keys():
                raise ValueError(f"{min(self.parts.keys() - used)[:80]!r} is of no tensor of the original")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            damaged(path, f"{type(error).__name__} {error}" if isinstance(error, KeyError) else reason(error), error)

    def part(self, entry: Entry, suffix: str = "") -> StoredTensor:
        """A tensor of the packed file that belongs to one of the original; ValueError where there is none."""
        name = entry.stored.name + suffix
        if name not in self.parts:
            raise ValueError(f"it holds no {name[:80]!r}")
        return self.parts[name]

    def frames_to_block(self, entry: Entry) -> int:
        """Of a tensor, by zstd."""
        return (entry.form == "sparse") + (entry.size if self.kind == "packed" else 0)

    def _check(self, entry: Entry) -> list[str]:
        """The names of a tensor's parts; ValueError where their shapes are not as they must be."""
        forms = ("sparse", "dense") if self.kind == "packed" else ("sparse", "base")
        name, words = entry.stored.name, entry.words
        if entry.form not in forms:
            raise ValueError(f"{name[:80]!r} is of no form that is known")
        if entry.form == "base":
            return []
        if self.codec == "zstd":
            sizes, frames = self.part(entry, ".sizes"), self.part(entry, ".frames")
            shape = (-(-words // self.block), self.frames_to_block(entry))
            if (sizes.dtype, sizes.shape) != ("U32", shape) or frames.dtype != "U8" or len(frames.shape) != 1:
                raise ValueError(f"the frames of {name[:80]!r} are not of the shape that its size asks for")
            return [sizes.name, frames.name]
        if entry.form == "dense":
            dense = self.part(entry)
            if (dense.dtype, dense.shape) != (entry.stored.dtype, entry.stored.shape):
                raise ValueError(f"{name[:80]!r} has another dtype or shape than its header says")
            return [name]
        mask = self.part(entry, ".mask")
        if (mask.dtype, mask.shape) != ("U8", (mask_bytes(words),)):
            raise ValueError(f"the mask of {name[:80]!r} does not have a bit for each of its {words:,} numbers")
        if self.kind == "mask":
            return [mask.name]
        values = self.part(entry, ".values")
        if values.dtype != entry.stored.dtype or len(values.shape) != 1 or values.shape[0] > words:
            raise ValueError(f"the values of {name[:80]!r} are not of its dtype or more than its {words:,} numbers")
        return [mask.name, values.name]


class PackedFolder:
    """A folder that `emp_llm.pack` wrote; read-only.

    Attributes:
        kind, codec: see the format.
        base: what the pruning run's report says of the model that was pruned.
        shards: original name -> packed shard.
        files: path -> (bytes, SHA-256) of the other files.

    Raises:
        UserError: there is no such folder, or it contradicts itself, or a path in it leads elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise UserError(f"{folder}: no {MANIFEST_NAME} in it. Give a folder that python -m emp_llm.pack wrote.")
        told = read_json(path)
        try:
            if told.get("format") != FORMAT:
                raise ValueError(f"its format is {str(told.get('format'))[:40]!r}, and this version reads {FORMAT!r}")
            self.kind: Kind = _one_of(told, "kind", ("packed", "mask"))
            self.codec: Codec = _one_of(told, "codec", ("raw", "zstd"))
            self.base: dict[str, Any] = dict(told["base"] or {})
            self.files = {_plain(name): (_natural(e["bytes"]), str(e["sha256"])) for name, e in told["files"].items()}
            sizes = {_plain(name): _natural(entry["bytes"]) for name, entry in told["shards"].items()}
            both = self.files.keys() & sizes.keys()
            if both or not sizes or any("/" in name or not name.endswith(".safetensors") for name in sizes):
                raise ValueError("its shards are not the plain names of safetensors files, each once")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            damaged(path, f"it has no {error}" if isinstance(error, KeyError) else reason(error), error)
        self.shards = {name: PackedShard(folder / packed_name(name), name, size) for name, size in sizes.items()}
        for shard in self.shards.values():
            if (shard.kind, shard.codec) != (self.kind, self.codec):
                damaged(shard.path, f"it is of another kind than {MANIFEST_NAME} says")
        self.bytes = sum(sizes.values()) + sum(size for size, _ in self.files.values())


class PackedCheckpoint(Checkpoint):
    """The names and shapes of a packed checkpoint, for those who look for its layers; its weights cannot be read by place."""

    def __init__(self, packed: PackedFolder) -> None:
        self.folder = packed.folder
        self.shards = [shard.path for shard in packed.shards.values()]
        self.tensors = {name: entry.stored for shard in packed.shards.values() for name, entry in shard.entries.items()}


def packed_name(shard: str) -> str:
    """What the packed file of a shard is called."""
    return shard.removesuffix(".safetensors") + SUFFIX


def damaged(path: Path, why: str, cause: BaseException | None = None) -> NoReturn:
    """Raise the UserError for a packed file that cannot be believed."""
    raise UserError(f"{path}: not a sound packed file ({why}). Download or pack it again.") from cause


def _metadata(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(length)).get("__metadata__") or {}
    if METADATA_KEY not in metadata:
        raise ValueError(f"its metadata has no {METADATA_KEY}")
    told = json.loads(metadata[METADATA_KEY])
    if not isinstance(told, dict):
        raise ValueError("its metadata is not an object")
    return told


def _originals(header: str, path: Path, base: int) -> list[StoredTensor]:
    """The tensors of an original header in the order of their bytes, which they must cover without gap or overlap."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("its header names something twice")
        return dict(pairs)

    found = []
    for name, entry in json.loads(header, object_pairs_hook=unique).items():
        if name == "__metadata__":
            continue
        shape = tuple(_natural(length) for length in entry["shape"])
        start, end = (base + _natural(offset) for offset in entry["data_offsets"])
        if math.prod(shape) * bits_of(entry["dtype"]) != 8 * (end - start):
            raise ValueError(f"the shape of {name[:80]!r} does not fit its bytes")
        found.append(StoredTensor(name, path, entry["dtype"], shape, start, end))
    found.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = base
    for tensor in found:
        if tensor.start != position:
            raise ValueError(f"{tensor.name[:80]!r} does not begin where the tensor before it ends")
        position = tensor.end
    return found


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]!r} is not a size")
    return value


def _plain(name: str) -> str:
    """A path that stays within its folder, on every system."""
    parts = name.split("/")
    if name != str(PurePosixPath(name)) or not set(parts).isdisjoint({"", ".", ".."}) or any(c in name for c in '\\:\0'):
        raise ValueError(f"the path {name[:80]!r} leads out of the folder")
    return name


def _one_of(told: dict[str, Any], key: str, values: tuple[str, ...]) -> Any:
    if told[key] not in values:
        raise ValueError(f"its {key} is {str(told[key])[:40]!r}")
    return told[key]
