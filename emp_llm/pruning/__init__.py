"""From a recipe and norms to masks: the plan of a run, the mask of each block of rows (on CPU or GPU), and its statistics.

The folder `output` writes and verifies pruned checkpoints. May use all rooms up to `calibration`.
"""
