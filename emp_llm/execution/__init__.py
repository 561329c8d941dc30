"""Models that run: loading, device maps, quantisation, offloaded weights, and forward passes block by block.

May use the rooms below it: common, options, storage, records, checkpoint and architecture. Nothing here knows of calibration,
pruning or evaluation.
"""
