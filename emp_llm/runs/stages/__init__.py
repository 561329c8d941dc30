"""The stages of a run: calibrate, write, judge, push. Each is run once and resumed separately; all commands share them.

May use every room below `runs`.
"""
