"""Small helpers for every room: errors and wording, memory and time, ranks, progress, paths,
tables, compiled functions.

Imports nothing else from the package; torch and numba are imported only when needed.
"""
