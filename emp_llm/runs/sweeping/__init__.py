"""The run of `sweep`: the points of a sweep, the stage that measures a point, and the folder that keeps finished points.

May use `runs.stages` and every room below it.
"""
