"""Activations at inference: the hidden features of MLPs, pruned by Algorithm 1 for each token while a model runs.

No weight changes. The room finds the layers that read hidden features in a loaded model, and hooks them. It imports
`selection`, `common`, `records`, `architecture` and `execution`.
"""
