"""Atomic writes: even after a crash of the machine, a file has its old content or its new content."""

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content in one step. The content is on disk on return; the folder is created if missing.

    The temporary file is named `.NAME.partial`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of text in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sync_path(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(folder: Path) -> None:
    """`sync_path` of a folder and everything in it."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
