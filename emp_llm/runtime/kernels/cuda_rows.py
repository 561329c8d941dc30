"""Packed rows on CUDA, in Triton: products with a few vectors, and rows made dense.

A mask word covers 64 columns, and `starts` says how many values of its row precede it. A thread takes WIDTH adjacent columns:
the set bits below them in the word give the place of their first value. So no thread waits for another one, and neighbouring
threads read neighbouring values. Each sum has one order, whatever the timing.
"""

import triton
import triton.language as tl

WORD = tl.constexpr(64)


@triton.jit
def _ones(bits):
    """The number of set bits of uint64; the compiler knows this form and makes it one instruction for each half."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _words(mask, starts, row, rows, word, words):
    """Mask words, uint64, and the number of values of the row before each; zeros outside the matrix."""
    place = row.to(tl.int64)[:, None] * words + word[None, :]
    inside = (row < rows)[:, None] & (word < words)[None, :]
    bits = tl.load(mask + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
    return bits, tl.load(starts + place, mask=inside, other=0).to(tl.int32)


@triton.jit
def few_kernel(
    mask,
    starts,
    values,
    offsets,
    x,
    y,
    rows,
    columns,
    words,
    tokens,
    stride,
    part,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y[split, token, row] = the sum of W[row, c] x[token, c] over the `part` columns of a split.

    By multiplications in float32: ROWS rows, and GROUPS groups of WIDTH columns at a time.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    group = tl.arange(0, GROUPS)
    shift = (group % (WORD // WIDTH) * WIDTH).to(tl.uint64)
    below = (tl.full([GROUPS], 1, tl.uint64) << shift) - 1
    own = values + tl.load(offsets + row, mask=row < rows, other=0)[:, None]
    inputs = x + token[:, None] * stride
    start = tl.program_id(1) * part
    end = tl.minimum(start + part, columns)
    total = tl.zeros([TOKENS, ROWS, GROUPS], tl.float32)
    bits, before = _words(mask, starts, row, rows, start // WORD + group // (WORD // WIDTH), words)
    for base in range(start, end, GROUPS * WIDTH):
        mine = ((bits >> shift[None, :]) & ((1 << WIDTH) - 1)).to(tl.int32)
        place = before + _ones(bits & below[None, :])
        # The next words are on their way while these are used.
        following = (base + GROUPS * WIDTH) // WORD + group // (WORD // WIDTH)
        bits, before = _words(mask, starts, row, rows, following, words)
        for j in tl.static_range(WIDTH):
            bit = (mine >> j) & 1
            value = tl.load(own + place, mask=bit != 0, other=0).to(tl.float32)
            place += bit
            column = base + group * WIDTH + j
            inside = (token < tokens)[:, None] & (column < columns)[None, :]
            vector = tl.load(inputs + column[None, :], mask=inside, other=0).to(tl.float32)
            total += value[None, :, :] * vector[:, None, :]
    target = y + (tl.program_id(1) * tokens + token.to(tl.int64)[:, None]) * rows + row[None, :]
    written = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(target, tl.sum(total, 2).to(y.dtype.element_ty), mask=written)


@triton.jit
def dot_kernel(
    mask,
    starts,
    values,
    offsets,
    x,
    y,
    rows,
    columns,
    words,
    tokens,
    stride,
    part,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As `few_kernel`, by matrix products of tiles; all sizes of a tile are 16 or more."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    group = tl.arange(0, GROUPS)
    shift = (group % (WORD // WIDTH) * WIDTH).to(tl.uint64)
    below = (tl.full([GROUPS], 1, tl.uint64) << shift) - 1
    own = values + tl.load(offsets + row, mask=row < rows, other=0)[:, None]
    inputs = x + token[None, :] * stride
    start = tl.program_id(1) * part
    end = tl.minimum(start + part, columns)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    bits, before = _words(mask, starts, row, rows, start // WORD + group // (WORD // WIDTH), words)
    for base in range(start, end, GROUPS * WIDTH):
        mine = ((bits >> shift[None, :]) & ((1 << WIDTH) - 1)).to(tl.int32)
        place = before + _ones(bits & below[None, :])
        following = (base + GROUPS * WIDTH) // WORD + group // (WORD // WIDTH)
        bits, before = _words(mask, starts, row, rows, following, words)
        for j in tl.static_range(WIDTH):
            bit = (mine >> j) & 1
            value = tl.load(own + place, mask=bit != 0, other=0)
            place += bit
            column = base + group * WIDTH + j
            inside = (token < tokens)[None, :] & (column < columns)[:, None]
            vector = tl.load(inputs + column[:, None], mask=inside, other=0)
            if values.dtype.element_ty == x.dtype.element_ty:
                total = tl.dot(value, vector, total, input_precision="ieee")
            else:
                total = tl.dot(value.to(tl.float32), vector.to(tl.float32), total, input_precision="ieee")
    target = y + (tl.program_id(1) * tokens + token.to(tl.int64)[None, :]) * rows + row[:, None]
    written = (token < tokens)[None, :] & (row < rows)[:, None]
    tl.store(target, total.to(y.dtype.element_ty), mask=written)


@triton.jit
def expand_kernel(mask, starts, values, offsets, dense, rows, columns, words, first, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """dense[i, c] = W[first + i, c], in the dtype of `dense`; `rows` of W in all, and two columns for each thread."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    shift = (group % (WORD // 2) * 2).to(tl.uint64)
    below = (tl.full([GROUPS], 1, tl.uint64) << shift) - 1
    own = values + tl.load(offsets + row, mask=row < rows, other=0)[:, None]
    bits, before = _words(mask, starts, row, rows, group // (WORD // 2), words)
    place = before + _ones(bits & below[None, :])
    low, high = ((bits >> shift[None, :]) & 1).to(tl.int32), ((bits >> (shift[None, :] + 1)) & 1).to(tl.int32)
    left = tl.load(own + place, mask=low != 0, other=0)
    right = tl.load(own + place + low, mask=high != 0, other=0)
    pair = tl.join(left, right).to(dense.dtype.element_ty)
    column = (group[:, None] * 2 + tl.arange(0, 2)[None, :])[None, :, :]
    target = dense + (row - first).to(tl.int64)[:, None, None] * columns + column
    tl.store(target, pair, mask=(row < rows)[:, None, None] & (column < columns))
