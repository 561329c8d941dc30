"""The walk: block by block through an update of the kept weights.

Read `checks.py` (what can be said before) and `update.py` first; `moved.py` holds the moved weights
in files.
"""
