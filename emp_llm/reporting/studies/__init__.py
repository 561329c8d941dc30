"""Studies: outputs of runs, sweeps, measures and evaluations as points sorted by model, and the numbers in every figure.

This room draws and formats nothing. May use `evaluation`, `pruning` (for reading reports), `options`, `records` and the rooms
below these.
"""
