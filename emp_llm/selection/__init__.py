"""The mathematics of Effective Model Pruning on bare tensors: criteria score weights, budgets count them, selections mask them.

`effective` is Algorithm 1. `row_pruning` prunes rows with the fastest implementation that this machine has. The folder imports
its own subfolders `arithmetic` and `kernels`, torch and numpy, and nothing else of this package.
"""
