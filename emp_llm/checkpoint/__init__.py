"""Checkpoints in the format of transformers: safetensors headers, the bytes of each matrix, and the identity of the weights.

Input files are neither trusted nor changed. May use `common` and `storage`; torch is imported only for tensors.
"""
