"""Healing: the kept weights of a pruned model are trained on what the dense model does.

`training.py` trains a whole model by the dense one's probabilities of the next token; `blocks.py`
trains one decoder block after the other, for models larger than memory.
"""
