"""Reporting: tables of runs, sweeps and measures for the terminal, and the report page with its figures and CSV files.

`studies` reads the runs and computes the numbers; `figures` draws them. May use these two, `evaluation`, `records`, `storage`
and `common`.
"""
