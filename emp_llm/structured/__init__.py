"""Heads and neurons removed from language models."""
