"""Heads and neurons of a language model: found by their names and shapes, scored, chosen, and
removed from its checkpoint.
"""
