"""Models that run: loading, device maps, quantisation, offloaded weights, and forward passes block by block.

Calibration, pruning and evaluation build on it. May use `common`, `options`, `storage`, `records`, `checkpoint` and
`architecture`.
"""
