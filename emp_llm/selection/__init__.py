"""Effective Model Pruning (arXiv 2509.25606) on tensors: Algorithm 1 is `effective_mask` in
`effective.py`.

A criterion (`wanda` in `criteria.py`) scores weights, a `KeepRule` (`rule.py`) sets how many of
them to keep. `reference.py` defines every bit; `cpu_kernel.py` gives the same ones, faster.
Of this package, the folder imports only `common`.
"""
