"""Blocks of rows pruned in place, each row being one group: on the CPU, or on a GPU through pinned memory."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from emp_llm.checkpoint.block_scales import BlockScales
from emp_llm.checkpoint.matrix import as_tensor
from emp_llm.checkpoint.words import Words
from emp_llm.common.errors import reason
from emp_llm.common.memory import OutOfMemory, ran_out
from emp_llm.selection.arithmetic.definitions import NonFiniteError
from emp_llm.selection.available_kernels import has_numba, kernels_support
from emp_llm.selection.budgets import Budget
from emp_llm.selection.kernels.interface import RowFigures
from emp_llm.storage.buffers import Block, BufferPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)
_IN_FLIGHT = 3  # blocks on the GPU, or on their way there and back


@dataclass(frozen=True)
class RowRule:
    """The rule that decides the rows of one target.

    Attributes:
        dtype: of the weights ("BF16").
        criterion: its name.
        norms: float32, shape (columns,); None for criteria without norms.
        budget: sets the number of kept weights in each row.
        offset: number of target weights before this target.
        compiled: the run is large enough to load the compiled kernel, or to compile it.
        scores: for scores of whole matrices, computes those of a block from its first row and its weights; else None.
        scales: of FP8 weights; None for others.
    """

    dtype: str
    criterion: str
    norms: Block | None
    budget: Budget
    offset: int
    compiled: bool = True
    scores: "Callable[[int, Tensor], Tensor] | None" = None
    scales: BlockScales | None = None


@dataclass(frozen=True)
class PrunedBlock:
    """A block of rows after pruning.

    Attributes:
        first: number of its first row.
        words: the bits of the rows, in the memory of the input.
        figures: counts and sums of the rows, as arrays.
        weights: the rows as a tensor on the GPU that decided them; None on the CPU.
    """

    first: int
    words: Words
    figures: RowFigures
    weights: "Tensor | None" = None


class RowPruner(Protocol):
    """Prunes blocks of rows."""

    @property
    def buffers(self) -> BufferPool:
        """The pool for the memory of the blocks."""

    def prune(self, blocks: Iterable[tuple[int, Words]], rule: RowRule, back: bool = True) -> Iterator[PrunedBlock]:
        """Prune blocks in place, in order.

        Args:
            blocks: (first row, bits of the rows, shape (rows, columns)).
            rule: decides the rows.
            back: copy rows that a GPU pruned back to `words`; if false, only `weights` holds them.

        Raises:
            NonFiniteError: the scores of a block hold NaN or infinity; its arguments are (first row, bits).
        """


class CpuRowPruner:
    """Prunes on the CPU, by the compiled kernel or numpy if they support the rule, else by plain torch."""

    def __init__(self) -> None:
        self.buffers = BufferPool()

    def prune(self, blocks: Iterable[tuple[int, Words]], rule: RowRule, back: bool = True) -> Iterator[PrunedBlock]:
        for first, words in blocks:
            with naming_block(first, words):
                yield PrunedBlock(first, words, prune_block(first, words, rule))


class GpuRowPruner:
    """Prunes on a GPU. Several blocks are in flight at once, so that copies, kernel and disk work in parallel.

    Args:
        device: an NVIDIA GPU; with Triton's interpreter, the CPU.
        fallback: if the GPU fails, log a warning and continue on the CPU; else the failure is raised.
    """

    def __init__(self, device: "torch.device", fallback: bool = False) -> None:
        import torch

        self.device = device
        self._cuda = device.type == "cuda"
        self._fallback = fallback
        self._failed = False
        self.buffers = BufferPool(_pinned if self._cuda else None)
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._norms: tuple[Block | None, Tensor | None] = (None, None)

    def prune(self, blocks: Iterable[tuple[int, Words]], rule: RowRule, back: bool = True) -> Iterator[PrunedBlock]:
        if self._failed or not kernels_support(rule.dtype, rule.criterion, rule.budget):  # float64 weights
            yield from CpuRowPruner().prune(blocks, rule, back)
            return
        rest = iter(blocks)
        in_flight: deque[_BlockOnGpu] = deque()
        try:
            for first, words in rest:
                block = self._launch_or_fail(first, words, rule, back)
                if block is None:
                    while in_flight:
                        yield in_flight.popleft().finish()
                    yield from CpuRowPruner().prune(chain([(first, words)], rest), rule, back)
                    return
                in_flight.append(block)
                if len(in_flight) >= _IN_FLIGHT:
                    yield in_flight.popleft().finish()
            while in_flight:
                yield in_flight.popleft().finish()
        finally:
            for block in in_flight:  # after an error, the GPU still writes to their memory
                block.wait()

    def _launch_or_fail(self, first: int, words: Words, rule: RowRule, back: bool) -> "_BlockOnGpu | None":
        """As `_launch`; None if the GPU fails and the CPU shall continue. `words` are unchanged after a failure."""
        try:
            return self._launch(first, words, rule, self._norms_on_device(rule.norms), back)
        except Exception as error:  # out of memory; no C compiler for Triton; a driver that is too old for it
            if not self._fallback:
                if not ran_out(error):
                    raise
                raise OutOfMemory(
                    f"--mask-device cuda: out of memory on {self.device}. Free some of it, leave the option out, or give cpu."
                ) from error
            logger.warning("warning: masks are decided on the CPU, because %s fails (%s).", self.device, reason(error))
            self._failed = True
            return None

    def _launch(self, first: int, words: Words, rule: RowRule, norms: "Tensor | None", back: bool) -> "_BlockOnGpu":
        import torch

        from emp_llm.selection.kernels import cuda

        host = as_tensor(words, rule.dtype)
        with self._on_stream():
            weights = host.to(self.device, non_blocking=True)
            keep = rule.budget.keep_rule(words.shape, rule.offset + first * words.shape[1])
            results = cuda.enqueue(weights, norms, keep)
            copies = [torch.empty(part.shape, dtype=part.dtype, pin_memory=self._cuda) for part in results]
            for copy, part in zip(copies, results, strict=True):
                copy.copy_(part, non_blocking=True)
            event: Any = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]
            if back and weights is not host:  # last, because nothing may fail after it
                host.copy_(weights, non_blocking=True)
            if event is not None:
                event.record()
        return _BlockOnGpu(first, words, weights, copies, event)

    def _norms_on_device(self, norms: Block | None) -> "Tensor | None":
        import torch

        if norms is None:
            return None
        if self._norms[0] is not norms:
            self._norms = (norms, torch.from_numpy(norms).to(self.device))
        return self._norms[1]

    def _on_stream(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


@dataclass
class _BlockOnGpu:
    """A block that a GPU is pruning."""

    first: int
    words: Words
    weights: "Tensor"
    results: "list[Tensor]"  # flag, integers, floats, as `cuda.enqueue` returns them
    event: Any

    def wait(self) -> None:
        """Wait until the GPU no longer uses the memory of the block."""
        if self.event is not None:
            self.event.synchronize()

    def finish(self) -> PrunedBlock:
        """Wait for the block and its results."""
        self.wait()
        if self.event is not None:
            import torch

            # The caller uses the weights on its own stream. Their memory is not reused before that stream is done.
            self.weights.record_stream(torch.cuda.current_stream(self.weights.device))
        flag, integers, floats = self.results
        with naming_block(self.first, self.words):
            if int(flag):
                raise NonFiniteError("scores hold NaN or infinity")
        return PrunedBlock(self.first, self.words, RowFigures(*integers.numpy(), *floats.numpy()), self.weights)


def prune_block(first: int, words: Words, rule: RowRule) -> RowFigures:
    """Prune the block that begins with row `first` on the CPU, in place; returns arrays."""
    offset = rule.offset + first * words.shape[1]
    if rule.scales is not None and rule.scores is None:
        return _prune_scaled(first, words, rule, rule.scales)
    if words.size and kernels_support(rule.dtype, rule.criterion, rule.budget):
        norms = rule.norms if rule.criterion != "magnitude" else None
        keep = rule.budget.keep_rule(words.shape, offset)
        if rule.compiled and has_numba():
            from emp_llm.selection.kernels.cpu import prune_words

            return prune_words(words, rule.dtype, norms, keep)
        from emp_llm.selection.kernels.numpy_rows import prune_words_by_numpy

        return prune_words_by_numpy(words, rule.dtype, norms, keep)
    import torch

    from emp_llm.selection.row_pruning import apply_selection, prune_rows_plainly
    from emp_llm.selection.row_selection import select_rows

    weights = as_tensor(words, rule.dtype)
    if rule.scores is not None:
        figures = apply_selection(weights, select_rows(rule.scores(first, weights), rule.budget, offset))
    else:
        norm = None if rule.norms is None else torch.from_numpy(rule.norms)
        figures = prune_rows_plainly(weights, rule.criterion, norm, rule.budget, offset)
    return RowFigures(*(None if values is None else values.numpy() for values in figures))


def _prune_scaled(first: int, words: Words, rule: RowRule, scales: BlockScales) -> RowFigures:
    """As `prune_block`, for FP8: the values are pruned as float32, then the bits. No bits but 0 have the value +0.0."""
    values = scales.dequantised(first, as_tensor(words, rule.dtype)).numpy().view(np.uint32)
    figures = prune_block(first, values, replace(rule, dtype="F32", scales=None))
    words[values == 0] = 0
    return figures


@contextmanager
def naming_block(first: int, words: Words) -> Iterator[None]:
    """Add the block to a NonFiniteError: its arguments become (first row, bits of the rows)."""
    try:
        yield
    except NonFiniteError as error:
        error.args = (first, words)
        raise


def _pinned(size: int) -> Block:
    """Pinned memory. Ordinary memory if the system refuses to pin more; copies are then slower."""
    import torch

    try:
        memory: Block = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        memory = np.empty(size, np.uint8)
    return memory
