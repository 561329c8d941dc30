"""JSON from untrusted files: limited in size and depth, and without duplicate keys."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from emp_llm.common.errors import UserError, reason
from emp_llm.common.wording import quotable

JSON_LIMIT = 1 << 24
INDEX_LIMIT = 1 << 26  # the largest published index has 9 MB


def read_json(path: Path, unique: bool = False, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        unique: refuse objects that hold a key twice.
        limit: largest size of the file in bytes.

    Raises:
        UserError: the file is not a JSON object, is too large, or is nested too deeply.
    """
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > limit:
                raise ValueError(f"it has {size:,} bytes, and {limit:,} are allowed")
            value = parse_json(file.read(size), **{"object_pairs_hook": unique_keys} if unique else {})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({reason(error)}). Download it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object.")
    return value


def parse_json(raw: bytes, **hooks: Any) -> Any:
    """JSON from bytes, with hooks of `json.loads`; ValueError if it is nested too deeply or is not Unicode text."""
    try:
        value = json.loads(raw.decode("utf-8"), **hooks)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on half a surrogate pair, which is not text
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair") from error
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `parse_json`: ValueError for an object that holds a key twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{quotable(twice)} occurs twice in it")
    return content
