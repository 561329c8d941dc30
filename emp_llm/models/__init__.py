"""Models: blocks, layers, experts, their names in the checkpoint, targets; loading, offload, one
block at a time; and the masks of a model in memory.

No code is specific to a model family. `layers`, `architecture` and `placement` import neither torch
nor transformers. `reapply.py` gives a model its zeros back, once or in every step of a training.
"""
