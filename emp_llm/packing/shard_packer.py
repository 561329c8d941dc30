"""Packs one shard, block by block. `packed_format` describes the format."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emp_llm.checkpoint.safetensors_header import BITS, StoredTensor
from emp_llm.checkpoint.words import WORD, Words, mask_bytes, packed_bytes, read_words, word_bytes, words_in
from emp_llm.packing.bits import mask_of, nonzero_words
from emp_llm.packing.packed_format import Form, PackLayout
from emp_llm.packing.zstd_codec import Zstd
from emp_llm.storage.background_work import BackgroundQueue, prefetch
from emp_llm.storage.buffers import Block, BufferPool, bytes_of
from emp_llm.storage.file_pool import FilePool
from emp_llm.storage.hashing import FileHasher
from emp_llm.storage.stream import StreamWriter

THREADS = min(4, os.cpu_count() or 1)
_GUESSED = 1 << 16  # the first words of a tensor, from which its form is guessed


class ShardPacker:
    """Packs one shard.

    The number of zeros decides a tensor's form, and it is known only at the tensor's end. So a tensor is written in the form
    that its first words suggest, and written again if that was wrong. This is rare, and cheaper than reading everything twice.

    Args:
        layout: of the packed folder.
        coder: for zstd; None: raw.
        tensors: those of the shard.
        shard: the file; only read.
        digests: hashes the shard while it is packed.
        bar: progress, in bytes.
    """

    def __init__(
        self,
        layout: PackLayout,
        coder: Zstd | None,
        tensors: list[StoredTensor],
        shard: Path,
        digests: FileHasher,
        bar: Any,
    ) -> None:
        self.layout, self.coder, self.shard = layout, coder, shard
        self.digests, self.bar = digests, bar
        # Larger numbers first, so that each tensor begins at a multiple of the size of its own numbers.
        self.tensors = sorted(tensors, key=lambda tensor: (-word_bytes(tensor), tensor.start, tensor.end))
        self._names = {tensor.name for tensor in tensors}
        self._parts: dict[str, dict[str, Any]] = {}  # as in the header
        self._position = self._base = 0
        self._buffers = BufferPool()

    def write(self, path: Path) -> list[Form]:
        """Write the packed shard to a file.

        The header is known only at the end, and then fills the space that was reserved for it at the beginning.

        Returns:
            The form of each tensor.
        """
        self._base = self._position = len(self._header(self._largest()))
        forms = []
        self.digests.advance(self.shard, 0, min((tensor.start for tensor in self.tensors), default=0))
        with FilePool() as files:
            self._source, self._packed = files.reader(self.shard), files.writer(path)
            with BackgroundQueue() as self._queue:
                for tensor in self.tensors:
                    forms.append(self._pack(tensor))
                    self.bar.update(tensor.end - tensor.start)
            header = self._header(self._parts)[8:].ljust(self._base - 8)
            self._packed.write(memoryview(bytearray(len(header).to_bytes(8, "little") + header)), 0)
        os.truncate(path, self._position)
        return forms

    def _pack(self, tensor: StoredTensor) -> Form:
        start = self._position
        first = read_words(self._source, tensor, 0, min(_GUESSED, words_in(tensor)))
        form = self._form(tensor, first.size, first.size - int(np.count_nonzero(first)))
        right = self._form(tensor, words_in(tensor), self._write(tensor, form))
        if right != form:
            for name in self.layout.parts(tensor, form):
                del self._parts[name]
            self._position = start
            self._write(tensor, right)
        return right

    def _form(self, tensor: StoredTensor, words: int, zeros: int) -> Form:
        """The form for a tensor of which `words` words hold `zeros` zeros."""
        if self.layout.kind == "mask":
            return "sparse" if zeros else "base"
        pays = packed_bytes(words, word_bytes(tensor), zeros) < words * word_bytes(tensor) and BITS[tensor.dtype] >= 8
        taken = {f"{tensor.name}{suffix}" for suffix in (".mask", ".values")} & self._names
        return "sparse" if pays and not taken else "dense"

    def _write(self, tensor: StoredTensor, form: Form) -> int:
        """Write a tensor in a form; returns the number of its zeros."""
        if form == "base" or self.coder is None:
            return self._write_raw(tensor, form)
        coder, sizes, total, zeros, stream = self.coder, [], 0, 0, self._stream(0)
        encode = partial(coder.encode, dtype=tensor.dtype, sparse=form == "sparse", values=self.layout.kind == "weights")
        for ones, count, frames in self._each_block(tensor, lambda words: (np.count_nonzero(words), words.size, encode(words))):
            zeros += count - int(ones)
            sizes.append([len(frame) for frame in frames])
            for frame in frames:
                stream.write(memoryview(frame))
                total += len(frame)
        stream.write(memoryview(bytes(-total % 8)))
        stream.write(memoryview(np.array(sizes, dtype="<u4").tobytes()))
        stream.close()
        self._add_parts(tensor, form, total + -total % 8)
        return zeros

    def _write_raw(self, tensor: StoredTensor, form: Form) -> int:
        words, kept = words_in(tensor), 0
        masks, values = self._stream(0), self._stream(mask_bytes(words) if form == "sparse" else 0)
        wanted = self.layout.kind == "weights"
        for mask, numbers, ones in self._each_block(tensor, partial(_split, form=form, values=wanted)):
            if mask is not None:
                masks.write(mask.data)
            if numbers is not None:
                values.write(numbers.view(np.uint8).data)
            kept += ones
        masks.close()
        values.close()
        self._add_parts(tensor, form, kept)
        return words - kept

    def _each_block(self, tensor: StoredTensor, work: Callable[[Words], Any]) -> Iterator[Any]:
        """The result of `work` for each block of a tensor. A block that comes next in the shard is hashed at the same time."""
        size = word_bytes(tensor)

        def job(first: int, count: int) -> tuple[int, Block, Any]:
            at = tensor.start + first * size
            block = self._buffers.take((1, count * size), np.uint8, at)
            self._source.read(bytes_of(block), at)
            return at, block, work(np.frombuffer(bytes_of(block), dtype=WORD[size]))

        for at, block, done in prefetch((partial(job, *part) for part in self.layout.blocks(tensor)), THREADS):
            digest = self.digests.add(self.shard, at, bytes_of(block))
            yield done
            if digest is not None:
                digest.result()
            self._buffers.give(block)

    def _stream(self, offset: int) -> StreamWriter:
        """A stream for a part of the tensor that is being packed."""
        return StreamWriter(self._packed, self._position + offset, self._buffers, self._queue)

    def _add_parts(self, tensor: StoredTensor, form: Form, length: int) -> None:
        """Add the parts of a written tensor to the header and move past them. `length`: the one that the layout leaves open."""
        for name, (dtype, shape) in self.layout.parts(tensor, form).items():
            known = [length if side is None else side for side in shape]
            end = self._position + _bytes(known, dtype)
            self._parts[name] = {
                "dtype": dtype,
                "shape": known,
                "data_offsets": [self._position - self._base, end - self._base],
            }
            self._position = end

    def _header(self, parts: dict[str, dict[str, Any]]) -> bytes:
        raw = json.dumps({"__metadata__": {"format": "pt"}} | parts, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        raw = raw.ljust(-(-len(raw) // 8) * 8)
        return len(raw).to_bytes(8, "little") + raw

    def _largest(self) -> dict[str, dict[str, Any]]:
        """Parts whose header is at least as long as the final one."""
        most = 10 ** len(str(4 * self.shard.stat().st_size)) - 1
        return {
            f"{tensor.name}{suffix}": {
                "dtype": tensor.dtype,
                "shape": [*tensor.shape, most, most],
                "data_offsets": [most, most],
            }
            for tensor in self.tensors
            for suffix in (".values", ".frames")
        }


def _split(words: Any, form: Form, values: bool) -> tuple[Any, Any, int]:
    """The mask and the values of a block, None for those that its form lacks, and the number of its words that are not zero."""
    if form == "sparse":
        kept = nonzero_words(words) if values else None
        return mask_of(words), kept, int(np.count_nonzero(words)) if kept is None else kept.size
    return None, words if form == "dense" else None, int(np.count_nonzero(words))


def _bytes(shape: list[int], dtype: str) -> int:
    numbers = 1
    for side in shape:
        numbers *= side
    return numbers * BITS[dtype] // 8
