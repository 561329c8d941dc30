"""Effective Model Pruning (arXiv 2509.25606) on tensors: Algorithm 1 is `effective_mask` in `effective.py`.

A criterion (`wanda` in `criteria.py`) scores weights, a `KeepRule` (`rule.py`) says how many of them to keep, and `prune_rows` in
`rows.py` applies both with the fastest implementation for this machine. `reference.py` is the plain implementation in torch.
"""
