"""Kept weights moved so that a layer loses less of its output: least squares and SparseGPT, on bare tensors.

`refit_rows` in `least_squares.py` fits the kept weights of a given mask. `sparsegpt` in `sparsegpt.py` chooses the mask while
it moves the weights. Both see the inputs of a layer only through their second moments. Beside torch, the folder imports
`selection` only.
"""
