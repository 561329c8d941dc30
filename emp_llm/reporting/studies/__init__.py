"""Studies: outputs of runs, sweeps, measures and evaluations as points sorted by model, and the numbers behind every figure.

It may import from `evaluation`, `pruning` (for reading reports), `options`, `records` and the rooms below these; it draws and
formats nothing.
"""
