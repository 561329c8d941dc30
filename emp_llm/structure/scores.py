"""Scores of units: by their weights, or by what a pass of the text has collected."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from emp_llm.checkpoint.files import FilePool
from emp_llm.checkpoint.matrices import Matrix, as_tensor
from emp_llm.common.errors import UserError
from emp_llm.common.progress import progress_bar
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.structure.units import Scores, Units

BY_WEIGHTS = ("magnitude", "wanda")  # scores that read weights; all others need `unit_sums`
_CHUNK = 1 << 22  # weights read at a time


def unit_sums(
    runner: BlockwiseModel, every: Sequence[Units], tokens: Tensor, batch_size: int
) -> dict[str, Tensor]:
    """What a pass of the text collects; `Units.sums` of their kind."""
    return every[0].sums(runner, every, tokens, batch_size)


def unit_scores(
    every: Sequence[Units], criterion: str, feature: Callable[[str], Tensor | None] | None = None
) -> list[Scores]:
    """The score of every unit: float64, shape (units,), for each element of `every`.

    Args:
        every: heads and neurons, experts, or layers.
        criterion: of the recipe. Weights are read for "magnitude" and "wanda".
        feature: name of the units -> what a calibration has collected: for "wanda" the norms of the
            inputs of their last layer, shape (inputs,); else the result of `unit_sums`. None if
            there is nothing for this name.

    Raises:
        UserError: features of a layer are missing, or weights are not finite.
    """
    if criterion not in BY_WEIGHTS:
        assert feature is not None
        return [units.score_of_sums(criterion, units.collected(feature)) for units in every]
    collected = [None if feature is None else units.collected(feature) for units in every]
    weights = sum(target.matrix.numel for units in every for target in units.scored)
    scores = []
    with FilePool() as files, progress_bar(weights, "scores", "W") as bar:

        def squares(matrix: Matrix, axis: int) -> Scores:
            sums = np.zeros(matrix.columns if axis == 0 else matrix.rows)
            for first, last in matrix.row_chunks(_CHUNK):
                words = matrix.read(files.reader(matrix.stored.shard), first, last)
                values = as_tensor(words, matrix.stored.dtype).to(torch.float64)
                sums_of_chunk = values.square_().sum(axis).numpy()
                if axis == 0:
                    sums += sums_of_chunk
                else:
                    sums[first:last] = sums_of_chunk
                bar.update(words.size)
            return sums

        for units, norms in zip(every, collected, strict=True):
            score = units.score_of_weights(squares, norms)
            if not np.isfinite(score).all():
                raise UserError(
                    f"{units.name}: the weights of its {units.kind} hold NaN or infinity."
                )
            scores.append(score)
    return scores
