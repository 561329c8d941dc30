"""The shards of a pruned checkpoint as they are written: piece after piece, hashed meanwhile, and noted in the journal."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.direct import Buffers, Sink, bytes_of
from emp_llm.models.files import Behind, OpenFiles, ahead
from emp_llm.models.journal import Journal
from emp_llm.models.targets import Target

_COPIED = 1 << 22  # bytes of a copy in memory at a time


@dataclass(frozen=True)
class Segment:
    """Bytes start to end - 1 of a shard: one target, or bytes to be copied."""

    shard: Path
    start: int
    end: int
    target: Target | None

    @property
    def bytes(self) -> int:
        return self.end - self.start


def segments_of(checkpoint: Checkpoint, targets: list[Target], in_order: bool) -> list[Segment]:
    """The pieces of all shards in the order in which they are written.

    That is the order of their bytes; for `in_order`, all copies and then the targets as they come, so that ties of one group
    of all targets are spent in their order, whatever shards they lie in.
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


class Writer(ExitStack):
    """Writes the shards of a folder by a thread, behind the work; to be used as a context, after which all is on the disk.

    Args:
        folder: where.
        journal: where it is noted how far the writing has come.
        buffers: where the memory of what is written comes from and goes to.
        again: what is read is read more than once.
    """

    def __init__(self, folder: Path, journal: Journal, buffers: Buffers, again: bool = False) -> None:
        super().__init__()
        self._folder = folder
        self._journal = journal
        self._buffers = buffers
        self._again = again

    def __enter__(self) -> "Writer":
        super().__enter__()
        self.files = self.enter_context(OpenFiles(self._again))
        self.enter_context(self._journal.keeping(self.files))
        self._behind = self.enter_context(Behind())
        return self

    def copy(self, number: int, segment: Segment) -> None:
        """Copy what is not finished of the n-th segment."""
        here, start = self.files.reading(segment.shard), segment.start + self._journal.done(number, segment.bytes)

        def reading(first: int, last: int) -> tuple[int, Tensor]:
            block = self._buffers.take((1, last - first), torch.uint8, first)
            here.read(bytes_of(block), first)
            return first, block

        def write(first: int, block: Tensor) -> None:
            with self._hashed(segment, first, block) as there:
                there.write(bytes_of(block), first)
            self._journal.reached(number, first + block.numel() - segment.start)

        starts = range(start, segment.end, _COPIED)
        for first, block in ahead(partial(reading, first, min(first + _COPIED, segment.end)) for first in starts):
            self._behind.do(write, first, block)

    def rows(self, number: int, segment: Segment, first: int, block: Tensor, row: int, statistics: dict[str, Tensor]) -> None:
        """Write some rows of the target of the n-th segment.

        Args:
            first: the first of them.
            block: shape (rows, inputs), from the buffers.
            row: the first one's number among the rows of all targets.
            statistics: what became of all rows of the target.
        """
        self._behind.do(self._rows, number, segment, first, block, row, statistics)

    def end(self, number: int, segment: Segment, last: bool) -> None:
        """The n-th segment is written, and none of its bytes will change; it completes its shard, where it is the `last`."""
        self._behind.do(self._journal.reached, number + 1, 0)
        self._behind.do(self._journal.final, self._folder / segment.shard.name, segment.start, segment.end, last)

    def note(self, row: int, statistics: dict[str, Tensor]) -> None:
        """Keep what became of some rows."""
        self._behind.do(self._journal.put, row, statistics)

    def _rows(self, number: int, segment: Segment, first: int, block: Tensor, row: int, statistics: dict[str, Tensor]) -> None:
        assert segment.target is not None
        matrix, last = segment.target.matrix, first + block.shape[0]
        at = None if matrix.transposed else matrix.start + first * matrix.columns * matrix.dtype.itemsize
        with self._hashed(segment, at, block) as there:
            matrix.write(there, first, block)
        self._journal.put(row, {name: values[first:last] for name, values in statistics.items()})
        if last < matrix.rows:  # the last ones count from `end` on, when what became of the matrix is noted as well
            self._journal.reached(number, last)

    @contextmanager
    def _hashed(self, segment: Segment, at: int | None, block: Tensor) -> Iterator[Sink]:
        """The file to write a block to; meanwhile its digest is taken, if it lies there in one piece; then it is given back."""
        path = self._folder / segment.shard.name
        digest = None if at is None else self._journal.hash(path, at, bytes_of(block))
        yield self.files.writing(path)
        if digest is not None:
            digest.result()
        self._buffers.give(block)
