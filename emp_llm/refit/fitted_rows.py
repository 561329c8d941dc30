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
        chosen: the fit chose the masks, so that the figures of the rows follow from the fitted weights.
    """

    def __init__(self, weights: Mapping[str, Any], chosen: bool) -> None:
        self._weights = weights
        self._chosen = chosen

    def replace(self, target: str, first: int, words: Words, figures: RowFigures) -> RowFigures:
        """Put the fitted rows in the place of a block of pruned rows, in memory.

        Args:
            target: its name.
            first: number of the first row.
            words: the bits of the rows; they are overwritten. A target without a fit keeps them.
            figures: of the pruned rows.

        Returns:
            The figures of the fitted rows. Where the fit chose the mask, N_eff and masses stay those of the magnitudes.
        """
        weight = self._weights.get(target)
        if weight is None:
            return figures
        rows = weight[first : first + words.shape[0]].contiguous()
        words[:] = rows.view(_INTEGER[rows.element_size()]).numpy().view(WORD[rows.element_size()])
        kept = np.count_nonzero(words, axis=1)
        changed = figures._replace(zeros=words.shape[1] - kept)
        return changed._replace(kept=kept) if self._chosen else changed


class FittedFileRows(FittedRows):
    """The fitted weights in some files. Use it as a context.

    Args:
        paths: of the files; each holds some targets.
        chosen: as for `FittedRows`.
    """

    def __init__(self, paths: list[Path], chosen: bool) -> None:
        self._paths = paths
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}
        super().__init__(self._slices, chosen)

    def __enter__(self) -> "FittedFileRows":
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._slices.clear()
        self._stack.close()
