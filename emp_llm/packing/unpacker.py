"""Unpacks: restores the files of a packed checkpoint byte for byte, or applies a mask to the weights of its base."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.identity import identity_of
from emp_llm.checkpoint.safetensors_header import StoredTensor
from emp_llm.checkpoint.samples import sha256_of_samples
from emp_llm.checkpoint.words import Words, mask_bytes, read_words, word_bytes, words_in
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import PACK_NAME
from emp_llm.common.progress_bars import progress_bar
from emp_llm.common.wording import quotable
from emp_llm.packing.bits import Bytes, mask_of, ones_in, put_zeros_in, zero_out
from emp_llm.packing.packed_folder import Frames, PackedFolder, PackedShard, damaged
from emp_llm.packing.shard_packer import THREADS
from emp_llm.packing.zstd_codec import Zstd
from emp_llm.storage.background_work import BackgroundQueue, prefetch
from emp_llm.storage.buffers import BufferPool
from emp_llm.storage.direct_io import FileReader
from emp_llm.storage.file_pool import FilePool
from emp_llm.storage.hashing import file_hash
from emp_llm.storage.stream import StreamWriter


class Unpacker:
    """Unpacks one folder.

    Args:
        packed: the folder; only read.
        base: the checkpoint that a mask was made for; only read. None for a folder with weights.

    Raises:
        UserError: a mask without a base, or weights with one; the base is another model than the mask's; zstandard is not
            installed.
    """

    def __init__(self, packed: PackedFolder, base: Checkpoint | None = None) -> None:
        self.packed, self.base, self.coder = packed, base, packed.coder
        self._buffers = BufferPool()
        if base is None and packed.layout.kind == "mask":
            raise UserError(
                f"{packed.folder}: a mask holds no weights. Name the model that it is for: --base {packed.base_name}"
            )
        if base is not None and packed.layout.kind != "mask":
            raise UserError(f"{packed.folder}: it holds weights, not a mask; leave --base out.")
        if base is not None:
            self._check_base(base)

    def write(self, folder: Path) -> int:
        """Write the model folder's files into a folder that exists.

        Returns:
            The number of files.

        Raises:
            UserError: a packed file is damaged, or the base holds other weights than those the mask was made for.
        """
        packed = self.packed
        total = sum(shard.size for shard in packed.shards.values())
        with progress_bar(total, "unpack", "B") as bar:
            for name, shard in packed.shards.items():
                digest = shard.hasher()
                with FilePool() as files, BackgroundQueue() as queue:
                    stream = StreamWriter(files.writer(folder / name), 0, self._buffers, queue)
                    for piece in self._pieces(shard, files):
                        stream.write(piece)
                        digest.update(piece)
                        bar.update(len(piece))
                    stream.close()
                if digest.hexdigest() != shard.digest:
                    self._refuse(shard)
        for name, (size, kind, wanted) in packed.files.items():
            source, target = packed.folder / name, folder / name
            if not source.is_file():
                raise UserError(f"{source}: it is missing, but {PACK_NAME} names it. Download it again.")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            if target.stat().st_size != size or file_hash(target, kind) != wanted:
                damaged(source, f"its content is not what {PACK_NAME} says")
        return len(packed.shards) + len(packed.files)

    def _pieces(self, shard: PackedShard, files: FilePool) -> Iterator[memoryview]:
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
                        f"--base {base.folder}: it has no {quotable(tensor.name)} of {tensor.dtype} {list(tensor.shape)}. "
                        f"It is not the model that the mask is for ({self.packed.base_name})."
                    )
        identity, samples = self.packed.base.get("identity"), self.packed.base.get("sha256_of_samples")
        same = identity_of(base) == identity if identity is not None else samples in (None, sha256_of_samples(base))
        if not same:
            raise UserError(f"--base {base.folder}: its weights are not those that were pruned. Name {self.packed.base_name}.")

    def _refuse(self, shard: PackedShard) -> None:
        if self.base is None:
            damaged(shard.path, "the unpacked shard does not have the announced checksum")
        raise UserError(
            f"--base {self.base.folder}: with the mask {shard.path} it does not yield the packed file (another checksum). "
            f"Either it is not the exact model that was pruned ({self.packed.base_name}), or other weights changed after "
            "pruning, or one of the two is damaged."
        )


def words_of(
    shard: PackedShard, tensor: StoredTensor, files: FilePool, coder: Zstd | None, base: Checkpoint | None = None
) -> Iterator[Words]:
    """The words of an original tensor, block by block.

    Args:
        shard: the packed shard.
        tensor: one of its tensors.
        files: pool that opens the files.
        coder: that of the folder.
        base: holds the values, for a mask.

    Raises:
        UserError: the packed file is damaged.
    """
    try:
        yield from prefetch(_jobs(shard, tensor, files, coder, base), THREADS)
    except UserError:
        raise
    except ValueError as error:
        damaged(shard.path, f"{quotable(tensor.name)}: {error}")


def mask_blocks(shard: PackedShard, tensor: StoredTensor, files: FilePool, coder: Zstd | None) -> Iterator[Bytes]:
    """The mask of an original tensor, block by block; arguments and errors are those of `words_of`."""
    if shard.layout.kind == "weights":
        yield from map(mask_of, words_of(shard, tensor, files, coder))
        return
    masks = shard.masks(files.reader(shard.path), tensor, coder) if shard.forms[tensor.name] == "sparse" else None
    for number, (_, count) in enumerate(shard.layout.blocks(tensor)):
        try:
            mask = np.full(mask_bytes(count), 255, dtype=np.uint8) if masks is None else masks(number)
            if masks is not None:
                ones_in(mask, count)
        except UserError:
            raise
        except ValueError as error:
            damaged(shard.path, f"{quotable(tensor.name)}: {error}")
        yield mask


def _jobs(
    shard: PackedShard, tensor: StoredTensor, files: FilePool, coder: Zstd | None, base: Checkpoint | None
) -> Iterator[Callable[[], Words]]:
    """Jobs that return the words of a tensor, one for each block; ValueError for unsound entries."""
    form, file = shard.forms[tensor.name], files.reader(shard.path)
    if base is not None:
        stored = base.tensors[tensor.name]
        base_file = files.reader(stored.shard)
        masks = shard.masks(file, tensor, coder) if form == "sparse" else None
        for number, (first, count) in enumerate(shard.layout.blocks(tensor)):
            yield partial(_masked, base_file, stored, first, count, None if masks is None else partial(masks, number))
    elif coder is not None:
        frames, size = Frames(shard, file, tensor), word_bytes(tensor)
        for number, (_, count) in enumerate(shard.layout.blocks(tensor)):
            decode = partial(coder.decode, count=count, dtype=tensor.dtype, size=size, sparse=form == "sparse")
            yield partial(_decoded, frames, number, decode)
    elif form == "sparse":
        yield from _sparse(shard, tensor, file)
    else:
        part = shard.part(tensor)
        for first, count in shard.layout.blocks(tensor):
            yield partial(read_words, file, part, first, count)


def _sparse(shard: PackedShard, tensor: StoredTensor, file: FileReader) -> Iterator[Callable[[], Words]]:
    """Jobs for a sparse tensor. The masks are read before the jobs run, because they decide where a block's values begin."""
    masks, values = shard.masks(file, tensor, None), shard.part(tensor, ".values")
    used = 0
    for number, (_, count) in enumerate(shard.layout.blocks(tensor)):
        mask = masks(number)
        kept = ones_in(mask, count)
        if used + kept > words_in(values):
            raise ValueError(f"its mask has more bits set than it has values, {words_in(values):,}")
        yield partial(_filled, file, values, used, kept, partial(put_zeros_in, mask, count=count))
        used += kept
    if used != words_in(values):
        raise ValueError(f"its mask has {used:,} bits set for {words_in(values):,} values")


def _masked(file: FileReader, stored: StoredTensor, first: int, count: int, mask: Callable[[], Any] | None) -> Words:
    words = read_words(file, stored, first, count)
    if mask is None:
        return words
    bits = mask()
    ones_in(bits, count)  # raises ValueError for an unsound mask
    return zero_out(bits, words)


def _decoded(frames: Frames, number: int, decode: Callable[..., Words]) -> Words:
    return decode(frames.read(number))


def _filled(file: FileReader, values: StoredTensor, first: int, count: int, fill: Callable[..., Words]) -> Words:
    return fill(values=read_words(file, values, first, count))
