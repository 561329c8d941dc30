"""Pixels pruned by Algorithm 1: the score of a pixel is its distance from the mean of its group.

    s = |x - mu|, a removed pixel becomes mu

A group is a whole channel, or a square patch of a channel (section "Featurewise Effective Pruning" of the paper). The text of
the paper centres patches on the mean of the channel; its published numbers are those of the patches' own means.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emp_llm.selection.reference import sum_rows, sum_vector
from emp_llm.selection.effective import effective_mask

_ROWS = 1 << 12  # patches at a time: their sums stay in a core's cache


@dataclass(frozen=True)
class PrunedPixels:
    """A pruned picture.

    Attributes:
        channels: dtype and shape of the original, with the mean in place of removed pixels.
        kept: bool, shape of `channels`, true where the pixel is kept.
    """

    channels: NDArray[Any]
    kept: NDArray[np.bool_]


def prune_pixels(
    channels: NDArray[Any], beta: float = 1.0, patch: int | None = None, channel_mean: bool = False
) -> PrunedPixels:
    """Keep the clip(floor(beta * N_eff), 1, N) pixels of each group that are farthest from the mean.

    Args:
        channels: integer or floating, finite, shape (channels, height, width).
        beta: multiple of the effective number to keep.
        patch: side of a patch; patches at the right and lower edge may be smaller. None: a group is a channel.
        channel_mean: patches are centred on the mean of the whole channel, not on their own.

    Returns:
        The pixels and their mask. The mean is rounded if pixels are integers. A group of equal pixels is kept whole.

    Raises:
        NonFiniteError: a pixel is NaN or infinite.
        ValueError: beta is not a positive finite number.
    """
    pruned, kept = np.empty_like(channels), np.empty(channels.shape, dtype=np.bool_)
    for number, channel in enumerate(channels):
        values = torch.from_numpy(channel.astype(np.float64))
        if patch is None:
            mask, means = (each.reshape(channel.shape) for each in _prune_rows(values.reshape(1, -1), beta, None))
        else:
            centre = (sum_vector(values), values.numel()) if channel_mean else None
            mask, means = _prune_patches(values, beta, patch, centre)
        kept[number] = mask.numpy()
        fill = means.numpy() if channel.dtype.kind == "f" else means.round().numpy()
        pruned[number] = np.where(kept[number], channel, fill.astype(channel.dtype))
    return PrunedPixels(pruned, kept)


_Centre = tuple[Tensor, int] | None  # sum and number of the pixels whose mean centres all groups; None: each its own


def _prune_patches(values: Tensor, beta: float, side: int, centre: _Centre) -> tuple[Tensor, Tensor]:
    """As `_prune_rows`, for a channel whose patches are groups."""
    mask, means = torch.empty(values.shape, dtype=torch.bool), torch.empty_like(values)
    for rows in _spans(values.shape[0], side):
        for columns in _spans(values.shape[1], side):
            part = values[rows, columns]
            height, width = min(side, part.shape[0]), min(side, part.shape[1])
            grid = part.reshape(part.shape[0] // height, height, -1, width).transpose(1, 2)
            pieces = [_prune_rows(piece, beta, centre) for piece in torch.split(grid.reshape(-1, height * width), _ROWS)]
            for whole, found in zip((mask, means), zip(*pieces, strict=True), strict=True):
                whole[rows, columns] = torch.cat(found).reshape(grid.shape).transpose(1, 2).reshape(part.shape)
    return mask, means


def _spans(size: int, side: int) -> list[slice]:
    """The pixels that fill whole patches, and the others."""
    whole = size - size % side
    return [span for span in (slice(0, whole), slice(whole, size)) if span.start < span.stop]


def _prune_rows(rows: Tensor, beta: float, centre: _Centre) -> tuple[Tensor, Tensor]:
    """The mask of rows of pixels, each a group, and the mean in place of each pixel: both of the shape of the rows."""
    total, size = (sum_rows(rows, lambda x: x)[0][:, None], rows.shape[1]) if centre is None else centre
    # N times the score: N x - sum x is exact for integers, so that equal distances are exactly equal.
    mask = effective_mask(rows * size - total, beta=beta)
    return mask, (total / size).expand(rows.shape)
