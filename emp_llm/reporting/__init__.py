"""Reports: runs as points, points as studies, their tables and figures; the tables that
commands print; and the push.

May use `evaluation`, `selection` (for the bound on s_eff), `options`, `records`, `hub` and the
rooms below these.
"""
