"""Products of packed rows by torch alone, where no kernel of ours can be compiled."""

import torch
from torch import Tensor

from emp_llm.runtime.kernels import WORD_COLUMNS
from emp_llm.runtime.packed_rows import PackedRows

_TILE = 1 << 19  # weights that are dense at a time


class TorchProducts:
    """Multiplies packed rows by torch alone: rows are made dense a part at a time. Slow; for any device.

    Args:
        rows: on the device of the activations.
    """

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """As `CpuProducts`."""
        rows, offsets = self._rows, self._rows.offsets.tolist()
        bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=rows.mask.device)
        height = max(1, _TILE // (rows.words * WORD_COLUMNS))
        result = torch.empty(x.shape[0], rows.rows, dtype=x.dtype, device=x.device)
        for first in range(0, rows.rows, height):
            mask = rows.mask[first : first + height]
            stored = (mask[:, :, None] & bits).ne(0).flatten(1)[:, : rows.columns]
            tile = torch.zeros(stored.shape, dtype=torch.float32, device=mask.device)
            values = rows.values[offsets[first] : offsets[first + mask.shape[0]]]
            tile.masked_scatter_(stored, values.float())
            result[:, first : first + height] = x.float() @ tile.T
        return result
