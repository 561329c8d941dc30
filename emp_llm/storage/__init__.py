"""Bytes on disk: direct reads and writes at any position, atomic writes, hashes, and JSON from untrusted files.

Independent of models. May use `common`; imports neither torch nor transformers.
"""
