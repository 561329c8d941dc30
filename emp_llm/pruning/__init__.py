"""From a recipe and norms to a pruned checkpoint: scores, counts, the mask of each chunk of rows
(on CPU or GPU), statistics.

`writing.py` writes the checkpoint, and `verification.py` checks it. May use all rooms up to
`update`.
"""
