"""The CUDA kernel: launches the Triton programs of `cuda_rows`. In Triton's interpreter it takes tensors of any device.

Sizes depend on the shapes alone, never on the GPU or on timings, so one matrix has one order of sums on every GPU. Nothing here
waits for the GPU, so all of it can be captured in a CUDA graph once it has run. The constants were chosen from compiled code
(instructions for each weight, registers), not from timings.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from emp_llm.runtime.kernels import WORD_COLUMNS, cuda_rows

MOST_TOKENS = 16  # that one product takes
_MOST_MULTIPLIED = 4  # tokens, beyond which products of matrices need fewer instructions
_PROGRAMS = 528  # four on each of 132 multiprocessors; rows are split until there are so many
_LONGEST = 0xFFFF  # columns, for starts of 16 bits
_COUNTED = 1 << 24  # mask bytes at a time
_EXPANDED_ROWS, _EXPANDED_PAIRS = 4, 256


class DeviceRows(NamedTuple):
    """Packed rows as the kernels read them.

    Attributes:
        mask: int64, shape (rows, words).
        starts: int16 with the bits of uint16, or int32, shape (rows, words): the values of the row before each word.
        values: shape (number of them,).
        offsets: int64, shape (rows + 1,).
        columns: number of inputs.
    """

    mask: Tensor
    starts: Tensor
    values: Tensor
    offsets: Tensor
    columns: int


class ProductSizes(NamedTuple):
    """Launch parameters of a product: those of `cuda_rows.products_kernel`, and the warps of a program."""

    tokens: int
    rows: int
    groups: int
    dot: bool
    warps: int
    part: int
    splits: int


def device_rows(mask: Tensor, values: Tensor, offsets: Tensor, columns: int) -> DeviceRows:
    """Packed rows with the starts of their mask words, counted on their device.

    Args:
        mask: uint8, shape (rows, bytes), each row of whole words of 64 bits.
        values, offsets: as in `DeviceRows`.
    """
    rows, words = mask.shape[0], mask.shape[1] * 8 // WORD_COLUMNS
    ones = torch.tensor([number.bit_count() for number in range(256)], dtype=torch.int32, device=mask.device)
    starts = torch.empty(rows, words, dtype=torch.int16 if columns <= _LONGEST else torch.int32, device=mask.device)
    height = max(1, _COUNTED // max(1, mask.shape[1]))
    for first in range(0, rows, height):
        part = mask[first : first + height]
        counts = ones[part.int()].view(part.shape[0], words, 8).sum(2)
        starts[first : first + height] = counts.cumsum(1) - counts
    return DeviceRows(mask.contiguous().view(torch.int64), starts, values, offsets, columns)


def product_sizes(rows: int, columns: int, tokens: int) -> ProductSizes:
    """The launch parameters of a product of a matrix with 1 to 16 tokens."""
    dot = tokens > _MOST_MULTIPLIED
    if dot:
        height, groups, warps = 32, 64, 8
    else:
        height, groups, warps = (8 if rows >= 8 * _PROGRAMS else 4 if rows >= _PROGRAMS else 2), 128, 4
        height = height if tokens == 1 else min(height, 4)
    width = groups * 4
    programs, tiles = -(-rows // height), max(1, -(-columns // width))
    part = -(-tiles // min(tiles, -(-_PROGRAMS // max(1, programs)))) * width
    padded = MOST_TOKENS if dot else triton.next_power_of_2(tokens)
    return ProductSizes(padded, height, groups, dot, warps, part, max(1, -(-columns // part)))


def multiply(matrix: DeviceRows, x: Tensor, sizes: ProductSizes | None = None) -> Tensor:
    """x @ W.T, summed in float32 and rounded once to the dtype of x; shape (tokens, rows).

    Args:
        matrix: W.
        x: shape (tokens, columns), 1 to 16 tokens, on the device of W.
        sizes: for measurements; default: those of `product_sizes`.
    """
    rows, tokens = matrix.mask.shape[0], x.shape[0]
    if 0 in (rows, tokens, matrix.columns, matrix.values.shape[0]):
        return torch.zeros(tokens, rows, dtype=x.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    how = product_sizes(rows, matrix.columns, tokens) if sizes is None else sizes
    kind = x.dtype if how.splits == 1 else torch.float32
    y = torch.empty(how.splits, tokens, rows, dtype=kind, device=x.device)
    widen = x.dtype != matrix.values.dtype or not x.is_cuda  # the interpreter multiplies no bfloat16 matrices
    with _on(x.device):
        cuda_rows.products_kernel[(-(-rows // how.rows), how.splits)](
            *matrix[:4], x, y, matrix.values.shape[0], rows, matrix.columns, tokens, x.stride(0), how.part,
            WORDS=matrix.mask.shape[1], TOKENS=how.tokens, ROWS=how.rows, GROUPS=how.groups, DOT=how.dot,
            WIDEN=widen, num_warps=how.warps,
        )  # fmt: skip
    return y[0] if how.splits == 1 else y.sum(0).to(x.dtype)


def expand_rows(matrix: DeviceRows, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Rows first to last - 1 with their zeros, converted to a dtype; shape (last - first, columns)."""
    device, columns = matrix.values.device, matrix.columns
    dense = torch.empty(last - first, columns, dtype=dtype, device=device)
    if dense.numel() == 0 or matrix.values.shape[0] == 0:
        return dense.zero_()
    grid = (-(-(last - first) // _EXPANDED_ROWS), -(-columns // (2 * _EXPANDED_PAIRS)))
    with _on(device):
        cuda_rows.expand_kernel[grid](
            *matrix[:4], dense, last - first, columns, first,
            WORDS=matrix.mask.shape[1], ROWS=_EXPANDED_ROWS, GROUPS=_EXPANDED_PAIRS, num_warps=4,
        )  # fmt: skip
    return dense


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which Triton launches on the GPU of the matrix. Compiled graphs have their own."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return torch.cuda.device(device)
