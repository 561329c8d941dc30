"""Reports: runs as points, points as studies, their tables, figures and page; the tables that commands
print; and the push of a checkpoint with its model card.

May use `evaluation`, `selection` (for the bound on s_eff), `options`, `records`, `hub` and the rooms below these.
"""
