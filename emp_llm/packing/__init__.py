"""Packed checkpoints: lossless files with one bit per weight and the values that are not zero; and masks applied to models.

This room reads and writes checkpoints by their bytes and may use every room below it; `reapply` alone works on a loaded model.
"""
