"""The cache folder, for results that can be recomputed."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$EMP_LLM_CACHE, else emp_llm in $XDG_CACHE_HOME or ~/.cache. The folder may not exist yet."""
    root = os.environ.get("EMP_LLM_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "emp_llm"
