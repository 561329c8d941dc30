"""Checkpoints and files: safetensors headers, the bytes of each matrix, the identity of the
weights, locks, output folders.

Packed checkpoints too: lossless, one bit for each weight, and the weights that are not zero. Input
files are neither trusted nor changed. May use `common`; torch is imported only for tensors.
"""
