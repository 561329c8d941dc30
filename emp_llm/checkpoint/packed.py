"""The format of packed checkpoints, and the reader of packed folders. They may come from anybody,
so everything is checked.

The packed folder of a model holds every shard `NAME.safetensors` as `NAME.packed.safetensors`,
every other file unchanged, and `emp_pack.json`, which lists them all. Packed shards are ordinary
safetensors files, and every byte of the original shard can be restored from them.

**emp_pack.json**: `format` is "emp-llm pack 3"; `kind` "weights" or "mask"; `codec` "raw" or
"zstd"; `block`, a number of words, a multiple of 64; `shards` maps the name of each original shard
to its size in `bytes`, its `blake3`, the text of its `header`, and `packed`, the `blake3` of the
packed file; `files` maps the path of each other file to its `bytes` and `blake3`; `base` is the
source in the report of the pruning run, or null.

**Tensors** are sequences of words: numbers of 1, 2, 4 or 8 bytes in their stored order, whatever
the shape; numbers of less than 8 bits are taken as bytes. A word is zero if no bit of it is set;
-0.0 is a value. A packed shard holds a tensor

- dense, raw: as `NAME`, unchanged. (A mask would cost more than the zeros save.)
- sparse, raw: as `NAME.mask`, U8: one bit for each word, the lowest bit of the first byte first, 1
  if the word is not zero; padded with zeros to a multiple of 8 bytes. And `NAME.values`, of the
  original's dtype, one dimension: the words that are not zero, in order.
- dense or sparse, zstd: as `NAME.frames`, U8: the zstd frames of each chunk of `block` words,
  concatenated and padded with zeros to a multiple of 8 bytes. And `NAME.sizes`, U32, shape (chunks,
  frames in a chunk): their sizes. If sparse, the first frame of a chunk is its mask. The others are
  byte planes of its values, the highest plane first, each value rotated left by one bit, so that
  the sign is next to the lowest bits of the mantissa. The highest plane of BF16 and F32 is the
  exponent. It is written as 15 frequent bytes; then half a byte for each byte of the plane, the low
  half first: its index in that list, or 15 for a byte that is not in the list and for the missing
  half of a last pair; then the bytes that are not in the list.
- in a folder of kind "mask": as the mask alone, `NAME.mask` or its frames; a tensor without zeros
  has no entry.

What an author of a folder can get wrong is refused here, before a word is read: headers that leave
gaps, overlap or do not fit their file (`read_header`); entries without the dtype and the shape of
their tensor, of no tensor, or of two; a tensor in two shards. A mask is counted when it is read,
here by `chunks` and by the runtime in `StoredWeights.rows`. Positions of rows are never read from a
file: they are sums of these counts.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from os import cpu_count
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal, NoReturn

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Meta

from emp_llm.checkpoint.checkpoint import (
    BITS,
    Checkpoint,
    StoredTensor,
    check_links,
    header_text,
    identity_from_files,
    identity_of,
    parse_header,
    read_header,
)
from emp_llm.checkpoint.files import (
    INDEX_LIMIT,
    FileReader,
    file_hash,
    prefetch,
    read_json,
    write_json,
)
from emp_llm.checkpoint.matrices import (
    Bytes,
    Words,
    booleans,
    join_planes,
    mask_bytes,
    mask_of,
    need_zstandard,
    nonzero_words,
    ones_in,
    packed_bytes,
    put_zeros_in,
    read_words,
    split_planes,
    word_bytes,
    words_in,
    zstd_content,
    zstd_frames,
)
from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.common.paths import (
    EXTRAS,
    OTHER_WEIGHTS,
    PACK_NAME,
    PACKED_SUFFIX,
    REPORT_NAME,
    is_hidden,
)
from emp_llm.common.progress import progress_bar

Chunk = tuple[int, int, Bytes | None, Words | None]  # first word, number of words, mask, values
Form = Literal["sparse", "dense", "base"]  # base: no entry, the words of the base model

FORMAT = "emp-llm pack 3"
CHUNK = 1 << 20
THREADS = min(4, cpu_count() or 1)

Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class IndexedFile(msgspec.Struct):
    """A file in emp_pack.json."""

    bytes: Size
    blake3: str


class IndexedPackedFile(msgspec.Struct):
    """The packed file of a shard in emp_pack.json."""

    blake3: str


class IndexedShard(IndexedFile):
    """An original shard in emp_pack.json."""

    packed: IndexedPackedFile
    header: str


class PackIndex(msgspec.Struct):
    """The content of emp_pack.json, but for its format."""

    kind: Literal["weights", "mask"]
    codec: Literal["raw", "zstd"]
    block: Annotated[int, Meta(ge=64, le=1 << 23, multiple_of=64)]
    base: dict[str, Any] | None
    shards: Annotated[dict[str, IndexedShard], Meta(min_length=1)]
    files: dict[str, IndexedFile]


@dataclass(frozen=True)
class PackLayout:
    """How a folder is packed.

    Attributes:
        mask_only: it holds masks without weights: `kind` "mask" in emp_pack.json.
        zstd: values and masks are compressed: `codec` "zstd".
        chunk: words that are packed together, a multiple of 64: `block`.
    """

    mask_only: bool = False
    zstd: bool = False
    chunk: int = CHUNK

    def chunks(self, tensor: StoredTensor) -> Iterator[tuple[int, int]]:
        """(first word, number of words) of each chunk of a tensor."""
        words = words_in(tensor)
        return ((first, min(self.chunk, words - first)) for first in range(0, words, self.chunk))

    def frames(self, tensor: StoredTensor, form: Form) -> int:
        """The number of zstd frames in a chunk of a tensor."""
        return (form == "sparse") + (0 if self.mask_only else word_bytes(tensor))

    def entries(
        self, tensor: StoredTensor, form: Form
    ) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """The entries that a packed shard has for a tensor: name -> (dtype, shape), with None for
        lengths that depend on values.
        """
        name = tensor.name
        mask = ("U8", (mask_bytes(words_in(tensor)),))
        if form == "base":
            return {}
        if self.zstd:
            sizes = (-(-words_in(tensor) // self.chunk), self.frames(tensor, form))
            return {f"{name}.frames": ("U8", (None,)), f"{name}.sizes": ("U32", sizes)}
        if form == "dense":
            return {name: (tensor.dtype, tensor.shape)}
        if self.mask_only:
            return {f"{name}.mask": mask}
        return {f"{name}.mask": mask, f"{name}.values": (tensor.dtype, (None,))}


class PackedShard:
    """One packed shard; read-only.

    Args:
        path: the file.
        layout: that of the folder.
        indexed: the shard in emp_pack.json.

    Attributes:
        path, layout: as given.
        header: the bytes of the original shard up to its first tensor.
        size, digest: of the original shard: bytes, and BLAKE3 in hexadecimal.
        packed_digest: BLAKE3 of the packed file in hexadecimal.
        tensors: those of the original shard in the order of their bytes, with their offsets there.
        forms: the form of each tensor, by its name.

    Raises:
        UserError: the file is missing, is no packed shard, or contradicts its entry.
    """

    def __init__(self, path: Path, layout: PackLayout, indexed: IndexedShard) -> None:
        self.path = path
        self.layout = layout
        if not path.is_file():
            raise UserError(f"{path}: it is missing, but {PACK_NAME} names it. Download it again.")
        self._entries = {tensor.name: tensor for tensor in read_header(path)}
        try:
            text = indexed.header.encode("utf-8")
            self.header = len(text).to_bytes(8, "little") + text
            self.size = indexed.bytes
            self.digest = indexed.blake3
            self.packed_digest = indexed.packed.blake3
            self.tensors = parse_header(text, path, self.size)
            self.forms = {tensor.name: self._form(tensor) for tensor in self.tensors}
            self._check_entries()
        except ValueError as error:
            damaged(path, reason(error))

    def _check_entries(self) -> None:
        """Raise ValueError unless each entry belongs to one tensor of the original, and has the
        dtype and the shape that this tensor requires.
        """
        used: set[str] = set()
        for tensor in self.tensors:
            entries = self.layout.entries(tensor, self.forms[tensor.name])
            for name, (dtype, shape) in entries.items():
                stored = self.entry(name)
                fits = len(stored.shape) == len(shape) and all(
                    a in (None, b) for a, b in zip(shape, stored.shape, strict=True)
                )
                if stored.dtype != dtype or not fits:
                    raise ValueError(
                        f"{quotable(name)} does not have the dtype and the shape that its original "
                        "requires"
                    )
                if name in used:
                    raise ValueError(f"{quotable(name)} belongs to two tensors")
                used.add(name)
        if used != self._entries.keys():
            unused = min(self._entries.keys() - used)
            raise ValueError(f"{quotable(unused)} belongs to no tensor of the original")

    def zeros_in(self, tensor: StoredTensor) -> int:
        """The number of zeros that were left out of a tensor with raw weights."""
        if self.forms[tensor.name] == "dense":
            return 0
        return words_in(tensor) - words_in(self.entry(f"{tensor.name}.values"))

    def chunks(self, tensor: StoredTensor) -> Iterator[Chunk]:
        """(first word, number of words, mask, values) of each chunk of a tensor.

        The mask is None if no zeros were left out; the values are None if the folder has only
        masks.

        Raises:
            UserError: the file is damaged.
        """
        try:
            with FileReader(self.path) as file:
                if self.layout.zstd and self.forms[tensor.name] != "base":
                    yield from prefetch(self._frames(tensor, file), THREADS)
                else:
                    yield from self._raw_chunks(tensor, file)
        except UserError:
            raise
        except ValueError as error:
            damaged(self.path, f"{quotable(tensor.name)}: {error}")

    def words(self, tensor: StoredTensor) -> Iterator[Words]:
        """The words of an original tensor, chunk by chunk, from a folder with weights; UserError
        if the file is damaged.
        """
        for _, count, mask, values in self.chunks(tensor):
            assert values is not None
            yield values if mask is None else put_zeros_in(mask, values, count)

    def mask(self, tensor: StoredTensor) -> Bytes:
        """The mask of all words of an original tensor; UserError if the file is damaged."""
        masks = [np.empty(0, dtype=np.uint8)]
        for _, count, mask, values in self.chunks(tensor):
            if mask is None:
                ones = np.full(mask_bytes(count), 255, dtype=np.uint8)
                mask = ones if values is None else mask_of(values)
            masks.append(mask)
        return np.concatenate(masks)

    def _raw_chunks(self, tensor: StoredTensor, file: FileReader) -> Iterator[Chunk]:
        """`chunks` of a tensor that is not compressed; ValueError for an unsound mask."""
        name = tensor.name
        sparse = self.forms[name] == "sparse"
        mask_entry = self.entry(f"{name}.mask") if sparse else None
        values_entry = self._entries.get(f"{name}.values" if sparse else name)
        used = 0
        mask = None
        values = None
        for first, count in self.layout.chunks(tensor):
            kept = count
            if mask_entry is not None:
                mask = read_words(file, mask_entry, first // 8, mask_bytes(count))
                kept = ones_in(mask, count)
            if values_entry is not None:
                if used + kept > words_in(values_entry):
                    raise ValueError(
                        f"its mask has more bits set than it has values, {words_in(values_entry):,}"
                    )
                values = read_words(file, values_entry, used, kept)
            yield first, count, mask, values
            used += kept
        if values_entry is not None and used != words_in(values_entry):
            raise ValueError(
                f"its mask has {used:,} bits set for {words_in(values_entry):,} values"
            )

    def _frames(self, tensor: StoredTensor, file: FileReader) -> Iterator[Callable[[], Chunk]]:
        """For each chunk, a job that decompresses its frames; ValueError for unsound frames."""

        def decode(first: int, count: int, raw: memoryview, sizes: list[int]) -> Chunk:
            frames = [
                raw[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)
            ]
            mask = None
            kept = count
            if self.forms[tensor.name] == "sparse":
                mask = zstd_content(frames.pop(0), mask_bytes(count))
                kept = ones_in(mask, count)
            values = None if self.layout.mask_only else join_planes(frames, kept, tensor.dtype)
            return first, count, mask, values

        start = self.entry(f"{tensor.name}.frames").start
        for chunk, sizes in zip(
            self.layout.chunks(tensor), self._frame_sizes(tensor, file), strict=True
        ):
            raw = memoryview(bytearray(sum(sizes)))
            file.read(raw, start)
            yield partial(decode, *chunk, raw, sizes)
            start += len(raw)

    def _frame_sizes(self, tensor: StoredTensor, file: FileReader) -> list[list[int]]:
        """The sizes of the frames of each chunk; ValueError for impossible ones."""
        entry = self.entry(f"{tensor.name}.sizes")
        sizes = read_words(file, entry, 0, entry.numel).reshape(entry.shape).astype(np.int64)
        total = int(sizes.sum())
        if total + -total % 8 != self.entry(f"{tensor.name}.frames").numel:
            raise ValueError("its frames do not have the announced length")
        if sizes.size and int(sizes.max()) > 2 * self.layout.chunk + 1024:
            raise ValueError("a frame is too long for a chunk")
        listed: list[list[int]] = sizes.tolist()
        return listed

    def _form(self, tensor: StoredTensor) -> Form:
        """The form of a tensor, from the entries that it has."""
        name = tensor.name
        mask_only = self.layout.mask_only
        if not self.layout.zstd:
            if mask_only:
                return "sparse" if f"{name}.mask" in self._entries else "base"
            return "dense" if name in self._entries else "sparse"
        sizes = self._entries.get(f"{name}.sizes")
        if sizes is None:
            return "base" if mask_only else "dense"
        return "sparse" if sizes.shape[1:] == (self.layout.frames(tensor, "sparse"),) else "dense"

    def entry(self, name: str) -> StoredTensor:
        """An entry of the packed file; ValueError if there is none."""
        if name not in self._entries:
            raise ValueError(f"it holds no {quotable(name)}")
        return self._entries[name]


class PackedFolder:
    """A folder that `emp-llm pack` wrote; read-only.

    Attributes:
        layout: how it is packed.
        base: the model that was pruned, as the report of the pruning run names it.
        shards: original name -> packed shard.
        files: the other files, by path.

    Raises:
        UserError: it is no packed folder, it contradicts itself, a path in it leads out of it, or
            it needs zstandard, which is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / PACK_NAME
        if not path.is_file():
            raise UserError(
                f"{folder}: no {PACK_NAME} in it. Give a folder that emp-llm pack wrote."
            )
        check_links(folder)
        index = read_json(path, strict=True, limit=INDEX_LIMIT)
        _check_format(path, index.get("format"))
        try:
            content = msgspec.convert(index, PackIndex)
            shards = {_plain(name): shard for name, shard in content.shards.items()}
            self.files = {_plain(name): file for name, file in content.files.items()}
            if shards.keys() & self.files.keys():
                raise ValueError("it names a shard among the other files")
            if any("/" in name or not name.endswith(".safetensors") for name in shards):
                raise ValueError("its shards are not plain names of safetensors files")
        except ValueError as error:  # msgspec.ValidationError too
            damaged(path, reason(error))
        self.layout = PackLayout(content.kind == "mask", content.codec == "zstd", content.block)
        self.base = content.base or {}
        if self.layout.zstd:
            need_zstandard(str(folder))
        self.shards = {
            name: PackedShard(folder / packed_name(name), self.layout, shard)
            for name, shard in shards.items()
        }
        names: set[str] = set()
        for shard in self.shards.values():
            for tensor in shard.tensors:
                if tensor.name in names:
                    damaged(path, f"{quotable(tensor.name)} is in two shards")
                names.add(tensor.name)

    @property
    def bytes(self) -> int:
        """The size of all files when unpacked."""
        return sum(shard.size for shard in self.shards.values()) + sum(
            file.bytes for file in self.files.values()
        )

    @property
    def identity(self) -> str:
        """The identity of the original checkpoint."""
        return identity_from_files(
            {name: (shard.size, shard.digest) for name, shard in self.shards.items()}
        )

    @property
    def base_name(self) -> str:
        """The name of the model that was pruned, for messages."""
        name = self.base.get("model")
        revision = self.base.get("revision")
        if not name:
            return "the model that was pruned"
        if not revision:
            return quotable(str(name))
        return f"{quotable(str(name))} at {quotable(str(revision))}"

    def check_file(self, name: str) -> None:
        """Raise UserError if one of the other files is not the one that was packed."""
        path = self.folder / name
        indexed = self.files[name]
        if path.stat().st_size != indexed.bytes or file_hash(path) != indexed.blake3:
            damaged(path, f"its content is not what {PACK_NAME} says")


