"""Packs checkpoints and unpacks them, chunk by chunk. `packed_format` describes the format."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3

from emp_llm.checkpoint.bits import booleans, mask_of, nonzero_words, split_planes, zstd_frames
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import FileReader, file_hash, prefetch, read_json, write_json
from emp_llm.checkpoint.headers import BITS, StoredTensor, header_text
from emp_llm.checkpoint.matrices import (
    Words,
    mask_bytes,
    packed_bytes,
    read_words,
    word_bytes,
    words_in,
)
from emp_llm.checkpoint.packed_format import (
    FORMAT,
    THREADS,
    Form,
    PackedFolder,
    PackedShard,
    PackLayout,
    damaged,
    packed_name,
)
from emp_llm.common.errors import UserError, quotable
from emp_llm.common.paths import (
    EXTRAS,
    OTHER_WEIGHTS,
    PACK_NAME,
    PACKED_SUFFIX,
    REPORT_NAME,
    is_hidden,
)
from emp_llm.common.progress import progress_bar


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
