"""Small helpers for every room: errors, memory, ranks, provenance, timing, progress bars, tables and wording.

Imports nothing else from the package; torch and numpy are imported only when needed.
"""
