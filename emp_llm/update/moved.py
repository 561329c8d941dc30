"""Moved weights: what an update made of each target, in a file for each block or in memory. They are read by rows."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.checkpoint.files import write_bytes
from emp_llm.checkpoint.matrices import WORD, Words
from emp_llm.common.errors import UserError, reason
from emp_llm.models.architecture import Target
from emp_llm.records.run_report import FitRecord
from emp_llm.selection.rule import RowFigures

_KEY = "emp_llm"
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Moved:
    """What an update made of a target.

    Attributes:
        weight: in the dtype in which it is stored, shape (outputs, inputs), on the CPU; None: the kept weights stay.
        record: tokens, damping and output errors.
        kept_mass: share of sum |W| of the dense weights in the kept ones, if a search chose the mask; else None.
    """

    weight: Tensor | None
    record: FitRecord
    kept_mass: float | None = None


class _About(msgspec.Struct):
    """What the header of a block's file says of a target."""

    record: FitRecord
    kept_mass: float | None


class _BlockFile:
    """The file of a block, open."""

    def __init__(self, path: Path) -> None:
        try:
            weights: Any = safe_open(path, framework="pt")
            self.about = msgspec.json.decode(weights.metadata()[_KEY], type=dict[str, _About])
        except (SafetensorError, OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
            raise UserError(
                f"{path}: the fitted weights cannot be read ({reason(error)}). Delete {path.parents[1]}."
            ) from error
        self.weights, self.names = weights, frozenset(weights.keys())


class MovedWeights:
    """The moved weights of a run.

    Args:
        folder: for one safetensors file a block, which appears when it is complete; created by the first `put`. None: the
            weights stay in memory.
        on_put: called with the number of a block when its file is complete.
    """

    def __init__(self, folder: Path | None = None, on_put: Callable[[int], None] | None = None) -> None:
        self.folder = folder
        self._on_put = on_put
        self._held: dict[int, dict[str, Moved]] = {}  # in memory
        self._open: tuple[int, _BlockFile] | None = None  # the block that was read last

    def has(self, block: int) -> bool:
        """Whether a block is finished."""
        return block in self._held or (self.folder is not None and self._path(block).is_file())

    def put(self, block: int, moved: dict[str, Moved]) -> None:
        """Keep what became of the targets of a block, by name."""
        if self.folder is None:
            self._held[block] = moved
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = {name: each.weight.contiguous() for name, each in moved.items() if each.weight is not None}
        about = {name: _About(each.record, each.kept_mass) for name, each in moved.items()}
        write_bytes(self._path(block), save(weights, {_KEY: msgspec.json.encode(about).decode()}))
        if self._on_put is not None:
            self._on_put(block)

    def block(self, block: int) -> dict[str, Moved]:
        """What became of the targets of a finished block, by name.

        Raises:
            UserError: its file cannot be read.
        """
        if self.folder is None:
            return self._held[block]
        file, moved = self._file(block), {}
        for name, about in file.about.items():
            weight = file.weights.get_tensor(name) if name in file.names else None
            moved[name] = Moved(weight, about.record, about.kept_mass)
        return moved

    def records(self) -> dict[str, FitRecord]:
        """The records of all targets, by name, in the order of the blocks."""
        if self.folder is None:
            return {name: each.record for moved in self._held.values() for name, each in moved.items()}
        blocks = [int(path.stem.partition("-")[2]) for path in sorted(self.folder.glob("block-*.safetensors"))]
        return {name: about.record for block in blocks for name, about in self._file(block).about.items()}

    def weights(self) -> dict[str, Tensor]:
        """The weights that an update in memory moved, by the name of the target."""
        moved = [(name, each.weight) for block in self._held.values() for name, each in block.items()]
        return {name: weight for name, weight in moved if weight is not None}

    def rows(self, target: Target, first: int, last: int) -> Tensor | None:
        """Rows first to last - 1 of a target in the dtype in which it is stored; None if its kept weights did not move."""
        block = target.layer.block
        if block is None or not self.has(block):
            return None
        if self.folder is None:
            moved = self._held[block].get(target.name)
            return None if moved is None or moved.weight is None else moved.weight[first:last]
        file = self._file(block)
        rows: Tensor | None = file.weights.get_slice(target.name)[first:last] if target.name in file.names else None
        return rows

    def replace(self, target: Target, first: int, words: Words, figures: RowFigures) -> RowFigures:
        """Put the moved rows in the place of pruned rows, in memory.

        Args:
            target: of the rows. One whose kept weights did not move keeps its rows.
            first: number of the first row.
            words: the bits of the rows; they are overwritten.
            figures: of the pruned rows.

        Returns:
            The figures of the moved rows. Where a search chose the mask, scores are magnitudes, and the kept mass of a row is
            the matrix's share of the row's mass.
        """
        rows = self.rows(target, first, first + words.shape[0])
        if rows is None or target.layer.block is None:
            return figures
        words[:] = rows.contiguous().view(_INTEGER[rows.element_size()]).numpy().view(WORD[rows.element_size()])
        kept = np.count_nonzero(words, axis=1)
        changed = figures._replace(zeros=words.shape[1] - kept)
        held = self._held if self.folder is None else {target.layer.block: self._file(target.layer.block).about}
        share = held[target.layer.block][target.name].kept_mass
        return changed if share is None else changed._replace(kept=kept, kept_mass=share * figures.mass)

    def _path(self, block: int) -> Path:
        assert self.folder is not None
        return self.folder / f"block-{block:05d}.safetensors"

    def _file(self, block: int) -> _BlockFile:
        if self._open is None or self._open[0] != block:
            self._open = block, _BlockFile(self._path(block))
        return self._open[1]
