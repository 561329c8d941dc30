"""The parts of a model: decoder blocks, layers, experts, their names in the checkpoint, and the targets to prune.

No code is specific to a model family. May use `common`, `storage` and `checkpoint`; imports transformers only for models with
unconventional names.
"""
