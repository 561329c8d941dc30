"""Models in memory: pruned in place, or their masks returned, by the same recipes and with the same
bits as the command. May use every room up to `hub`.
"""
