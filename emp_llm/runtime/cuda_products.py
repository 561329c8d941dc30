"""Products of packed rows with activations on NVIDIA GPUs."""

import torch
from torch import Tensor

from emp_llm.runtime.kernels import cuda
from emp_llm.runtime.packed_rows import PackedRows

_TILE = 256 << 20  # bytes of rows that are dense at a time


class CudaProducts:
    """Multiplies packed rows on a GPU: one to 16 vectors from the packed form, more by dense rows and torch's product.

    It can be traced by torch.compile, and captured in a CUDA graph once it has run. The dense rows are a temporary tensor:
    torch gives its memory from one layer to the next, in the order of the stream.

    Args:
        rows: on the GPU; kept as long as this object. In Triton's interpreter, on any device.
    """

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows.rows
        self._matrix = cuda.device_rows(rows.mask, rows.values, rows.offsets, rows.columns)

    @property
    def nbytes(self) -> int:
        """Bytes that it adds to the packed rows."""
        return self._matrix.starts.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """As `CpuProducts`."""
        if x.shape[0] <= cuda.MOST_TOKENS:
            return cuda.multiply(self._matrix, x)
        dtype = x.dtype if x.dtype == self._matrix.values.dtype else torch.float32
        inputs = x.to(dtype)
        height = max(1, _TILE // max(1, self._matrix.columns * dtype.itemsize))
        parts = [
            torch.mm(inputs, cuda.expand_rows(self._matrix, first, min(first + height, self._rows), dtype).T)
            for first in range(0, max(1, self._rows), height)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(x.dtype)
