"""Models in memory: pruned in place, or their masks returned, by the same recipes and with the same
bits as the command.

`reapply.py` gives a model its zeros back, once or in every step of a training. May use every room
up to `hub`.
"""
