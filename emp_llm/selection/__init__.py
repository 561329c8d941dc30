"""Effective Model Pruning (arXiv 2509.25606) on tensors: Algorithm 1 is `effective_mask` in
`effective.py`.

A criterion (`wanda` in `criteria.py`) scores weights, a `KeepRule` (`rule.py`) sets how many of
them to keep, and `prune_words` (`rows.py`) applies both with the fastest implementation for this
machine. `reference.py` defines every bit; `cpu_kernel.py` and `numpy_rows.py` give the same ones.
Of this package, the folder imports only `common`.
"""