class PackedCheckpoint(Checkpoint):
    """The names and shapes of a packed checkpoint, for finding its layers. Its weights cannot be
    read by their offsets.
    """

    def __init__(self, packed: PackedFolder) -> None:
        self.folder = packed.folder
        self.shards = [shard.path for shard in packed.shards.values()]
        self.tensors = {
            tensor.name: tensor for shard in packed.shards.values() for tensor in shard.tensors
        }


def packed_name(shard: str) -> str:
    """The name of a shard's packed file."""
    return shard.removesuffix(".safetensors") + PACKED_SUFFIX


def damaged(path: Path, why: str) -> NoReturn:
    """Raise the UserError for an unsound packed file."""
    raise UserError(f"{path}: not a sound packed file ({why}). Download or pack it again.")


def _check_format(path: Path, name: Any) -> None:
    """Raise UserError for a format that this version does not read."""
    version = re.fullmatch(r"emp-llm pack ([0-9]{1,9})", str(name))
    if version is not None and int(version[1]) > int(FORMAT.rpartition(" ")[2]):
        raise UserError(
            f"{path}: a newer emp-llm wrote it ({quotable(str(name))}; this version reads up to "
            f"{FORMAT!r}). Update emp-llm: git pull in its clone."
        )
    if name != FORMAT:
        damaged(path, f"its format is {quotable(str(name))}")


