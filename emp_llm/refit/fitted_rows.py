"""Fitted weights read by rows, in place of the pruned rows of a checkpoint that is being written."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from emp_llm.checkpoint.words import WORD, Words
from emp_llm.selection.kernels.interface import RowFigures


class FittedRows:
    """The fitted weights in some files. Use it as a context.

    Args:
        paths: of the files; each holds some targets.
        chosen: the fit chose the masks, so the figures of the rows follow from them.
    """

    def __init__(self, paths: list[Path], chosen: bool) -> None:
        self._paths = paths
        self.chosen = chosen
        self._stack = ExitStack()
        self._place: dict[str, Any] = {}

    def __enter__(self) -> "FittedRows":
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._place |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._place.clear()
        self._stack.close()

    def replace(self, target: str, first: int, words: Words, figures: RowFigures) -> RowFigures:
        """Put the fitted rows in the place of a block of pruned rows, in memory.

        Args:
            target: its name.
            first: number of the first row.
            words: the bits of the rows; they are overwritten. A target without a fit keeps them.
            figures: of the pruned rows.

        Returns:
            The figures of the fitted rows. Where the fit chose the mask, N_eff and masses are those of the magnitudes.
        """
        file = self._place.get(target)
        if file is None:
            return figures
        rows = file.get_slice(target)[first : first + words.shape[0]]
        word = WORD[rows.element_size()]
        words[:] = rows.contiguous().view(_INTEGER[rows.element_size()]).numpy().view(word)
        kept = np.count_nonzero(words, axis=1)
        changed = figures._replace(zeros=words.shape[1] - kept)
        return changed._replace(kept=kept) if self.chosen else changed


_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
