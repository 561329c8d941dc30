"""A stream of bytes, written to a file in large blocks of whole pages."""

import numpy as np

from emp_llm.storage.background_work import BackgroundQueue
from emp_llm.storage.buffers import PAGE, Block, BufferPool, bytes_of
from emp_llm.storage.direct_io import FileWriter

_COLLECTED = 1 << 22  # bytes of one write


class StreamWriter:
    """Collects pieces of bytes and writes them in order.

    Args:
        file: the file.
        offset: position of the first byte in the file.
        buffers: memory for the blocks.
        queue: writes the blocks.
    """

    def __init__(self, file: FileWriter, offset: int, buffers: BufferPool, queue: BackgroundQueue) -> None:
        self._file, self._buffers, self._queue = file, buffers, queue
        self._offset = offset  # of the current block
        self._block: Block | None = None
        self._filled = 0

    def write(self, piece: memoryview) -> None:
        """Copy bytes, so that the caller may change them. After `close`, all are written once `queue` is done."""
        while piece:
            if self._block is None:
                self._block = self._buffers.take((1, _COLLECTED - self._offset % PAGE), np.uint8, self._offset)
            room = bytes_of(self._block)[self._filled :]
            taken = min(len(room), len(piece))
            room[:taken] = piece[:taken]
            self._filled += taken
            piece = piece[taken:]
            if taken == len(room):
                self.close()

    def close(self) -> None:
        """Queue the last block."""
        if self._block is not None:
            self._queue.do(self._put, self._block, self._filled, self._offset)
            self._offset += self._filled
            self._block, self._filled = None, 0

    def _put(self, block: Block, size: int, offset: int) -> None:
        self._file.write(bytes_of(block)[:size], offset)
        self._buffers.give(block)
