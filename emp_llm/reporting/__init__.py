"""Reports: runs as points, points as studies, their tables, figures and page; and the tables that commands print.

May use `evaluation`, `selection` (for the bound on s_eff), `options`, `records` and the rooms below these.
"""
