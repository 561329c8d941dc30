"""Update: kept weights that move, by a refit, SparseGPT or ADMM.

Read `update.py` (the settings), `walk.py` (block by block through the dense and the pruned model)
and `moved.py` (the moved weights in files) first. `least_squares.py`, `sparsegpt.py` and `admm.py`
are the solvers, on bare tensors.
"""
