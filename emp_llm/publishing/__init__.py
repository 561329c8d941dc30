"""Publishing: the model card of a pruned checkpoint, its records without local paths, and the push of all files.

May use every room up to `reporting`. Only `runs` and the command `push` use this room.
"""