def _plain(name: str) -> str:
    """A path that stays within its folder on every system; ValueError for any other."""
    parts = name.split("/")
    inside = (
        name == str(PurePosixPath(name))
        and set(parts).isdisjoint({"", ".", ".."})
        and name.isprintable()
    )
    if not inside or any(letter in name for letter in "\\:"):
        raise ValueError(f"the path {quotable(name)} leads out of the folder")
    return name


# Packs checkpoints and unpacks them, chunk by chunk. `packed_format` describes the format.


@dataclass(frozen=True)
class PackedSizes:
    """Sizes before and after.

    Attributes:
        dense_bytes, packed_bytes: of the shards.
        file_bytes: of the other files.
        tensors, sparse: the number of all tensors, and of those stored without their zeros.
    """

    dense_bytes: int
    packed_bytes: int
    file_bytes: int
    tensors: int
    sparse: int


def other_files(checkpoint: Checkpoint, layout: PackLayout) -> list[Path]:
    """The files of a model folder beside its shards, relative to it, without the hidden files that
    downloads leave.

    Raises:
        UserError: a mask alone cannot restore the folder, because it holds other weights or kept
            weights that moved; or a file belongs to a packed checkpoint.
    """
    folder = checkpoint.folder
    if layout.mask_only and _is_updated(folder):
        raise UserError(
            f"{folder}: its kept weights were fitted, healed or trained, so the dense model and a "
            "mask do not make it. Leave out --mask-only."
        )
    files = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not path.is_file() or path in checkpoint.shards or is_hidden(relative):
            continue
        if path.name.endswith(PACKED_SUFFIX):
            raise UserError(f"{path}: it belongs to a packed checkpoint; move it away.")
        if layout.mask_only and path.suffix in OTHER_WEIGHTS and relative.parts[0] != EXTRAS:
            raise UserError(
                f"{path}: other weights, which do not belong in a mask; move the file away."
            )
        files.append(relative)
    return files


