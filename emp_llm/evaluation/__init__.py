"""Evaluation: suites, the perplexity of a text, lm-eval tasks, results files, and their comparison in a table.

It measures models that are loaded already, and knows nothing of pruning itself. It may import from `hub`, `calibration`,
`execution`, `checkpoint`, `records` and the rooms below these; only `harness` imports lm-eval, and only when it is used.
"""
