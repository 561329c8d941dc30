"""Effective Model Pruning of pixels: the rule of `selection` on the channels of an image, and what is lost.

The room reads images with Pillow, and compares them with scikit-image; both are imported only here, where they are used. It
imports `selection`, `common`, `storage` and `records`.
"""