def most_bytes(checkpoint: Checkpoint, layout: PackLayout, files: list[Path]) -> int:
    """An upper bound on the size of the packed folder, in bytes."""
    others = sum((checkpoint.folder / path).stat().st_size for path in files)
    if layout.mask_only:
        return others + sum(mask_bytes(words_in(tensor)) for tensor in checkpoint.tensors.values())
    return others + sum(shard.stat().st_size for shard in checkpoint.shards)


def pack_checkpoint(
    checkpoint: Checkpoint, layout: PackLayout, files: list[Path], folder: Path
) -> PackedSizes:
    """Write the packed files of a checkpoint, and `files` of its folder, into a folder that exists.

    Raises:
        UserError: a file changed while it was read, or a mask is asked for and there are no zeros.
    """
    source = checkpoint.folder
    forms = []
    shards: dict[str, dict[str, Any]] = {}
    with progress_bar(sum(shard.stat().st_size for shard in checkpoint.shards), "pack", "B") as bar:
        for shard in checkpoint.shards:
            tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.shard == shard]
            target = folder / packed_name(shard.name)
            forms += _pack_shard(shard, tensors, layout, target, bar)
            shards[shard.name] = {
                "bytes": shard.stat().st_size,
                "blake3": file_hash(shard),
                "packed": {"blake3": file_hash(target)},
                "header": header_text(shard).decode("utf-8"),
            }
    if layout.mask_only and "sparse" not in forms:
        raise UserError(f"{source}: it has no zeros, so it has no mask. Give a pruned checkpoint.")
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, folder / path)
    others: dict[str, dict[str, Any]] = {
        path.as_posix(): {
            "bytes": (folder / path).stat().st_size,
            "blake3": file_hash(folder / path),
        }
        for path in files
    }
    checkpoint.check_unchanged()
    base = _report(source).get("source")
    index = {
        "format": FORMAT,
        "kind": "mask" if layout.mask_only else "weights",
        "codec": "zstd" if layout.zstd else "raw",
        "block": layout.chunk,
        "base": base if isinstance(base, dict) else None,
        "shards": shards,
        "files": others,
    }
    write_json(folder / PACK_NAME, index)
    return PackedSizes(
        dense_bytes=sum(shard["bytes"] for shard in shards.values()),
        packed_bytes=sum((folder / packed_name(name)).stat().st_size for name in shards),
        file_bytes=sum(file["bytes"] for file in others.values()),
        tensors=len(forms),
        sparse=forms.count("sparse"),
    )


