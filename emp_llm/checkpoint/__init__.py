"""Checkpoints in the format of transformers: safetensors headers, the bytes of each matrix, and the identity of the weights.

Files are not trusted, and never changed. May use `common` and `storage`; does not import torch.
"""
