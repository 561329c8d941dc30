"""The Hugging Face Hub: download of models, and push of a pruned checkpoint with its model card in one commit.

`local_model` may be used from everywhere; `push` and `card` use the records, the evaluation and the tables of `reporting`.
"""