def _report(folder: Path) -> dict[str, Any]:
    """The report of the run that pruned a checkpoint, not checked; empty if there is none."""
    path = folder / REPORT_NAME
    return read_json(path) if path.is_file() else {}


def _is_updated(folder: Path) -> bool:
    """Whether a run, or a training after it, moved kept weights of a checkpoint."""
    report = _report(folder)
    if report.get("trained"):
        return True
    fits = report.get("fits")
    updates = [report.get("healing"), *(fits.values() if isinstance(fits, dict) else ())]
    return any(
        isinstance(update, dict) and (update.get("error_after") or update.get("steps")) is not None
        for update in updates
    )


def _pack_shard(
    shard: Path, tensors: list[StoredTensor], layout: PackLayout, target: Path, bar: Any
) -> list[Form]:
    """Write a packed shard; returns the form of each tensor.

    The header is known only at the end, and then fills the space that was left for it at the
    beginning.
    """
    # Larger numbers first, so that each tensor begins at a multiple of the size of its own numbers.
    tensors = sorted(tensors, key=lambda tensor: (-word_bytes(tensor), tensor.start, tensor.end))
    names = {tensor.name for tensor in tensors}
    forms = []
    most = 10 ** len(str(4 * shard.stat().st_size)) - 1
    longest = {
        f"{tensor.name}{suffix}": (tensor.dtype, [*tensor.shape, most, most], most, most)
        for tensor in tensors
        for suffix in (".values", ".frames")
    }
    entries: dict[str, tuple[str, list[int], int, int]] = {}
    with FileReader(shard) as source, target.open("wb") as packed:
        begin = end = len(_header(longest))
        for tensor in tensors:
            form, zeros = _form(tensor, layout, names, source)
            frames = 0 if form == "base" else _write(tensor, layout, form, source, packed, end)
            length = frames if layout.zstd else words_in(tensor) - zeros
            for name, (dtype, shape) in layout.entries(tensor, form).items():
                known = [length if side is None else side for side in shape]
                start = end
                end = end + math.prod(known) * BITS[dtype] // 8
                entries[name] = (dtype, known, start - begin, end - begin)
            forms.append(form)
            bar.update(tensor.end - tensor.start)
        header = _header(entries)[8:].ljust(begin - 8)
        packed.seek(0)
        packed.write(len(header).to_bytes(8, "little") + header)
    return forms


