"""Moved weights: what an update made of each target, in a file for each block or in memory, read by
rows.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.checkpoint.files import write_bytes
from emp_llm.checkpoint.matrices import Words, torch_dtype
from emp_llm.common.errors import UserError, reason
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.records.run_report import FitRecord
from emp_llm.selection.rows import words_of
from emp_llm.selection.rule import RowFigures

_KEY = "emp_llm"


@dataclass
class Moved:
    """What an update made of a target.

    Attributes:
        weight: in the dtype in which it is stored, shape (outputs, inputs), on the CPU; None: the
            kept weights stay.
        record: tokens, damping and output errors.
        kept_mass: share of sum |W| of the dense weights in the kept ones, if a search chose the
            mask; else None.
    """

    weight: Tensor | None
    record: FitRecord
    kept_mass: float | None = None


def in_stored_dtype(weight: Tensor, target: Target) -> Tensor:
    """A float32 weight in the dtype in which its target is stored."""
    return in_dtype(weight, torch_dtype(target.matrix.stored.dtype))


def in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 weight in another dtype; values beyond its range become its largest."""
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return weight.clamp(-most, most).to(dtype)


class _About(msgspec.Struct):
    """What the header of a block's file says of a target."""

    record: FitRecord
    kept_mass: float | None


class MovedWeights:
    """The moved weights of a run.

    Args:
        folder: for one safetensors file a block, which appears when it is complete; created by the
            first `put`. None: the weights stay in memory.
        on_put: called with the number of a block when its file is complete.
    """

    def __init__(
        self, folder: Path | None = None, on_put: Callable[[int], None] | None = None
    ) -> None:
        self.folder = folder
        self._on_put = on_put
        # In memory: all of them, or the one whose file was read last.
        self._blocks: dict[int, dict[str, Moved]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None  # of the last block

    def has(self, block: int) -> bool:
        """Whether a block is finished."""
        return block in self._blocks or (self.folder is not None and self._path(block).is_file())

    def put(self, block: int, moved: dict[str, Moved]) -> None:
        """Keep what became of the targets of a block, by name; the first rank does."""
        if not ranks().main:
            return
        if self.folder is None:
            self._blocks[block] = moved
            return
        if self._thread is None:
            self._write(block, moved)
            return
        self._finish()
        self._writing = self._thread.submit(self._write, block, moved)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Inside this context, a thread writes each block while the next one is computed. At its
        end, all files are complete.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="emp-llm-moved") as self._thread:
            try:
                yield
                self._finish()
            finally:
                self._thread = self._writing = None

    def _finish(self) -> None:
        """Wait for the file of the last block."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, block: int, moved: dict[str, Moved]) -> None:
        weights = {
            name: of_target.weight.contiguous()
            for name, of_target in moved.items()
            if of_target.weight is not None
        }
        about = {
            name: _About(of_target.record, of_target.kept_mass) for name, of_target in moved.items()
        }
        write_bytes(self._path(block), save(weights, {_KEY: msgspec.json.encode(about).decode()}))
        if self._on_put is not None:
            self._on_put(block)

    def block(self, block: int) -> dict[str, Moved]:
        """What became of the targets of a finished block, by name. Weights of a file are read from
        it when they are used.

        Raises:
            UserError: its file cannot be read.
        """
        if block not in self._blocks:
            path = self._path(block)
            try:
                with safe_open(path, framework="pt") as file:
                    about = msgspec.json.decode(file.metadata()[_KEY], type=dict[str, _About])
                    weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
                raise UserError(
                    f"{path}: the fitted weights cannot be read ({reason(error)}). Delete "
                    f"{path.parents[1]}."
                ) from error
            moved = {
                name: Moved(weights.get(name), of_target.record, of_target.kept_mass)
                for name, of_target in about.items()
            }
            self._blocks = {block: moved}
        return self._blocks[block]

    def records(self) -> dict[str, FitRecord]:
        """The records of all targets, by name, in the order of the blocks."""
        blocks = list(self._blocks)
        if self.folder is not None:
            blocks = [
                int(path.stem.partition("-")[2])
                for path in sorted(self.folder.glob("block-*.safetensors"))
            ]
        return {name: moved.record for block in blocks for name, moved in self.block(block).items()}

    def weights(self) -> dict[str, Tensor]:
        """The weights that an update in memory moved, by the name of the target."""
        moved = {
            name: of_target for block in self._blocks.values() for name, of_target in block.items()
        }
        return {
            name: of_target.weight
            for name, of_target in moved.items()
            if of_target.weight is not None
        }

    def rows(self, target: Target, first: int, last: int) -> Tensor | None:
        """Rows first to last - 1 of a target in the dtype in which it is stored; None if its
        kept weights did not move.
        """
        block = target.layer.block
        if block is None or not self.has(block):
            return None
        moved = self.block(block).get(target.name)
        return None if moved is None or moved.weight is None else moved.weight[first:last]

    def replace(self, target: Target, first: int, words: Words, figures: RowFigures) -> RowFigures:
        """Put moved rows in the place of pruned rows.

        Args:
            target: of the rows. One whose kept weights did not move keeps its rows.
            first: number of the first row.
            words: the bits of the rows; they are overwritten.
            figures: of the pruned rows.

        Returns:
            The figures of the moved rows. Where a search chose the mask, scores are magnitudes, and
            the kept mass of a row is the matrix's share of the row's mass.
        """
        rows = self.rows(target, first, first + words.shape[0])
        if rows is None or target.layer.block is None:
            return figures
        words[:] = words_of(rows.contiguous())
        kept = np.count_nonzero(words, axis=1)
        figures = figures._replace(zeros=words.shape[1] - kept)
        share = self.block(target.layer.block)[target.name].kept_mass
        if share is None:
            return figures
        return figures._replace(kept=kept, kept_mass=share * figures.mass)

    def _path(self, block: int) -> Path:
        assert self.folder is not None
        return self.folder / f"block-{block:05d}.safetensors"
