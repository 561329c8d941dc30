"""Packed checkpoints, lossless: one bit for each weight, and the values that are not zero. Also masks applied to loaded models.

This room reads and writes checkpoints by their bytes; only `reapply` works on a loaded model. May use every room up to
`pruning`.
"""
