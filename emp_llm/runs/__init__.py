"""The run of each command: `prune_run` for `prune`, and so on. A run is a list of stages, and the objects that they share.

The stages of `prune` are calibrate, write (masks and checkpoint), evaluate dense, evaluate pruned and publish. They are in
`stages`, one file for each kind; `stages.stage` runs them. The points of a sweep are in `sweeping`. May use every room.
"""
