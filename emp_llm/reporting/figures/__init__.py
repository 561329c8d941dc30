"""Figures: the drawings of a study as SVG and PNG. The same data give the same bytes.

Only this room imports matplotlib, and only when it draws. May use `reporting.studies`, `evaluation`, `selection` (for the bound
on s_eff) and `common`.
"""
