"""Packed rows on CUDA, in Triton: products with a few vectors, and rows made dense.

A mask word covers 64 columns, and `starts` says how many values of its row precede it: int32, or the bits of uint16 as int16,
which are read without a sign. A thread takes four adjacent columns: the set bits below them in the word give the place of their
first value, and the next three follow it. So no thread waits for another one, and neighbouring threads read neighbouring
values. Each sum has one order, whatever the timing.
"""

import triton
import triton.language as tl

WORD = tl.constexpr(64)
WIDTH = tl.constexpr(4)  # columns of a thread at a time
GROUPS_IN_WORD = tl.constexpr(16)


@triton.jit
def _ones(bits):
    """The number of set bits of uint64; the compiler knows this form and makes it one instruction for each half."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _words(mask, starts, row, word, WORDS: tl.constexpr):
    """Mask words of rows, uint64, and the number of values of the row before each; behind the last word, that one again."""
    place = row.to(tl.int64)[:, None] * WORDS + tl.minimum(word, WORDS - 1)[None, :]
    before = tl.load(starts + place).to(tl.int32)
    if starts.dtype.element_ty == tl.int16:
        before = before & 0xFFFF
    return tl.load(mask + place).to(tl.uint64, bitcast=True), before


@triton.jit
def _four(own, place, left, CHECK: tl.constexpr):
    """The four values from a place. CHECK: only `left` values follow the first one of the row."""
    if CHECK:
        a = tl.load(own + place, mask=place < left, other=0)
        b = tl.load(own + place + 1, mask=place + 1 < left, other=0)
        c = tl.load(own + place + 2, mask=place + 2 < left, other=0)
        d = tl.load(own + place + 3, mask=place + 3 < left, other=0)
    else:
        a, b = tl.load(own + place), tl.load(own + place + 1)
        c, d = tl.load(own + place + 2), tl.load(own + place + 3)
    return a, b, c, d


@triton.jit
def _columns(bits, before, own, left, GROUPS: tl.constexpr, CHECK: tl.constexpr):
    """The values of the four columns of each group, and their bits. A value without its bit is any number."""
    shift = (tl.arange(0, GROUPS) % GROUPS_IN_WORD * WIDTH).to(tl.uint64)[None, :]
    below = (tl.full([1, GROUPS], 1, tl.uint64) << shift) - 1
    mine = (bits >> shift).to(tl.int32)
    a, b, c, d = _four(own, before + _ones(bits & below), left, CHECK)
    first, second, third = (mine & 1) != 0, (mine & 2) != 0, (mine & 4) != 0
    at_1, next_1, last_1 = tl.where(first, b, a), tl.where(first, c, b), tl.where(first, d, c)
    at_2, next_2 = tl.where(second, next_1, at_1), tl.where(second, last_1, next_1)
    return a, at_1, at_2, tl.where(third, next_2, at_2), mine


@triton.jit
def _inputs(x, token, tokens, column, columns, stride, INSIDE: tl.constexpr):
    """Inputs of columns, shape (tokens, columns). INSIDE: there are so many columns."""
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    if INSIDE:
        inside = (token < tokens)[:, None] & (column >= 0)[None, :]
    return tl.load(x + token[:, None] * stride + column[None, :], mask=inside, other=0)


@triton.jit
def _add(total, values, inputs, bit, DOT: tl.constexpr, WIDEN: tl.constexpr):
    """`total` and the products of one column of each group."""
    if DOT:
        if WIDEN:
            values, inputs = values.to(tl.float32), inputs.to(tl.float32)
        tile = tl.where(bit != 0, values, tl.zeros_like(values))
        total = tl.dot(tile, tl.trans(inputs), total, input_precision="ieee")
    else:
        product = values.to(tl.float32)[None, :, :] * inputs.to(tl.float32)[:, None, :]
        total = tl.where((bit != 0)[None, :, :], total + product, total)
    return total


@triton.jit
def _tile(
    total, bits, before, own, left, x, token, tokens, base, columns, stride,
    GROUPS: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr, CHECK: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """`total` and the products of a tile of columns from `base`."""
    a, b, c, d, mine = _columns(bits, before, own, left, GROUPS, CHECK)
    column = tl.arange(0, GROUPS) * WIDTH + base
    total = _add(total, a, _inputs(x, token, tokens, column, columns, stride, INSIDE), mine & 1, DOT, WIDEN)
    total = _add(total, b, _inputs(x, token, tokens, column + 1, columns, stride, INSIDE), mine & 2, DOT, WIDEN)
    total = _add(total, c, _inputs(x, token, tokens, column + 2, columns, stride, INSIDE), mine & 4, DOT, WIDEN)
    return _add(total, d, _inputs(x, token, tokens, column + 3, columns, stride, INSIDE), mine & 8, DOT, WIDEN)


@triton.jit
def _sums(
    mask, starts, values, offsets, stored, x, row, token, tokens, columns, stride, start, end, WORDS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """The sums of a program over the columns from `start` to `end`, shape (TOKENS, ROWS)."""
    first = tl.load(offsets + row)
    own, left = values + first[:, None], (stored - first)[:, None]
    whole = start + (end - start) // (GROUPS * WIDTH) * (GROUPS * WIDTH)
    if DOT:
        total = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        total = tl.zeros([TOKENS, ROWS, GROUPS], tl.float32)
    word = tl.arange(0, GROUPS) // GROUPS_IN_WORD + start // WORD
    bits, before = _words(mask, starts, row, word, WORDS)
    for base in range(start, whole, GROUPS * WIDTH):
        these, places = bits, before
        # The next words are on their way while these are used: values cannot be asked for before their words are there.
        word += GROUPS // GROUPS_IN_WORD
        bits, before = _words(mask, starts, row, word, WORDS)
        total = _tile(
            total, these, places, own, left, x, token, tokens, base, columns, stride, GROUPS, DOT, WIDEN, CHECK, True
        )  # fmt: skip
    if whole < end:
        bits = tl.where((word < WORDS)[None, :], bits, tl.zeros_like(bits))
        total = _tile(
            total, bits, before, own, left, x, token, tokens, whole, columns, stride, GROUPS, DOT, WIDEN, CHECK, False
        )  # fmt: skip
    if DOT:
        result = tl.trans(total)
    else:
        result = tl.sum(total, 2)
    return result


@triton.jit
def products_kernel(
    mask, starts, values, offsets, x, y, stored, rows, columns, tokens, stride, part,
    WORDS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    DOT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """y[split, token, row] = the sum of W[row, c] x[token, c] over the `part` columns of a split, in float32.

    A program takes ROWS rows, and GROUPS groups of columns at a time. DOT: by products of matrices, whose sizes are 16 or more;
    WIDEN: in float32. `stored` is the number of values, and `part` a multiple of the columns of a tile.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    start = tl.program_id(1) * part
    end = tl.minimum(start + part, columns)
    behind = tl.program_id(0) * ROWS + ROWS
    if (behind <= rows) & (tl.load(offsets + tl.minimum(behind, rows)) + WIDTH <= stored):
        total = _sums(
            mask, starts, values, offsets, stored, x, place, token, tokens, columns, stride, start, end,
            WORDS, TOKENS, ROWS, GROUPS, DOT, WIDEN, False,
        )  # fmt: skip
    else:  # nothing behind the last value is read; the last row stands in for rows behind it
        total = _sums(
            mask, starts, values, offsets, stored, x, tl.minimum(place, rows - 1), token, tokens, columns, stride, start, end,
            WORDS, TOKENS, ROWS, GROUPS, DOT, WIDEN, True,
        )  # fmt: skip
    target = y + (tl.program_id(1) * tokens + token.to(tl.int64)[:, None]) * rows + place[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=(token < tokens)[:, None] & (place < rows)[None, :])


@triton.jit
def expand_kernel(
    mask, starts, values, offsets, dense, rows, columns, first,
    WORDS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """dense[i, c] = W[first + i, c] for `rows` rows, in the dtype of `dense`. A thread takes two adjacent columns."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first + tl.minimum(place, rows - 1)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    shift = (group % (WORD // 2) * 2).to(tl.uint64)[None, :]
    below = (tl.full([1, GROUPS], 1, tl.uint64) << shift) - 1
    bits, before = _words(mask, starts, row, group // (WORD // 2), WORDS)
    mine = tl.where((group < WORDS * (WORD // 2))[None, :], (bits >> shift).to(tl.int32), 0)
    at = values + tl.load(offsets + row)[:, None] + (before + _ones(bits & below))
    left = tl.load(at, mask=(mine & 1) != 0, other=0)
    right = tl.load(at + (mine & 1), mask=(mine & 2) != 0, other=0)
    column = group[:, None] * 2 + tl.arange(0, 2)[None, :]
    target = dense + place.to(tl.int64)[:, None, None] * columns + column[None, :, :]
    inside = (place < rows)[:, None, None] & (column < columns)[None, :, :]
    tl.store(target, tl.join(left, right).to(dense.dtype.element_ty), mask=inside)
