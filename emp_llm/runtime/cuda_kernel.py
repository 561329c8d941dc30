"""Products with packed rows on NVIDIA GPUs, in Triton. In Triton's interpreter, tensors may be on
any device.

A mask word covers 64 columns, and `starts` says how many values of its row precede it: int32, or
the bits of uint16 as int16, which are read without a sign. A thread takes four adjacent columns:
the number of set bits below them in the word gives the place of their first value, and the other
three follow it. So no thread waits for another one, and neighbouring threads read neighbouring
values. Each sum has one order, whatever the timing.

Sizes depend on the shapes alone, never on the GPU or on timings, so one matrix has one order of
sums on every GPU. Nothing here waits for the GPU, so all of it can be captured in a CUDA graph once
it has run. The constants were chosen from compiled code (instructions for each weight, registers),
not from timings.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from emp_llm.common.machine import launching_on
from emp_llm.runtime.packed_rows import PackedRows

WORD = tl.constexpr(64)
WIDTH = tl.constexpr(4)  # columns of a thread at a time
GROUPS_IN_WORD = tl.constexpr(16)
MOST_TOKENS = 16  # that one product takes
_MOST_MULTIPLIED = 4  # tokens, beyond which products of matrices need fewer instructions
_PROGRAMS = 528  # four on each of 132 multiprocessors; rows are split until there are so many
_LONGEST = 0xFFFF  # columns, for starts of 16 bits
_COUNTED = 1 << 24  # mask bytes at a time
_EXPANDED_ROWS = 4
_EXPANDED_PAIRS = 256
_TILE = 256 << 20  # bytes of rows that are dense at a time


class DeviceRows(NamedTuple):
    """Packed rows as the kernels read them.

    Attributes:
        mask: int64, shape (rows, words).
        starts: int16 with the bits of uint16, or int32, shape (rows, words): the values of the row
            before each word.
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
    """Launch parameters of a product: those of `products_kernel`, the warps of a program, and the
    number of splits, among which the columns of a row are divided.
    """

    tokens: int
    rows: int
    groups: int
    dot: bool
    warps: int
    split_columns: int
    splits: int


