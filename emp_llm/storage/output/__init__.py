"""Outputs that appear complete or not at all: work folders, locks, and the journal for resuming an interrupted run.

May use `common` and `storage`.
"""
