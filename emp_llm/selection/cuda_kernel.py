"""The cuts of rows on NVIDIA GPUs, in Triton. In Triton's interpreter, tensors may be on any
device.

A program keeps the keys of a row in registers, and finds the bits of its k-th largest key one by
one, by counting the keys that are at least a candidate. Sorting the rows takes a hundred times as
long.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from emp_llm.common.machine import launching_on

LONGEST = 1 << 15  # columns of a row


def cuts_of_rows(keys: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The k-th largest key of each row for several k, and how many of the keys that equal it are
    among the k largest.

    Args:
        keys: int16 or int32, none negative, shape (rows, columns), at most `LONGEST` columns.
        counts: int64, shape (counts, rows): each k, at least 0. For 0, the largest key and 0.

    Returns:
        The keys, in the dtype of `keys`, and int64, both of the shape of `counts`.
    """
    counts = counts.contiguous()
    cut = torch.empty(counts.shape, dtype=keys.dtype, device=keys.device)
    ties = torch.empty_like(counts)
    _launch(keys, counts, cut, ties, None)
    return cut, ties


def masks_of_rows(keys: Tensor, counts: Tensor) -> Tensor:
    """The mask of the k largest keys of each row, the first among equal ones: bool, shape of
    `keys`.

    Args:
        keys: of `cuts_of_rows`.
        counts: int64, shape (rows,): k of each row.
    """
    mask = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    _launch(keys, counts.contiguous()[None], None, None, mask.view(torch.uint8))
    return mask


def _launch(
    keys: Tensor, counts: Tensor, cut: Tensor | None, ties: Tensor | None, mask: Tensor | None
) -> None:
    rows, columns = keys.shape
    width = triton.next_power_of_2(columns)
    with launching_on(keys.device):
        cuts_kernel[(rows, len(counts))](
            keys.contiguous(),
            counts,
            cut,
            ties,
            mask,
            rows,
            columns,
            BITS=8 * keys.element_size() - 1,
            WIDTH=width,
            MASK=mask is not None,
            num_warps=min(16, max(1, width // 1024)),
        )


@triton.jit
def cuts_kernel(
    keys,
    counts,
    cut,
    ties,
    mask,
    rows,
    columns,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASK: tl.constexpr,
):
    """The cut of one row for one of its counts, or its mask."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * rows + row
    column = tl.arange(0, WIDTH)
    # Behind the row, keys that are smaller than all others.
    key = tl.load(keys + row * columns + column, mask=column < columns, other=-1).to(tl.int32)
    count = tl.load(counts + place)
    wanted = tl.maximum(count, 1)
    found = tl.zeros([], tl.int32)
    for number in range(BITS):
        candidate = found | (1 << (BITS - 1 - number))
        found = tl.where(tl.sum((key >= candidate).to(tl.int32)) >= wanted, candidate, found)
    tied = count - tl.sum((key > found).to(tl.int32))
    if MASK:
        number_of_tie = tl.cumsum((key == found).to(tl.int32), 0)
        kept = (key > found) | ((key == found) & (number_of_tie <= tied))
        tl.store(mask + row * columns + column, kept.to(tl.uint8), mask=column < columns)
    else:
        tl.store(cut + place, found.to(cut.dtype.element_ty))
        tl.store(ties + place, tied)
