"""The walk: block by block through an update of the kept weights, or through healing.

Read `checks.py` (what can be said before) and `update.py` first; `moved.py` holds the moved weights
in files, `blocks.py` heals one block after the other.
"""
