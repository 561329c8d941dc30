"""Evaluation: suites, the perplexity of a text, lm-eval tasks, results files, and the table that
compares them.

It measures loaded models, dense or pruned. Only `harness` imports lm-eval, and only when it is
used. May use every room up to `hub`.
"""
