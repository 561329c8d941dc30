"""The Hugging Face Hub: download of models, and upload of files in one commit, both with retries of transient errors.

This room works on folders and files, and leaves pruning and model cards to others. May use `common` and `checkpoint`.
"""
