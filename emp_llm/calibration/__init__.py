"""From text to activations: texts and tokens, the hooks that sum the squares of inputs, and the
passes that run the model.

May use `models` and the rooms that it uses. Pruned propagation gets its masks through the protocol
`passes.Masker`, so that nothing here imports `pruning`.
"""