class CudaProducts:
    """Multiplies packed rows on a GPU: one to 16 vectors from the packed form, more by dense rows
    and torch's product.

    It can be traced by torch.compile, and captured in a CUDA graph once it has run. The dense rows
    are a temporary tensor: torch gives its memory from one layer to the next, in the order of the
    stream.

    Args:
        rows: on the GPU; kept as long as this object. In Triton's interpreter, on any device.
    """

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows.rows
        self._matrix = device_rows(rows)

    @property
    def nbytes(self) -> int:
        """Bytes that it adds to the packed rows."""
        return self._matrix.starts.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ W.T, summed in float32 and rounded to the dtype of x, + bias. x has the shape
        (tokens, inputs), the result (tokens, outputs).
        """
        if bias is not None:
            return self(x).add_(bias)
        if x.shape[0] <= MOST_TOKENS:
            return multiply(self._matrix, x)
        dtype = x.dtype if x.dtype == self._matrix.values.dtype else torch.float32
        inputs = x.to(dtype)
        height = max(1, _TILE // max(1, self._matrix.columns * dtype.itemsize))
        products = [
            torch.mm(
                inputs, expand_rows(self._matrix, first, min(first + height, self._rows), dtype).T
            )
            for first in range(0, max(1, self._rows), height)
        ]
        product = products[0] if len(products) == 1 else torch.cat(products, 1)
        return product.to(x.dtype)


def device_rows(packed: PackedRows) -> DeviceRows:
    """Packed rows with the starts of their mask words, counted on their device."""
    mask = packed.mask
    words = packed.words
    ones = torch.tensor(
        [byte.bit_count() for byte in range(256)], dtype=torch.int32, device=mask.device
    )
    dtype = torch.int16 if packed.columns <= _LONGEST else torch.int32
    starts = torch.empty(packed.rows, words, dtype=dtype, device=mask.device)
    height = max(1, _COUNTED // max(1, mask.shape[1]))
    for first in range(0, packed.rows, height):
        chunk = mask[first : first + height]
        counts = ones[chunk.int()].view(chunk.shape[0], words, 8).sum(2)
        starts[first : first + height] = counts.cumsum(1) - counts
    return DeviceRows(
        mask.contiguous().view(torch.int64), starts, packed.values, packed.offsets, packed.columns
    )


def product_sizes(rows: int, columns: int, tokens: int) -> ProductSizes:
    """The launch parameters of a product of a matrix with 1 to 16 tokens."""
    dot = tokens > _MOST_MULTIPLIED
    if dot:
        height = 32
        groups = 64
        warps = 8
    else:
        height = 4 if rows >= _PROGRAMS else 2
        if rows >= 8 * _PROGRAMS and tokens == 1:
            height = 8
        groups = 128
        warps = 4
    width = groups * 4
    programs = -(-rows // height)
    tiles = max(1, -(-columns // width))
    split_columns = -(-tiles // min(tiles, -(-_PROGRAMS // max(1, programs)))) * width
    padded = MOST_TOKENS if dot else triton.next_power_of_2(tokens)
    return ProductSizes(
        padded, height, groups, dot, warps, split_columns, max(1, -(-columns // split_columns))
    )


def multiply(matrix: DeviceRows, x: Tensor, sizes: ProductSizes | None = None) -> Tensor:
    """x @ W.T, summed in float32 and rounded once to the dtype of x; shape (tokens, rows).

    Args:
        matrix: W.
        x: shape (tokens, columns), 1 to 16 tokens, on the device of W.
        sizes: for measurements; default: those of `product_sizes`.
    """
    rows = matrix.mask.shape[0]
    tokens = x.shape[0]
    if 0 in (rows, tokens, matrix.columns, matrix.values.shape[0]):
        return torch.zeros(tokens, rows, dtype=x.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    launch = product_sizes(rows, matrix.columns, tokens) if sizes is None else sizes
    dtype = x.dtype if launch.splits == 1 else torch.float32
    y = torch.empty(launch.splits, tokens, rows, dtype=dtype, device=x.device)
    # The interpreter multiplies no bfloat16 matrices.
    widen = x.dtype != matrix.values.dtype or not x.is_cuda
    with launching_on(x.device):
        products_kernel[(-(-rows // launch.rows), launch.splits)](
            *matrix[:4],
            x,
            y,
            matrix.values.shape[0],
            rows,
            matrix.columns,
            tokens,
            x.stride(0),
            launch.split_columns,
            WORDS=matrix.mask.shape[1],
            TOKENS=launch.tokens,
            ROWS=launch.rows,
            GROUPS=launch.groups,
            DOT=launch.dot,
            WIDEN=widen,
            num_warps=launch.warps,
        )
    return y[0] if launch.splits == 1 else y.sum(0).to(x.dtype)


def expand_rows(matrix: DeviceRows, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Rows first to last - 1 with their zeros, converted to a dtype; shape (last - first,
    columns).
    """
    device = matrix.values.device
    columns = matrix.columns
    dense = torch.empty(last - first, columns, dtype=dtype, device=device)
    if dense.numel() == 0 or matrix.values.shape[0] == 0:
        return dense.zero_()
    grid = (-(-(last - first) // _EXPANDED_ROWS), -(-columns // (2 * _EXPANDED_PAIRS)))
    with launching_on(device):
        expand_kernel[grid](
            *matrix[:4],
            dense,
            last - first,
            columns,
            first,
            WORDS=matrix.mask.shape[1],
            ROWS=_EXPANDED_ROWS,
            GROUPS=_EXPANDED_PAIRS,
            num_warps=4,
        )
    return dense


@triton.jit
def _popcount(bits):
    """The number of set bits of uint64; the compiler knows this form and makes it one
    instruction for each half.
    """
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _mask_words(mask, starts, row, word, WORDS: tl.constexpr):
    """Mask words of rows, uint64, and the number of values of the row before each word. Beyond the
    last word of a row, the last word again.
    """
    place = row.to(tl.int64)[:, None] * WORDS + tl.minimum(word, WORDS - 1)[None, :]
    before = tl.load(starts + place).to(tl.int32)
    if starts.dtype.element_ty == tl.int16:
        before = before & 0xFFFF
    return tl.load(mask + place).to(tl.uint64, bitcast=True), before


@triton.jit
def _four_columns(bits, before, row_values, remaining, GROUPS: tl.constexpr, CHECK: tl.constexpr):
    """The values of the four columns of each group, and their four bits. Where a bit is not set,
    the value is arbitrary.

    CHECK: only `remaining` values follow the first one of the row; none behind them is read.
    """
    shift = (tl.arange(0, GROUPS) % GROUPS_IN_WORD * WIDTH).to(tl.uint64)[None, :]
    below = (tl.full([1, GROUPS], 1, tl.uint64) << shift) - 1
    thread_bits = (bits >> shift).to(tl.int32)
    place = before + _popcount(bits & below)
    if CHECK:
        a = tl.load(row_values + place, mask=place < remaining, other=0)
        b = tl.load(row_values + place + 1, mask=place + 1 < remaining, other=0)
        c = tl.load(row_values + place + 2, mask=place + 2 < remaining, other=0)
        d = tl.load(row_values + place + 3, mask=place + 3 < remaining, other=0)
    else:
        a = tl.load(row_values + place)
        b = tl.load(row_values + place + 1)
        c = tl.load(row_values + place + 2)
        d = tl.load(row_values + place + 3)
    first = (thread_bits & 1) != 0
    second = (thread_bits & 2) != 0
    third = (thread_bits & 4) != 0
    at_1 = tl.where(first, b, a)
    next_1 = tl.where(first, c, b)
    last_1 = tl.where(first, d, c)
    at_2 = tl.where(second, next_1, at_1)
    next_2 = tl.where(second, last_1, next_1)
    return a, at_1, at_2, tl.where(third, next_2, at_2), thread_bits


@triton.jit
def _add_column(
    total,
    values,
    bit,
    x,
    token,
    tokens,
    column,
    columns,
    stride,
    DOT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """`total` and the products of one column of each group."""
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    inputs = tl.load(x + token[:, None] * stride + column[None, :], mask=inside, other=0)
    if WIDEN or not DOT:
        values = values.to(tl.float32)
        inputs = inputs.to(tl.float32)
    if DOT:
        tile = tl.where(bit != 0, values, tl.zeros_like(values))
        total = tl.dot(tile, tl.trans(inputs), total, input_precision="ieee")
    else:
        total = tl.where(
            (bit != 0)[None, :, :], total + values[None, :, :] * inputs[:, None, :], total
        )
    return total


@triton.jit
def _add_tile(
    total,
    bits,
    before,
    row_values,
    remaining,
    x,
    token,
    tokens,
    base,
    columns,
    stride,
    GROUPS: tl.constexpr,
    DOT: tl.constexpr,
    WIDEN: tl.constexpr,
    CHECK: tl.constexpr,
):
    """`total` and the products of a tile of columns from `base`."""
    a, b, c, d, thread_bits = _four_columns(bits, before, row_values, remaining, GROUPS, CHECK)
    column = tl.arange(0, GROUPS) * WIDTH + base
    total = _add_column(
        total, a, thread_bits & 1, x, token, tokens, column, columns, stride, DOT, WIDEN
    )
    total = _add_column(
        total, b, thread_bits & 2, x, token, tokens, column + 1, columns, stride, DOT, WIDEN
    )
    total = _add_column(
        total, c, thread_bits & 4, x, token, tokens, column + 2, columns, stride, DOT, WIDEN
    )
    return _add_column(
        total, d, thread_bits & 8, x, token, tokens, column + 3, columns, stride, DOT, WIDEN
    )


@triton.jit
def _row_sums(
    mask,
    starts,
    values,
    offsets,
    stored,
    x,
    row,
    token,
    tokens,
    columns,
    stride,
    start,
    end,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    DOT: tl.constexpr,
    WIDEN: tl.constexpr,
    CHECK: tl.constexpr,
):
    """The sums of a program over the columns from `start` to `end`, shape (TOKENS, ROWS)."""
    first = tl.load(offsets + row)
    row_values = values + first[:, None]
    remaining = (stored - first)[:, None]
    whole = start + (end - start) // (GROUPS * WIDTH) * (GROUPS * WIDTH)
    if DOT:
        total = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        total = tl.zeros([TOKENS, ROWS, GROUPS], tl.float32)
    word = tl.arange(0, GROUPS) // GROUPS_IN_WORD + start // WORD
    bits, before = _mask_words(mask, starts, row, word, WORDS)
    for base in range(start, whole, GROUPS * WIDTH):
        these = bits
        places = before
        # The next words are on their way while these are used: values cannot be asked for before
        # their words are there.
        word += GROUPS // GROUPS_IN_WORD
        bits, before = _mask_words(mask, starts, row, word, WORDS)
        total = _add_tile(
            total,
            these,
            places,
            row_values,
            remaining,
            x,
            token,
            tokens,
            base,
            columns,
            stride,
            GROUPS,
            DOT,
            WIDEN,
            CHECK,
        )
    if whole < end:
        bits = tl.where((word < WORDS)[None, :], bits, tl.zeros_like(bits))
        total = _add_tile(
            total,
            bits,
            before,
            row_values,
            remaining,
            x,
            token,
            tokens,
            whole,
            columns,
            stride,
            GROUPS,
            DOT,
            WIDEN,
            CHECK,
        )
    if DOT:
        result = tl.trans(total)
    else:
        result = tl.sum(total, 2)
    return result


@triton.jit
def products_kernel(
    mask,
    starts,
    values,
    offsets,
    x,
    y,
    stored,
    rows,
    columns,
    tokens,
    stride,
    split_columns,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    DOT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """y[split, token, row] = the sum of W[row, c] x[token, c] over the columns c of a split, in
    float32.

    A program takes ROWS rows, and GROUPS groups of columns at a time. DOT: by products of matrices,
    whose sizes are 16 or more; WIDEN: in float32. `stored` is the number of values, and
    `split_columns`, the columns of a split, a multiple of the columns of a tile.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    start = tl.program_id(1) * split_columns
    end = tl.minimum(start + split_columns, columns)
    behind = tl.program_id(0) * ROWS + ROWS
    if (behind <= rows) & (tl.load(offsets + tl.minimum(behind, rows)) + WIDTH <= stored):
        total = _row_sums(
            mask,
            starts,
            values,
            offsets,
            stored,
            x,
            place,
            token,
            tokens,
            columns,
            stride,
            start,
            end,
            WORDS,
            TOKENS,
            ROWS,
            GROUPS,
            DOT,
            WIDEN,
            False,
        )
    else:  # nothing behind the last value is read; the last row stands in for rows behind it
        total = _row_sums(
            mask,
            starts,
            values,
            offsets,
            stored,
            x,
            tl.minimum(place, rows - 1),
            token,
            tokens,
            columns,
            stride,
            start,
            end,
            WORDS,
            TOKENS,
            ROWS,
            GROUPS,
            DOT,
            WIDEN,
            True,
        )
    target = y + (tl.program_id(1) * tokens + token.to(tl.int64)[:, None]) * rows + place[None, :]
    tl.store(
        target,
        total.to(y.dtype.element_ty),
        mask=(token < tokens)[:, None] & (place < rows)[None, :],
    )


@triton.jit
def expand_kernel(
    mask,
    starts,
    values,
    offsets,
    dense,
    rows,
    columns,
    first,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """dense[i, c] = W[first + i, c] for `rows` rows, in the dtype of `dense`. A thread takes two
    adjacent columns.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first + tl.minimum(place, rows - 1)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    shift = (group % (WORD // 2) * 2).to(tl.uint64)[None, :]
    below = (tl.full([1, GROUPS], 1, tl.uint64) << shift) - 1
    bits, before = _mask_words(mask, starts, row, group // (WORD // 2), WORDS)
    thread_bits = tl.where((group < WORDS * (WORD // 2))[None, :], (bits >> shift).to(tl.int32), 0)
    at = values + tl.load(offsets + row)[:, None] + (before + _popcount(bits & below))
    left = tl.load(at, mask=(thread_bits & 1) != 0, other=0)
    right = tl.load(at + (thread_bits & 1), mask=(thread_bits & 2) != 0, other=0)
    column = group[:, None] * 2 + tl.arange(0, 2)[None, :]
    target = dense + place.to(tl.int64)[:, None, None] * columns + column[None, :, :]
    inside = (place < rows)[:, None, None] & (column < columns)[None, :, :]
    tl.store(target, tl.join(left, right).to(dense.dtype.element_ty), mask=inside)
