"""Compiled kernels that prune rows at memory speed, to the same bits as the reference in plain torch.

`cpu` is the entry to the kernel for CPUs (numba, without torch), `cuda` to that for NVIDIA GPUs (Triton). A `KeepRule` goes in
and `RowFigures` come out. The folder imports `arithmetic` and, in each file, one compiler; nothing else of this package.
"""
