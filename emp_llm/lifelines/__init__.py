"""Processes of one job that watch each other: one that dies, or whose machine or network does, ends the others with its name.

The room knows nothing of what they compute, and may use none of the others.
"""
