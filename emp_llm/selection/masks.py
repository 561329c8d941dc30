"""Masks: exactly k of each group, the largest, and among equal scores the lowest index.

Non-negative IEEE floats order as their bits do, so a score becomes an integer key, and the k-th largest key is found bit by
bit from the top: no sort, no rounding, the same on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_KEY_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
RADIX_BITS = 16


def order_keys(scores: Tensor) -> Tensor:
    """Integer keys, shape as `scores`, that order as |scores| does: int16 for bf16 and fp16, int32, int64."""
    return scores.abs().view(_KEY_DTYPES[scores.element_size()])


def key_values(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The scores that keys stand for, as float64: the inverse of `order_keys` for scores of `dtype`."""
    return keys.view(dtype).double()


@dataclass(frozen=True)
class Threshold:
    """Where each group is cut.

    Attributes:
        key: shape (groups, 1), the key of the k-th largest score: larger ones are all kept.
        above: int64, shape (groups, 1), how many scores are larger.
        ties: int64, shape (groups, 1), how many of those equal to it are kept as well, lowest index first.
    """

    key: Tensor
    above: Tensor
    ties: Tensor


def row_thresholds(keys: Tensor, counts: Tensor) -> Threshold:
    """Where to cut each row of keys, shape (rows, columns), so that `counts` (int64, shape (rows,)) are kept."""
    counts = counts.reshape(-1, 1)
    key = torch.zeros_like(keys[:, :1])
    for bit in reversed(range(keys.element_size() * 8 - 1)):
        candidate = key | (1 << bit)
        enough = (keys >= candidate).sum(1, keepdim=True) >= counts
        key = torch.where(enough, candidate, key)
    above = (keys > key).sum(1, keepdim=True)
    return Threshold(key, above, counts - above)


def keep_mask(keys: Tensor, threshold: Threshold) -> Tensor:
    """The mask (bool, shape as `keys`) that a threshold for each row, or one for all of them, stands for."""
    mask = keys > threshold.key
    tied = keys == threshold.key
    if bool((tied.sum(1, keepdim=True) > threshold.ties).any()):
        tied &= tied.cumsum(1, dtype=torch.int32) <= threshold.ties
    return mask | tied


def largest_mask(scores: Tensor, counts: Tensor) -> Tensor:
    """Keep the `counts[r]` largest |scores| of each row r.

    Args:
        scores: shape (rows, columns), floating, finite.
        counts: int64, shape (rows,), each between 0 and the number of columns.

    Returns:
        bool, shape (rows, columns), exactly `counts[r]` true in row r; ties go to the lowest column.
    """
    keys = order_keys(scores)
    return keep_mask(keys, row_thresholds(keys, counts))


class RadixSelect:
    """The k-th largest key of a group too large to hold: feed all of its keys once for each round.

    Each round fixes the next 16 bits of the key from a histogram of 65,536 counts: one round for 16-bit scores, two for
    32-bit ones.
    """

    def __init__(self, count: int, key_bytes: int) -> None:
        self._bits_left = key_bytes * 8
        self._dtype = _KEY_DTYPES[key_bytes]
        self._prefix = 0
        self._above = 0
        self._count = count
        self._histogram = torch.zeros(1 << RADIX_BITS, dtype=torch.int64)

    @property
    def rounds_left(self) -> int:
        """How many more times the keys must be fed."""
        return self._bits_left // RADIX_BITS

    def feed(self, keys: Tensor) -> None:
        """Count a piece of the group, any shape, in this round."""
        keys = keys.reshape(-1)
        if self._bits_left < keys.element_size() * 8:
            keys = keys[(keys >> self._bits_left) == self._prefix]
        digits = (keys >> (self._bits_left - RADIX_BITS)) & ((1 << RADIX_BITS) - 1)
        self._histogram += torch.bincount(digits.long(), minlength=1 << RADIX_BITS).cpu()

    def end_round(self) -> None:
        """Fix the next 16 bits from what was fed."""
        from_top = self._histogram.flip(0).cumsum(0)
        wanted = max(self._count, 1) - self._above  # of none, the cut is the largest key
        position = int(torch.searchsorted(from_top, wanted))
        self._above += int(from_top[position - 1]) if position else 0
        digit = (1 << RADIX_BITS) - 1 - position
        self._prefix = (self._prefix << RADIX_BITS) | digit
        self._bits_left -= RADIX_BITS
        self._histogram.zero_()

    def threshold(self) -> Threshold:
        """The cut, as tensors of shape (1, 1), once no round is left."""
        key = torch.tensor([[self._prefix]], dtype=self._dtype)
        above = torch.tensor([[self._above]], dtype=torch.int64)
        return Threshold(key, above, self._count - above)
