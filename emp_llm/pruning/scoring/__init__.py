"""The scores of a run's targets, by a built-in criterion or the user's own.

May use all rooms up to `calibration`.
"""