def _form(
    tensor: StoredTensor, layout: PackLayout, names: set[str], source: FileReader
) -> tuple[Form, int]:
    """The form in which a tensor is packed, and the number of its zeros.

    Args:
        names: of all tensors of its shard.
    """

    def zeros_in(first: int, count: int) -> int:
        return count - int(np.count_nonzero(read_words(source, tensor, first, count)))

    words = words_in(tensor)
    size = word_bytes(tensor)
    zeros = sum(prefetch((partial(zeros_in, *chunk) for chunk in layout.chunks(tensor)), THREADS))
    if layout.mask_only:
        return ("sparse" if zeros else "base"), zeros
    pays = packed_bytes(words, size, zeros) < words * size and BITS[tensor.dtype] >= 8
    taken = names & {f"{tensor.name}.mask", f"{tensor.name}.values"}
    return ("sparse" if pays and not taken else "dense"), zeros


def _write(
    tensor: StoredTensor,
    layout: PackLayout,
    form: Form,
    source: FileReader,
    packed: BinaryIO,
    position: int,
) -> int:
    """Write a tensor from a position; returns the bytes of its frames if they are compressed,
    else 0.
    """

    def pieces(first: int, count: int) -> list[Any]:
        words = read_words(source, tensor, first, count)
        arrays = [mask_of(words)] if form == "sparse" else []
        if not layout.mask_only:
            values = nonzero_words(words) if form == "sparse" else words
            arrays += split_planes(values, tensor.dtype) if layout.zstd else [values]
        return zstd_frames(arrays) if layout.zstd else arrays

    sizes = []
    places = [position, position + mask_bytes(words_in(tensor))]
    packed.seek(position)
    for chunk in prefetch((partial(pieces, *chunk) for chunk in layout.chunks(tensor)), THREADS):
        if layout.zstd:
            sizes.append([len(frame) for frame in chunk])
            packed.writelines(chunk)
            continue
        for number, piece in enumerate(chunk):  # the mask, then the values; or all words
            packed.seek(places[number])
            packed.write(piece.data)
            places[number] += piece.nbytes
    if not layout.zstd:
        return 0
    total = packed.tell() - position
    packed.write(bytes(-total % 8) + np.array(sizes, dtype="<u4").tobytes())
    return total + -total % 8


