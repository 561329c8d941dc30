"""The pruned checkpoint on disk: written shard by shard with a journal, described by a manifest, and verified.

May use `pruning` and all rooms that it may use.
"""
