"""Refit: the kept weights are moved, block by block, so that the pruned layers return what the dense ones do.

`refit_pass` sends the calibration text through the dense and the pruned model side by side; `reconstruction` solves for the
weights. May use everything up to `calibration`; masks come from outside.
"""
