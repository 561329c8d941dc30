"""The rows of a matrix without their zeros: a bitmask and the values that are left, as
`packed_format` describes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from emp_llm.checkpoint.matrices import WORD, Bytes, Words, mask_of, nonzero_words, put_zeros_in

WORD_COLUMNS = 64  # weights that a word of a mask covers; each row begins with a new word
_TILE = 1 << 19  # weights that are dense at a time
_UNSIGNED = {2: torch.uint16, 4: torch.uint32}


@dataclass(frozen=True)
class PackedRows:
    """A matrix of `rows` x `columns` weights in packed form, on one device.

    Attributes:
        mask: uint8, shape (rows, bytes): bit j of a row is 1 if weight j is stored, the lowest bit
            of a byte first; padded with zeros to words of 64 bits.
        values: the weights that are not zero, row by row, in their dtype; shape (number of them,).
        offsets: int64, shape (rows + 1,): the position in `values` of each row's first one, and
            their number.
        columns: number of inputs.
    """

    mask: Tensor
    values: Tensor
    offsets: Tensor
    columns: int

    @property
    def rows(self) -> int:
        return self.mask.shape[0]

    @property
    def words(self) -> int:
        """Mask words of a row."""
        return self.mask.shape[1] * 8 // WORD_COLUMNS

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.mask.nbytes + self.values.nbytes + self.offsets.nbytes

    @property
    def zeros(self) -> float:
        """The fraction of weights that are not stored."""
        return 1 - self.values.numel() / max(1, self.rows * self.columns)

    def to(self, device: torch.device | str) -> "PackedRows":
        """The same rows on another device."""
        return replace(
            self,
            mask=self.mask.to(device),
            values=self.values.to(device),
            offsets=self.offsets.to(device),
        )

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows first to last - 1, by default all, bit for bit; shape (rows, columns), on the
        CPU.
        """
        mask = self.mask[first:last]
        start = int(self.offsets[first])
        end = int(self.offsets[first + mask.shape[0]])
        values = self.values[start:end].cpu()
        stored = values.view(_UNSIGNED[values.element_size()]).numpy()
        words = put_zeros_in(mask.cpu().numpy().reshape(-1), stored, 8 * mask.numel())
        padded = torch.from_numpy(words).view(values.dtype)
        return padded.view(mask.shape[0], self.words * WORD_COLUMNS)[:, : self.columns].contiguous()


def pack_rows(weight: Tensor) -> PackedRows:
    """The packed form of a matrix, shape (outputs, inputs), of bfloat16, float16 or float32; a
    weight of -0.0 is stored.
    """
    words = weight.detach().cpu().contiguous().view(_UNSIGNED[weight.element_size()]).numpy()
    mask, values = pack_words([words.reshape(-1)], weight.dtype)
    return rows_of(mask, values, weight.shape[0], weight.shape[1])


def pack_words(chunks: Iterable[Words], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mask and the values of a tensor as in a packed file, from its words.

    Args:
        chunks: the words in order, in arrays whose lengths are multiples of 64, but for the last
            one.
        dtype: of the values.
    """
    masks: list[Bytes] = [np.empty(0, dtype=np.uint8)]
    kept: list[Words] = [np.empty(0, dtype=WORD[dtype.itemsize])]
    for words in chunks:
        masks.append(mask_of(words))
        kept.append(nonzero_words(words).copy())
    values = torch.from_numpy(np.concatenate(kept)).view(dtype)
    return torch.from_numpy(np.concatenate(masks)), values


def rows_of(mask: Tensor, values: Tensor, rows: int, columns: int) -> PackedRows:
    """The rows of a matrix, from its mask and values as they are in a packed file.

    The mask is copied if a row does not begin with a word; the values never are.

    Raises:
        ValueError: the mask has another length, or another number of set bits than there are
            values.
    """
    padded = -(-columns // WORD_COLUMNS) * WORD_COLUMNS
    if mask.numel() != -(-rows * columns // WORD_COLUMNS) * 8:
        raise ValueError("a mask does not fit its matrix")
    if padded == columns:
        of_rows = mask.view(rows, padded // 8)
    else:
        full = np.zeros((rows, padded), dtype=np.uint8)
        full[:, :columns] = np.unpackbits(
            mask.numpy(), count=rows * columns, bitorder="little"
        ).reshape(rows, columns)
        of_rows = torch.from_numpy(np.packbits(full, axis=1, bitorder="little"))
    counts = np.bitwise_count(of_rows.numpy()).sum(axis=1, dtype=np.int64)
    offsets = torch.from_numpy(np.append(np.int64(0), counts.cumsum()))
    if int(offsets[-1]) != values.numel():
        raise ValueError(
            f"its mask has {int(offsets[-1]):,} bits set for {values.numel():,} values"
        )
    return PackedRows(of_rows, values, offsets, columns)


def torch_product(rows: PackedRows, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ W.T + bias by torch alone, for any device: rows are made dense a few at a time. Slow.

    Args:
        rows: W, on the device of x.
        x: shape (tokens, inputs).
        bias: shape (outputs,).

    Returns:
        Summed in float32, in the dtype of x, shape (tokens, outputs).
    """
    offsets = rows.offsets.tolist()
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    height = max(1, _TILE // (rows.words * WORD_COLUMNS))
    result = torch.empty(x.shape[0], rows.rows, dtype=x.dtype, device=x.device)
    for first in range(0, rows.rows, height):
        last = min(first + height, rows.rows)
        if x.device.type == "cpu":
            tile = rows.dense(first, last).float()
        else:
            stored = (rows.mask[first:last, :, None] & bits).ne(0).flatten(1)[:, : rows.columns]
            tile = torch.zeros(stored.shape, dtype=torch.float32, device=x.device)
            tile.masked_scatter_(stored, rows.values[offsets[first] : offsets[last]].float())
        result[:, first:last] = x.float() @ tile.T + (
            0 if bias is None else bias[first:last].float()
        )
    return result
