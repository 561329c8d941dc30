"""Sums in one fixed order.

Floating-point addition is not associative. If the order of a sum followed the thread count, the device or the size of a row
block, the last bit of the sum could change, and with it the number of weights that are kept. Here the order is part of the
definition: element i of a row is added to lane i mod 64, in order of i; then the 64 lanes are folded in halves. Each step is an
elementwise IEEE addition, so the result has the same bits everywhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emp_llm.selection.arithmetic.definitions import LANES

# Numbers converted to float64 at a time. They stay in a core's cache, and torch does not share so few among threads.
_PIECE = 1 << 15


def sum_rows(rows: Tensor, *terms: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Sum each row in float64, once for each term. The rows are read once.

    Args:
        rows: shape (rows, columns), any floating dtype.
        terms: elementwise maps, applied to float64 pieces of the rows before they are summed.

    Returns:
        One float64 tensor of shape (rows,) for each term.
    """
    rows = rows.detach()
    count, columns = rows.shape
    # Lanes without an element hold zero and change no bit of the sum, so short rows have only as many as they need.
    width = min(LANES, 1 << max(columns - 1, 0).bit_length())
    lanes = [torch.zeros(count, width, dtype=torch.float64, device=rows.device) for _ in terms]
    step = max(_PIECE // max(count, 1) // LANES, 1) * LANES
    for start in range(0, columns, step):
        piece = rows[:, start : start + step].double()
        for lane, term in zip(lanes, terms, strict=True):
            _add_to_lanes(lane, term(piece))
    return [_fold(lane) for lane in lanes]


def sum_vector(values: Tensor) -> Tensor:
    """Sum a tensor of any shape in the same order, flattened; returns a float64 scalar tensor."""
    return sum_rows(values.reshape(1, -1), lambda piece: piece)[0][0]


def _add_to_lanes(lanes: Tensor, values: Tensor) -> None:
    """Add columns 0 to 63 of the values to the lanes, then columns 64 to 127, and so on."""
    if lanes.device.type == "cpu":  # numpy makes the same additions, with less overhead for each call
        _add_slices(lanes.numpy(), values.numpy())
    else:
        _add_slices(lanes, values)


def _add_slices(lanes: Any, values: Any) -> None:
    for start in range(0, values.shape[1], LANES):
        piece = values[:, start : start + LANES]
        lanes[:, : piece.shape[1]] += piece


def _fold(lanes: Tensor) -> Tensor:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
