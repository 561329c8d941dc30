"""Sums in one fixed order.

Floating-point addition is not associative, so a sum whose order follows the thread count, the device or the size of a
row block can change in its last bit, and a count of kept weights with it. Here the order is part of the definition:
element i of a row is added to lane i mod 64, in order of i; then the 64 lanes are folded in halves. Every operation is an
elementwise IEEE addition, so the result is the same bits everywhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LANES = 64


def sum_rows(rows: Tensor, *terms: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Sum each row in float64, once for each term, reading the rows once.

    Args:
        rows: shape (rows, columns), any floating dtype.
        terms: maps applied elementwise to float64 slices of the rows before they are summed.

    Returns:
        One float64 tensor of shape (rows,) for each term.
    """
    count, columns = rows.shape
    lanes = [torch.zeros(count, LANES, dtype=torch.float64, device=rows.device) for _ in terms]
    for start in range(0, columns, LANES):
        piece = rows[:, start : start + LANES].double()
        for lane, term in zip(lanes, terms, strict=True):
            lane[:, : piece.shape[1]] += term(piece)
    return [_fold(lane) for lane in lanes]


def sum_vector(values: Tensor) -> Tensor:
    """Sum a vector (any shape is flattened) in the same fixed order; returns a float64 scalar tensor."""
    return sum_rows(values.reshape(1, -1), lambda piece: piece)[0][0]


def _fold(lanes: Tensor) -> Tensor:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