def _header(entries: dict[str, tuple[str, list[int], int, int]]) -> bytes:
    """The header of a safetensors file, from (dtype, shape, start, end) of each entry by its
    name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape, start, end) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    raw = raw.ljust(-(-len(raw) // 8) * 8)
    return len(raw).to_bytes(8, "little") + raw


def check_base(packed: PackedFolder, base: Checkpoint | None) -> None:
    """Check that `base` is the dense checkpoint that a mask is for, or None for a folder with
    weights.

    Raises:
        UserError: a mask without a base, or weights with one; or the base is another model than the
            mask's.
    """
    if base is None:
        if packed.layout.mask_only:
            raise UserError(
                f"{packed.folder}: a mask holds no weights. Name the model that it is for: --base "
                f"{packed.base_name}"
            )
        return
    if not packed.layout.mask_only:
        raise UserError(f"{packed.folder}: it holds weights, not a mask; leave --base out.")
    for shard in packed.shards.values():
        for tensor in shard.tensors:
            stored = base.tensors.get(tensor.name)
            if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                raise UserError(
                    f"--base {base.folder}: it has no {quotable(tensor.name)} of {tensor.dtype} "
                    f"{list(tensor.shape)}. It is not the model that the mask is for "
                    f"({packed.base_name})."
                )
    if packed.base.get("identity") not in (None, identity_of(base)):
        raise UserError(
            f"--base {base.folder}: its weights are not those that were pruned. Name "
            f"{packed.base_name}."
        )


def unpack_folder(packed: PackedFolder, base: Checkpoint | None, folder: Path) -> int:
    """Write the files of the original checkpoint into a folder that exists.

    Args:
        packed: the packed folder.
        base: the dense checkpoint that a mask is for; None for a folder with weights.
        folder: where the files are written.

    Returns:
        The number of files.

    Raises:
        UserError: a packed file is damaged, or the base holds other weights than those the mask was
            made for.
    """
    with progress_bar(sum(shard.size for shard in packed.shards.values()), "unpack", "B") as bar:
        for name, shard in packed.shards.items():
            digest = blake3(shard.header)
            with (folder / name).open("wb") as file:
                file.write(shard.header)
                for tensor in shard.tensors:
                    chunks = shard.words(tensor)
                    if base is not None:
                        chunks = _base_words(shard, tensor, base)
                    for words in chunks:
                        raw = words.view(np.uint8).data
                        digest.update(raw)
                        file.write(raw)
                        bar.update(len(raw))
            if digest.hexdigest() != shard.digest:
                if base is None:
                    damaged(shard.path, "the unpacked shard does not have the announced checksum")
                raise UserError(
                    f"--base {base.folder}: with the mask {shard.path} it does not yield the "
                    "packed file (another checksum). Either it is not the exact model that was "
                    f"pruned ({packed.base_name}), or other weights changed after pruning, or one "
                    "of the two is damaged."
                )
    for name in packed.files:
        source = packed.folder / name
        target = folder / name
        if not source.is_file():
            raise UserError(
                f"{source}: it is missing, but {PACK_NAME} names it. Download it again."
            )
        packed.check_file(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return len(packed.shards) + len(packed.files)


def _base_words(shard: PackedShard, tensor: StoredTensor, base: Checkpoint) -> Iterator[Words]:
    """The words of a tensor of the base, zero where the mask has a zero bit."""
    stored = base.tensors[tensor.name]
    with FileReader(stored.shard) as source:
        for first, count, mask, _ in shard.chunks(tensor):
            words = read_words(source, stored, first, count)
            yield words if mask is None else words * booleans(mask, count)
