"""Fitted weights by rows, in place of the pruned rows of a checkpoint or of a model in memory."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from emp_llm.checkpoint.words import WORD, Words
from emp_llm.selection.kernels.interface import RowFigures

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class FittedRows:
    """The fitted weights of some targets.

    Args:
        weights: by the name of the target, shape (outputs, inputs), on the CPU: tensors, or slices of files.
        kept_mass: by the name of the target, the share of sum |W| in the kept weights, if the fit chose the masks; the
            figures of the rows then follow from the fitted weights. None: it did not.
    """

    def __init__(self, weights: Mapping[str, Any], kept_mass: Mapping[str, float] | None) -> None:
        self._weights = weights
        self._kept_mass = kept_mass

    def replace(self, target: str, first: int, words: Words, figures: RowFigures) -> RowFigures:
        """Put the fitted rows in the place of a block of pruned rows, in memory.

        Args:
            target: its name.
            first: number of the first row.
            words: the bits of the rows; they are overwritten. A target without a fit keeps them.
            figures: of the pruned rows.

        Returns:
            The figures of the fitted rows. Where the fit chose the mask, scores are magnitudes, and the kept mass of a row is
            the matrix's share of the row's mass.
        """
        weight = self._weights.get(target)
        if weight is None:
            return figures
        rows = weight[first : first + words.shape[0]].contiguous()
        words[:] = rows.view(_INTEGER[rows.element_size()]).numpy().view(WORD[rows.element_size()])
        kept = np.count_nonzero(words, axis=1)
        changed = figures._replace(zeros=words.shape[1] - kept)
        if self._kept_mass is None:
            return changed
        return changed._replace(kept=kept, kept_mass=self._kept_mass[target] * figures.mass)


class FittedFileRows(FittedRows):
    """The fitted weights in some files. Use it as a context.

    Args:
        paths: of the files; each holds some targets.
        kept_mass: as for `FittedRows`.
    """

    def __init__(self, paths: list[Path], kept_mass: Mapping[str, float] | None) -> None:
        self._paths = paths
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}
        super().__init__(self._slices, kept_mass)

    def __enter__(self) -> "FittedFileRows":
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._slices.clear()
        self._stack.close()
