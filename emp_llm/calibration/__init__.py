"""From text to activations: corpora and tokens, the hooks that sum the squares of inputs, and the passes that run the model.

May use `execution` and the rooms that it uses. Pruned propagation gets its masks through the protocol `block_pass.Masker`, so
that nothing here imports `pruning`.
"""
