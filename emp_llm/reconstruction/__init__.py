"""Kept weights moved so that a layer loses less of its output: least squares, SparseGPT and ADMM, on bare tensors.

`refit_rows` in `least_squares.py` fits the kept weights of a given mask. `sparsegpt` and `admm`, each in a file of its name,
choose the mask while they move the weights. All see the inputs of a layer only through their second moments. Beside torch, the
folder imports `selection` only.
"""
