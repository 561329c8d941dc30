"""Models: blocks, layers, experts, their names in the checkpoint, targets; loading, offload, one
block at a time.

No code is specific to a model family. `layers`, `architecture` and `placement` import neither torch
nor transformers.
"""
