"""Unpacking: every byte of a packed checkpoint put back where it was; a mask put on the weights of its base."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from xxhash import xxh3_128

from emp_llm.models.bits import Bytes, Words, mask_bytes, mask_of, ones_in, put_zeros_in, zero_out
from emp_llm.models.checkpoint import PACK_NAME, Checkpoint
from emp_llm.models.codec import Zstd
from emp_llm.models.digests import digest_of
from emp_llm.models.direct import Buffers, Source
from emp_llm.models.errors import UserError
from emp_llm.models.files import Behind, OpenFiles, Stream, ahead
from emp_llm.models.headers import StoredTensor, shown
from emp_llm.models.packed import Frames, PackedFolder, PackedShard, damaged, read_words, word_bytes, words_in
from emp_llm.models.packing import THREADS


class Unpacker:
    """Unpacks one folder.

    Args:
        packed: the folder; only read.
        base: the checkpoint that a mask was made for; only read. None where nothing but the packed folder is needed.

    Raises:
        UserError: a mask without a base, or a base for what needs none; the base is another model than the mask's; zstd is not
            installed.
    """

    def __init__(self, packed: PackedFolder, base: Checkpoint | None = None) -> None:
        self.packed, self.base, self.coder = packed, base, packed.coder
        self._buffers = Buffers()
        if base is None and packed.manner.kind == "mask":
            raise UserError(f"{packed.folder}: a mask holds no weights. Name the model it is for: --base {packed.base_name}")
        if base is not None and packed.manner.kind != "mask":
            raise UserError(f"{packed.folder}: it holds its weights; leave --base out.")
        if base is not None:
            self._check_base(base)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the model folder's files into a folder that exists.

        Returns:
            "bytes" of all files, and how many "files".

        Raises:
            UserError: a packed file is damaged, or the base holds other weights than those the mask was made for.
        """
        packed = self.packed
        total = sum(shard.size for shard in packed.shards.values())
        with tqdm(total=total, desc="unpack", unit="B", unit_scale=True, disable=None) as bar:
            for name, shard in packed.shards.items():
                digest = xxh3_128()
                with OpenFiles() as files, Behind() as behind:
                    stream = Stream(files.writing(folder / name), 0, self._buffers, behind)
                    for piece in self._pieces(shard, files):
                        stream.write(piece)
                        digest.update(piece)
                        bar.update(len(piece))
                    stream.close()
                if digest.hexdigest() != shard.xxh3_128:
                    self._refuse(shard)
        for name, (size, wanted) in packed.files.items():
            source, target = packed.folder / name, folder / name
            if not source.is_file():
                raise UserError(f"{source}: it is missing; {PACK_NAME} beside it names it. Download it again.")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            if target.stat().st_size != size or digest_of(target) != wanted:
                damaged(source, f"it is not the file that {PACK_NAME} names")
        return {"bytes": packed.bytes, "files": len(packed.shards) + len(packed.files)}

    def _pieces(self, shard: PackedShard, files: OpenFiles) -> Iterator[memoryview]:
        """The bytes of the original, in order."""
        yield memoryview(shard.header)
        for tensor in shard.tensors:
            for words in words_of(shard, tensor, files, self.coder, self.base):
                yield words.view(np.uint8).data

    def _check_base(self, base: Checkpoint) -> None:
        for shard in self.packed.shards.values():
            for tensor in shard.tensors:
                stored = base.tensors.get(tensor.name)
                if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                    raise UserError(
                        f"--base {base.folder}: it has no {shown(tensor.name)} of {tensor.dtype} {list(tensor.shape)}, so it "
                        f"is not the model that the mask is for ({self.packed.base_name})."
                    )
        if self.packed.base.get("sha256_of_samples") not in (None, base.fingerprint["sha256_of_samples"]):
            raise UserError(
                f"--base {base.folder}: its weights are not those that were pruned (another fingerprint). Name "
                f"{self.packed.base_name}."
            )

    def _refuse(self, shard: PackedShard) -> None:
        if self.base is None:
            damaged(shard.path, "what it yields has another checksum than announced")
        raise UserError(
            f"--base {self.base.folder}: with the mask {shard.path} it does not yield the file that was packed (another "
            f"checksum). It is not the very model that was pruned ({self.packed.base_name}), other weights changed after "
            "pruning, or one of both is damaged."
        )


