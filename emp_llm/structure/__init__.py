"""Heads and neurons of a language model: found, scored, chosen, and removed from its checkpoint.

No code is specific to a model family: which rows and columns belong to a head or a neuron is measured. May use everything up to
`refit`.
"""
