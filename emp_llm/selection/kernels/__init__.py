"""Kernels that prune rows at memory speed, with the same bits as the reference in plain torch.

`cpu` runs the kernel for CPUs (numba), `cuda` the kernel for NVIDIA GPUs (Triton), and `numpy_rows` needs no compiler. Each
takes a `KeepRule` and returns `RowFigures`. The folder imports `arithmetic`, and nothing else of this package; only `cuda`
needs torch.
"""
