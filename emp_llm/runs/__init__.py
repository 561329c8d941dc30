"""The run of each command, assembled from its options: a list of stages, and the objects that they share.

The folder `stages` holds the stages, `sweeping` the runs over many recipes. May use every room.
"""
