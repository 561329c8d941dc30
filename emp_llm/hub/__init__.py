"""The Hugging Face Hub: download of models, and upload of files in one commit, both with retries of transient errors.

This room knows folders and files, not pruning or model cards. It may use `common`, `storage` and other lower rooms.
"""