def words_of(
    shard: PackedShard, tensor: StoredTensor, files: OpenFiles, coder: Zstd | None, base: Checkpoint | None = None
) -> Iterator[Words]:
    """The words of an original tensor, block after block.

    Args:
        shard: where it is packed.
        tensor: one of the shard's.
        files: where the files are opened.
        coder: that of the folder.
        base: where its values are, for a mask.

    Raises:
        UserError: what is packed is damaged.
    """
    try:
        yield from ahead(_jobs(shard, tensor, files, coder, base), THREADS)
    except UserError:
        raise
    except ValueError as error:
        damaged(shard.path, f"{shown(tensor.name)}: {error}")


def masks_of(shard: PackedShard, tensor: StoredTensor, files: OpenFiles, coder: Zstd | None) -> Iterator[Bytes]:
    """The mask of an original tensor, block after block; arguments and errors are those of `words_of`."""
    if shard.manner.kind == "weights":
        yield from map(mask_of, words_of(shard, tensor, files, coder))
        return
    masks = shard.masks(files.reading(shard.path), tensor, coder) if shard.forms[tensor.name] == "sparse" else None
    for number, (_, count) in enumerate(shard.manner.blocks(tensor)):
        try:
            mask = np.full(mask_bytes(count), 255, dtype=np.uint8) if masks is None else masks(number)
            if masks is not None:
                ones_in(mask, count)
        except UserError:
            raise
        except ValueError as error:
            damaged(shard.path, f"{shown(tensor.name)}: {error}")
        yield mask


def _jobs(
    shard: PackedShard, tensor: StoredTensor, files: OpenFiles, coder: Zstd | None, base: Checkpoint | None
) -> Iterator[Callable[[], Words]]:
    """What makes the words of a tensor, block after block; ValueError where they cannot be made."""
    form, here = shard.forms[tensor.name], files.reading(shard.path)
    if base is not None:
        stored = base.tensors[tensor.name]
        there = files.reading(stored.shard)
        masks = shard.masks(here, tensor, coder) if form == "sparse" else None
        for number, (first, count) in enumerate(shard.manner.blocks(tensor)):
            yield partial(_masked, there, stored, first, count, None if masks is None else partial(masks, number))
    elif coder is not None:
        frames, size = Frames(shard, here, tensor), word_bytes(tensor)
        for number, (_, count) in enumerate(shard.manner.blocks(tensor)):
            decode = partial(coder.decode, count=count, dtype=tensor.dtype, size=size, sparse=form == "sparse")
            yield partial(_decoded, frames, number, decode)
    elif form == "sparse":
        yield from _sparse(shard, tensor, here)
    else:
        part = shard.part(tensor)
        for first, count in shard.manner.blocks(tensor):
            yield partial(read_words, here, part, first, count)


def _sparse(shard: PackedShard, tensor: StoredTensor, here: Source) -> Iterator[Callable[[], Words]]:
    """The masks are read here, for they tell where the values of each block begin."""
    masks, values = shard.masks(here, tensor, None), shard.part(tensor, ".values")
    used = 0
    for number, (_, count) in enumerate(shard.manner.blocks(tensor)):
        mask = masks(number)
        kept = ones_in(mask, count)
        if used + kept > words_in(values):
            raise ValueError(f"its mask has more bits set than its {words_in(values):,} values")
        yield partial(_filled, here, values, used, kept, partial(put_zeros_in, mask, count=count))
        used += kept
    if used != words_in(values):
        raise ValueError(f"its mask has {used:,} bits set, and {words_in(values):,} values are there")


def _masked(file: Source, stored: StoredTensor, first: int, count: int, mask: Callable[[], Any] | None) -> Words:
    words = read_words(file, stored, first, count)
    if mask is None:
        return words
    bits = mask()
    ones_in(bits, count)  # raises where it is not sound
    return zero_out(bits, words)


def _decoded(frames: Frames, number: int, decode: Callable[..., Words]) -> Words:
    return decode(frames.read(number))


def _filled(file: Source, values: StoredTensor, first: int, count: int, fill: Callable[..., Words]) -> Words:
    return fill(values=read_words(file, values, first, count))
