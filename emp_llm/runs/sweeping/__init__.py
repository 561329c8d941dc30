"""Sweeping: the points of a sweep, the stage that measures a point, and the folder that keeps the finished ones.

It may import from `runs.stages`, `reporting` and every room below these.
"""
