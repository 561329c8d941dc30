"""The shards of a pruned checkpoint, written segment by segment, hashed while they are written, and noted in the journal."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.words import Words
from emp_llm.models.architecture import Target
from emp_llm.storage.background_work import BackgroundQueue, prefetch
from emp_llm.storage.buffers import Block, BufferPool, bytes_of
from emp_llm.storage.direct_io import FileWriter
from emp_llm.storage.file_pool import FilePool
from emp_llm.storage.output.journal import Journal

_COPIED = 1 << 22  # bytes copied at a time
BytesReadCallback = Callable[[Path, int, memoryview], None]


@dataclass(frozen=True)
class Segment:
    """Bytes start to end - 1 of a shard: one target, or bytes to copy."""

    shard: Path
    start: int
    end: int
    target: Target | None

    @property
    def bytes(self) -> int:
        return self.end - self.start


def segments_of(checkpoint: Checkpoint, targets: list[Target], in_order: bool) -> list[Segment]:
    """The segments of all shards in the order of writing.

    This is the order of their bytes. With `in_order`, all copies come first, then the targets in their order, so that ties in a
    group of all targets are kept in this order regardless of the shards.
    """
    copies, segments = [], []
    for shard in checkpoint.shards:
        position = 0
        own = [target for target in targets if target.matrix.stored.shard == shard]
        for target in sorted(own, key=lambda target: target.matrix.start):
            start, end = target.matrix.start, target.matrix.end
            copies.append(Segment(shard, position, start, None))
            segments += [copies[-1], Segment(shard, start, end, target)]
            position = end
        copies.append(Segment(shard, position, shard.stat().st_size, None))
        segments.append(copies[-1])
    if not in_order:
        return segments
    return copies + [Segment(t.matrix.stored.shard, t.matrix.start, t.matrix.end, t) for t in targets]


class ShardWriter(ExitStack):
    """Writes the shards of a folder in a thread. Use it as a context; at its end, everything is on disk.

    Args:
        folder: the output.
        journal: records the progress.
        buffers: the pool for the memory of blocks.
        again: the source is read more than once.
        on_read: called with file, offset and content of all bytes that are read for copying.
    """

    def __init__(self, folder: Path, journal: Journal, buffers: BufferPool, again: bool, on_read: BytesReadCallback) -> None:
        super().__init__()
        self._folder = folder
        self._journal = journal
        self._buffers = buffers
        self._again = again
        self._on_read = on_read

    def __enter__(self) -> "ShardWriter":
        super().__enter__()
        self.files = self.enter_context(FilePool(self._again))
        self.enter_context(self._journal.keeping(self.files))
        self._queue = self.enter_context(BackgroundQueue())
        return self

    def copy(self, number: int, segment: Segment) -> None:
        """Copy the unfinished part of a segment."""
        reader, start = self.files.reader(segment.shard), segment.start + self._journal.done(number, segment.bytes)

        def read(first: int, last: int) -> tuple[int, Block]:
            block = self._buffers.take((1, last - first), np.uint8, first)
            reader.read(bytes_of(block), first)
            self._on_read(segment.shard, first, bytes_of(block))
            return first, block

        def write(first: int, block: Block) -> None:
            with self._hashed(segment, first, block) as file:
                file.write(bytes_of(block), first)
            self._journal.reached(number, first + block.size - segment.start)

        starts = range(start, segment.end, _COPIED)
        for first, block in prefetch(partial(read, first, min(first + _COPIED, segment.end)) for first in starts):
            self._queue.do(write, first, block)

    def rows(self, number: int, segment: Segment, first: int, block: Words, row: int, statistics: Mapping[str, Block]) -> None:
        """Write some rows of a segment's target.

        Args:
            number: index of the segment.
            first: the first of the rows.
            block: their bits, shape (rows, inputs), from the buffers.
            row: index of the first one among the rows of all targets.
            statistics: of all rows of the target.
        """
        self._queue.do(self._rows, number, segment, first, block, row, statistics)

    def end(self, number: int, segment: Segment, last: bool) -> None:
        """Note that a segment is written and its bytes are final; `last`: its shard is complete."""
        self._queue.do(self._journal.reached, number + 1, 0)
        self._queue.do(self._journal.final, self._folder / segment.shard.name, segment.start, segment.end, last)

    def note(self, row: int, statistics: Mapping[str, Block]) -> None:
        """Save the statistics of some rows."""
        self._queue.do(self._journal.put, row, statistics)

    def _rows(self, number: int, segment: Segment, first: int, block: Words, row: int, statistics: Mapping[str, Block]) -> None:
        assert segment.target is not None
        matrix, last = segment.target.matrix, first + block.shape[0]
        at = None if matrix.transposed else matrix.start + first * matrix.columns * matrix.itemsize
        with self._hashed(segment, at, block) as file:
            matrix.write(file, first, block)
        self._journal.put(row, {name: values[first:last] for name, values in statistics.items()})
        if last < matrix.rows:  # `end` notes the last rows, after the figures of the whole matrix are saved
            self._journal.reached(number, last)

    @contextmanager
    def _hashed(self, segment: Segment, at: int | None, block: Block) -> Iterator[FileWriter]:
        """Yield the file to write a block to. A contiguous block is hashed during the write; then its memory is returned."""
        path = self._folder / segment.shard.name
        digest = None if at is None else self._journal.hash(path, at, bytes_of(block))
        yield self.files.writer(path)
        if digest is not None:
            digest.result()
        self._buffers.give(block)
