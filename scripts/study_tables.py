"""The tables and the figure of `study_methods.py`."""

from pathlib import Path


def write_tables(folder: Path, results: list[Path]) -> None:
    """Write the tables."""
    raise NotImplementedError
