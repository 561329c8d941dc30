"""Masks: exactly k scores of each group are kept, the largest; among equal scores, those with the lowest index.

The bits of non-negative IEEE floats, read as integers, are in the same order as the floats. These integers are the keys of the
scores. The k-th largest key is found without rounding, so the mask is the same on every device.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

_KEY_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
RADIX_BITS = 16
_LONG_ROW = 64  # columns from which numpy's sort is the fastest way


def order_keys(scores: Tensor) -> Tensor:
    """Integer keys in the order of |scores|, of the same shape: int16 for bfloat16 and float16, else int32 or int64."""
    return scores.abs().view(_KEY_DTYPES[scores.element_size()])


def key_values(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """|scores| from their keys, in float64: the inverse of `order_keys` for scores of a dtype."""
    return keys.view(dtype).double()


def masked_scores(keys: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """|scores| from their keys, in the dtype of the scores, where the mask is true; 0 elsewhere."""
    return (keys * mask).view(dtype)


@dataclass(frozen=True)
class Threshold:
    """The cut of each group.

    Attributes:
        key: shape (groups, 1), the key of the k-th largest score. All larger scores are kept.
        ties: int64, shape (groups, 1), how many of the scores equal to it are kept, lowest index first.
    """

    key: Tensor
    ties: Tensor


def row_thresholds(keys: Tensor, *counts: Tensor) -> list[Threshold]:
    """The cuts of rows of keys, for one or more counts of each row.

    Args:
        keys: from `order_keys`, shape (rows, columns).
        counts: int64, each of shape (rows,): how many scores of each row are kept, 0 to the number of columns.

    Returns:
        One threshold of `rows` groups for each of the counts. The rows are sorted once.
    """
    ordered = _sorted(keys)
    return [_threshold(ordered, count.reshape(-1, 1)) for count in counts]


def keep_mask(keys: Tensor, threshold: Threshold) -> Tensor:
    """The mask of rows of keys: bool, shape of `keys`. `threshold` holds one cut for each row, or one for all."""
    tied = keys == threshold.key
    tied &= tied.cumsum(1, dtype=torch.int32) <= threshold.ties
    return tied.logical_or_(keys > threshold.key)


def largest_mask(scores: Tensor, counts: Tensor) -> Tensor:
    """Keep the `counts[r]` largest |scores| of each row r.

    Args:
        scores: shape (rows, columns), floating, finite.
        counts: int64, shape (rows,), each between 0 and the number of columns.

    Returns:
        bool, shape (rows, columns), exactly `counts[r]` true in row r; ties go to the lowest column.
    """
    keys = order_keys(scores)
    (threshold,) = row_thresholds(keys, counts)
    return keep_mask(keys, threshold)


def pattern_mask(keys: Tensor, n: int, m: int) -> Tensor:
    """Keep the n largest of every m consecutive keys of a row; bool, shape of `keys`. The columns are a multiple of m."""
    groups = keys.reshape(-1, m)
    if m >= _LONG_ROW:
        (threshold,) = row_thresholds(groups, torch.full((groups.shape[0],), n, device=keys.device))
        return keep_mask(groups, threshold).reshape(keys.shape)
    places = groups.t().contiguous()
    ahead = torch.zeros(places.shape, dtype=torch.uint8, device=keys.device)  # how many keys of its group are ahead of each key
    for distance in range(1, m):
        first_wins = places[:-distance] >= places[distance:]
        ahead[distance:] += first_wins
        ahead[:-distance] += ~first_wins
    return (ahead < n).t().reshape(keys.shape)


def _threshold(ordered: Tensor, counts: Tensor) -> Threshold:
    """The cut of rows of sorted keys; `counts`: shape (rows, 1)."""
    columns = ordered.shape[1]
    places = (columns - counts).clamp(max=columns - 1)  # if none is kept, the cut is the largest key
    key = ordered.gather(1, places)
    larger = columns - torch.searchsorted(ordered, key, right=True)
    return Threshold(key, counts - larger)


def _sorted(keys: Tensor) -> Tensor:
    """Each row of keys in ascending order. On CPUs numpy sorts long rows of integers up to ten times as fast as torch."""
    keys = keys.contiguous()
    if keys.device.type != "cpu" or keys.shape[1] < _LONG_ROW:
        return keys.sort(dim=1).values
    kind: Literal["stable"] | None = "stable" if keys.element_size() == 2 else None  # stable means radix sort for 16 bits
    return torch.from_numpy(np.sort(keys.numpy(), axis=1, kind=kind))


class RadixSelect:
    """The k-th largest key of a group too large to hold. The caller feeds all keys once in each round.

    Each round fixes 16 more bits of the key, from a histogram of 65,536 counts: one round for 16-bit scores, two for 32-bit
    scores, four for 64-bit scores.

    Args:
        count: k, how many keys of the group are kept; may be 0.
        key_bytes: bytes of a key: 2, 4 or 8.
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
        """Count a piece of the group, of any shape, in this round."""
        keys = keys.reshape(-1)
        if self._bits_left < keys.element_size() * 8:
            keys = keys[(keys >> self._bits_left) == self._prefix]
        digits = (keys >> (self._bits_left - RADIX_BITS)) & ((1 << RADIX_BITS) - 1)
        self._histogram += torch.bincount(digits.long(), minlength=1 << RADIX_BITS).cpu()

    def end_round(self) -> None:
        """Fix the next 16 bits of the key."""
        from_top = self._histogram.flip(0).cumsum(0)
        rank = max(self._count, 1) - self._above  # if none is kept, the cut is the largest key
        position = int(torch.searchsorted(from_top, rank))
        self._above += int(from_top[position - 1]) if position else 0
        digit = (1 << RADIX_BITS) - 1 - position
        self._prefix = (self._prefix << RADIX_BITS) | digit
        self._bits_left -= RADIX_BITS
        self._histogram.zero_()

    def threshold(self) -> Threshold:
        """The cut, as tensors of shape (1, 1), after the last round."""
        key = torch.tensor([[self._prefix]], dtype=self._dtype)
        return Threshold(key, torch.tensor([[self._count - self._above]], dtype=torch.int64))
