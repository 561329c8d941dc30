"""The Hugging Face Hub: its client with retries, its errors as sentences, and the download of
models into the cache.

May use `common` and `checkpoint`.
"""
