"""Effective Model Pruning (arXiv 2509.25606) on tensors: Algorithm 1 is `effective_mask` in `effective.py`.

A criterion (`wanda` in `criteria.py`) scores weights, a budget (`EffectiveBudget` in `budgets.py`) sets how many of them to
keep, and `prune_rows` in `row_pruning.py` applies both with the fastest implementation for this machine. The folder imports its
subfolders `arithmetic` and `kernels`, torch and numpy, and nothing else of this package.
"""
