"""From a recipe and norms to masks: the plan of a run, the masks of each block of rows, on CPU or GPU, and their statistics.

The folder `output` writes and verifies pruned checkpoints. May use all rooms up to `calibration`.
"""
