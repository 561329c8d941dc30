"""Floor 1: the mathematics of Effective Model Pruning, on bare tensors. Imports torch and nothing of ours above it."""
