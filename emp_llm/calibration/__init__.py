"""From text to activations: corpora and tokens, the hooks that sum the squares of inputs, and the passes that run the model.

May use all rooms up to `models`. Pruned propagation gets its masks through the protocol `passes.Masker`, so that nothing here
imports `pruning`.
"""
