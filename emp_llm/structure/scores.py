"""Scores of heads and neurons.

magnitude: of a head ||W_O[:, h]||_F, the norm of its columns in the output projection; of a neuron the product of the norms of
    its rows and of its column, ||gate row|| * ||up row|| * ||down column||.
wanda: the same, with every column of the last matrix multiplied by the norm of its input, ||X_j||_2.
taylor: sum over tokens and columns of |dL/dY * Y|, with Y the inputs of the last matrix (the heads' outputs, the activations of
    the neurons) and L the loss of the next token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emp_llm.checkpoint.files import FilePool
from emp_llm.checkpoint.matrices import Matrix, as_tensor
from emp_llm.common.errors import UserError
from emp_llm.common.progress import progress_bar
from emp_llm.models.layers import Layer
from emp_llm.structure.units import Units

Scores = NDArray[np.float64]
_BLOCK = 1 << 22  # weights read at a time


def unit_scores(
    every: Sequence[Units], criterion: str, matrices: Mapping[Layer, Matrix], features: Mapping[str, Tensor] | None = None
) -> list[Scores]:
    """The score of every unit: float64, shape (units,), for each element of `every`.

    Args:
        every: heads and neurons.
        criterion: "magnitude", "wanda" or "taylor".
        matrices: the stored weights of their layers; not read for "taylor".
        features: name of an output layer -> a number for each of its inputs, shape (inputs,): norms for "wanda"; sums of
            |dL/dY * Y| for "taylor".

    Raises:
        UserError: features of a layer are missing, or weights are not finite.
    """
    numbers = [None if features is None else _feature_numbers(units, features) for units in every]
    if criterion == "taylor":
        return [each[units.columns].sum(1) for units, each in zip(every, numbers, strict=True) if each is not None]
    total = sum(matrices[layer].numel for units in every for layer in _read_layers(units))
    scores = []
    with FilePool() as files, progress_bar(total, "scores", "W") as bar:
        for units, each in zip(every, numbers, strict=True):
            squares = _squares(matrices[units.output], files, 0, bar)
            if each is not None:
                squares = squares * each**2
            score = np.sqrt(squares[units.columns].sum(1))
            if units.kind == "neurons":
                for layer, rows in units.rows.items():
                    norms = np.sqrt(_squares(matrices[layer], files, 1, bar))
                    score = score * norms[rows].prod(1)
            if not np.isfinite(score).all():
                raise UserError(f"{units.name}: the weights of its {units.kind} hold NaN or infinity.")
            scores.append(score)
    return scores


def _read_layers(units: Units) -> list[Layer]:
    return units.layers if units.kind == "neurons" else [units.output]


def _feature_numbers(units: Units, features: Mapping[str, Tensor]) -> Scores:
    """The numbers of the inputs of a layer; zeros for an expert that saw no token."""
    numbers = features.get(units.name)
    if numbers is None and units.output.routed:
        return np.zeros(units.columns.max() + 1)
    if numbers is None:
        raise UserError(f"{units.name}: the calibration did not reach it, so its {units.kind} have no scores.")
    return numbers.double().numpy(force=True)


def _squares(matrix: Matrix, files: FilePool, axis: int, bar: Any) -> Scores:
    """Sums of squared weights: of each column (axis 0), or of each row (axis 1); float64."""
    sums = np.zeros(matrix.columns if axis == 0 else matrix.rows)
    for first, last in matrix.row_chunks(_BLOCK):
        words = matrix.read(files.reader(matrix.stored.shard), first, last)
        squares = as_tensor(words, matrix.stored.dtype).to(torch.float64).square_().sum(axis).numpy()
        if axis == 0:
            sums += squares
        else:
            sums[first:last] = squares
        bar.update(words.size)
    return sums
