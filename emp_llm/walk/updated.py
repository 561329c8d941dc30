"""Moved weights: what an update made of each target, in a file for each block or in memory, read by
rows.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.checkpoint.files import (
    is_intact,
    keep_only,
    read_own,
    remove,
    warn_of_damage,
    write_bytes,
    write_own,
)
from emp_llm.checkpoint.matrices import Words, torch_dtype
from emp_llm.common.errors import ReadError, UserError, quotable, reason
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.records.run_report import FitRecord
from emp_llm.selection.rows import words_of
from emp_llm.selection.rule import RowFigures

_KEY = "emp_llm"
_DAMAGE = (SafetensorError, OSError, LookupError, TypeError, ValueError, msgspec.MsgspecError)
_RECORD = "blocks.json"  # the hashes of the files of the blocks
_File = Annotated[str, msgspec.Meta(pattern=r"^block-[0-9]{5}\.safetensors\Z")]


@dataclass
class Updated:
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


def round_to_stored(weight: Tensor, target: Target) -> Tensor:
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


class UpdatedWeights:
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
        self._hashes: dict[str, str] = {}  # of the files
        if folder is not None and ranks().main:
            self._hashes = read_own(self.record, dict[_File, str]) or {}
            keep_only(folder, {_RECORD, *self._hashes})
        self._on_put = on_put
        # In memory: all of them, or the one whose file was read last.
        self._blocks: dict[int, dict[str, Updated]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None  # of the last block

    @property
    def record(self) -> Path:
        """The file with the hashes of the others."""
        assert self.folder is not None
        return self.folder / _RECORD

    def are_intact(self, targets: Sequence[Target]) -> bool:
        """Whether all files are as they were written, and of some targets; one that is not is
        deleted, with a warning.
        """
        by_name = {(target.layer.block, target.name): target for target in targets}

        def check(block: int, updated: dict[str, Updated]) -> None:
            for name, of_target in updated.items():
                _check_fit(by_name[block, name], of_target.weight)

        blocks = [_number(name) for name in self._hashes]
        return all(self._whole(block, partial(check, block)) is not None for block in blocks)

    def resume(
        self,
        block: int,
        targets: Sequence[Target],
        removed_of: Callable[[Target], Tensor] | None = None,
    ) -> dict[str, Updated] | None:
        """What an interrupted run made of the targets of a block, by name; None if it did not
        finish them, or, with a warning, if the file is damaged or of other targets.

        Args:
            removed_of: returns which weights of a target are zero, bool, shape (outputs, inputs);
                None: a search chose them.
        """

        def check(updated: dict[str, Updated]) -> None:
            for target in targets:
                weight = updated[target.name].weight
                _check_fit(target, weight)
                removed = removed_of and removed_of(target).cpu()
                if weight is not None and removed is not None and weight.float()[removed].any():
                    raise ValueError(f"{target.name} has other zeros")

        return self._whole(block, check) if _name(block) in self._hashes else None

    def _whole(
        self, block: int, check: Callable[[dict[str, Updated]], None]
    ) -> dict[str, Updated] | None:
        """What became of the targets of a finished block; None, with a warning, if its file is
        damaged or fails a check. It is deleted then.
        """
        name = _name(block)
        try:
            updated = self._read(block)
            check(updated)
        except ReadError:
            raise
        except _DAMAGE as error:
            warn_of_damage(self.record.with_name(name), quotable(reason(error)))
            self._drop(name)
            return None
        return updated

    def _drop(self, name: str) -> None:
        """Delete the file of a block, which is computed again."""
        self._blocks = {}
        del self._hashes[name]
        remove(self.record.with_name(name))

    def put(self, block: int, updated: dict[str, Updated]) -> None:
        """Keep what became of the targets of a block, by name; the first rank does."""
        if not ranks().main:
            return
        if self.folder is None:
            self._blocks[block] = updated
            return
        if self._thread is None:
            self._write(block, updated)
            return
        self._finish()
        self._writing = self._thread.submit(self._write, block, updated)

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

    def _write(self, block: int, updated: dict[str, Updated]) -> None:
        weights = {
            name: of_target.weight.contiguous()
            for name, of_target in updated.items()
            if of_target.weight is not None
        }
        about = {
            name: _About(of_target.record, of_target.kept_mass)
            for name, of_target in updated.items()
        }
        content = save(weights, {_KEY: msgspec.json.encode(about).decode()})
        write_bytes(self.record.with_name(_name(block)), content)
        self._hashes[_name(block)] = str(blake3(content).hexdigest())
        write_own(self.record, dict(self._hashes))
        if self._on_put is not None:
            self._on_put(block)

    def block(self, block: int) -> dict[str, Updated]:
        """What became of the targets of a finished block, by name. Weights of a file are read from
        it when they are used.

        Raises:
            UserError: its file cannot be read.
        """
        try:
            return self._read(block)
        except ReadError:
            raise
        except _DAMAGE as error:
            raise UserError(
                f"{self.record.with_name(_name(block))} is damaged ({quotable(reason(error))}). "
                "The same command computes these weights again."
            ) from error

    def _read(self, block: int) -> dict[str, Updated]:
        """`block`, with the errors of `_DAMAGE`."""
        if block not in self._blocks:
            path = self.record.with_name(_name(block))
            if not is_intact(path, self._hashes.get(path.name)):
                raise ValueError("its hash differs")
            with safe_open(path, framework="pt") as file:
                about = msgspec.json.decode(file.metadata()[_KEY], type=dict[str, _About])
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            updated = {
                name: Updated(weights.get(name), of_target.record, of_target.kept_mass)
                for name, of_target in about.items()
            }
            self._blocks = {block: updated}
        return self._blocks[block]

    def records(self) -> dict[str, FitRecord]:
        """The records of all targets, by name, in the order of the blocks."""
        blocks = list(self._blocks)
        if self.folder is not None:
            blocks = [_number(name) for name in sorted(self._hashes)]
        return {
            name: updated.record for block in blocks for name, updated in self.block(block).items()
        }

    def weights(self) -> dict[str, Tensor]:
        """The weights that an update in memory moved, by the name of the target."""
        updated = {
            name: of_target for block in self._blocks.values() for name, of_target in block.items()
        }
        return {
            name: of_target.weight
            for name, of_target in updated.items()
            if of_target.weight is not None
        }

    def rows(self, target: Target, first: int, last: int) -> Tensor | None:
        """Rows first to last - 1 of a target in the dtype in which it is stored; None if its
        kept weights did not move.
        """
        block = target.layer.block
        if block is None or (block not in self._blocks and _name(block) not in self._hashes):
            return None
        updated = self.block(block).get(target.name)
        return None if updated is None or updated.weight is None else updated.weight[first:last]

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


def _name(block: int) -> str:
    """The file of a block."""
    return f"block-{block:05d}.safetensors"


def _number(name: str) -> int:
    """The block of a file."""
    return int(name[6:11])


def _check_fit(target: Target, weight: Tensor | None) -> None:
    """Raise ValueError unless a weight, if it moved, has the shape and the dtype of a target."""
    if weight is None:
        return
    dtype = torch_dtype(target.matrix.stored.dtype)
    if weight.shape != (target.matrix.rows, target.matrix.columns) or weight.dtype != dtype:
        raise ValueError(f"{target.name} has another shape or dtype")
