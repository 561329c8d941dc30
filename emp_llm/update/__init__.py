"""Updates of the kept weights of a layer, on bare tensors.

Read `update.py` first: what every update says of itself, and the refit. `sparsegpt.py` and
`admm.py` search for the mask too. `least_squares.py` holds the products and factorisations.
"""
