"""From text to activations: corpora and tokens, the hooks that sum the squares of inputs, and the passes that run the model.

May use execution and the rooms below it. Pruned propagation needs masks, which come through the protocol `block_pass.Masker`,
so that nothing here imports pruning.
"""
