"""The stages of runs, shared by all commands: `calibrating`, `writing`, `evaluating` (dense or pruned) and `pushing`.

`stage` defines a stage and runs a list of them. Each stage runs once and is resumed separately. May use every room below
`runs`.
"""
