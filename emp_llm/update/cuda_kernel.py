"""SparseGPT's pass over a block of columns on NVIDIA GPUs, in Triton: one launch for the block. In
Triton's interpreter, tensors may be on any device.

Rows do not depend on each other, given the factor. So a program takes a few rows, keeps their
weights in registers, and goes through the columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emp_llm.common.machine import launching_on

WIDEST = 256  # columns of a block
_NUMBERS = 2048  # of the rows of a program
_WARPS = 4


def prune_columns(
    weight: Tensor, mask: Tensor, factor: Tensor, pattern: tuple[int, int] | None
) -> Tensor:
    """Prune the columns of a block, as `sparsegpt._prune_block` does: the same arguments and
    result, up to rounding.

    Args:
        weight: at most `WIDEST` columns.
    """
    rows, columns = weight.shape
    errors = torch.empty(rows, columns, device=weight.device)
    factor = factor.contiguous()  # LAPACK's has its columns in one piece
    width = max(16, triton.next_power_of_2(columns))
    height = max(1, _NUMBERS // width)
    n, m = pattern or (0, columns)
    with launching_on(weight.device):
        columns_kernel[(-(-rows // height),)](
            weight,
            mask.view(torch.uint8),
            factor,
            errors,
            rows,
            columns,
            *weight.stride(),
            *mask.stride(),
            m,
            N=n,
            ROWS=height,
            WIDTH=width,
            num_warps=_WARPS,
        )
    return errors


@triton.jit
def _of_column(values, column, j):
    """Column j of values of shape (ROWS, WIDTH), shape (ROWS, 1)."""
    return tl.sum(tl.where(column == j, values, 0.0), 1)[:, None]


@triton.jit
def _chosen(score, column, first, m, N: tl.constexpr):
    """Whether fewer than N of the m scores of a row from column `first` on are ahead of each."""
    ahead = tl.zeros_like(score)
    for j in range(first, first + m):
        other = _of_column(score, column, j)
        wins = (other > score) | ((other == score) & (column > j))
        ahead += tl.where(wins, 1.0, 0.0)
    return ahead < N


@triton.jit
def columns_kernel(
    weight,
    mask,
    factor,
    errors,
    rows,
    columns,
    weight_stride,
    weight_step,
    mask_stride,
    mask_step,
    m,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Prune ROWS rows of a block. If N is not 0, N of every m weights stay, and `mask` is written;
    else it is read, and m is `columns`.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < columns)
    place = weight + row.to(tl.int64) * weight_stride + column.to(tl.int64) * weight_step
    mask_place = mask + row.to(tl.int64) * mask_stride + column.to(tl.int64) * mask_step
    values = tl.load(place, mask=inside, other=0.0)
    # Of each row its own copy, in the threads that need it.
    of_row = factor + column + tl.zeros([ROWS, 1], tl.int32)
    used = column + tl.zeros([ROWS, 1], tl.int32) < columns
    diagonal = tl.load(of_row + column * columns, mask=used, other=1.0)
    if N == 0:
        kept = tl.load(mask_place, mask=inside, other=1) != 0
    else:
        kept = inside
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    following = tl.load(of_row, mask=used, other=0.0)
    divisor = tl.load(factor)
    for first in range(0, columns, m):
        if N != 0:
            score = tl.div_rn(values, diagonal)
            here = (column >= first) & (column < first + m)
            kept = tl.where(here, _chosen(score * score, column, first, m, N), kept)
        for j in range(first, first + m):
            weights = tl.where(column >= j, following, 0.0)
            removed = _of_column(tl.where(kept, 0.0, values), column, j)
            error = tl.div_rn(removed, tl.zeros_like(removed) + divisor)
            # The next row of the factor is on its way while this one is used.
            after = tl.minimum(j + 1, columns - 1)
            following = tl.load(of_row + after * columns, mask=used, other=0.0)
            divisor = tl.load(factor + after * (columns + 1))
            values -= error * weights
            found = tl.where(column == j, error, found)
    tl.store(place, tl.where(kept, values, 0.0), mask=inside)
    tl.store(errors + row.to(tl.int64) * columns + column, found, mask=inside)
    if N != 0:
        tl.store(mask_place, kept.to(tl.uint8), mask=inside)
