"""Differences between the signatures of runs: work is resumed only by a run with the same signature."""

from typing import Any


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The path and both values of the first field in which two nested records differ; None if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            difference = first_difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
            if difference is not None:
                return difference
        return None
    return None if old == new else (name, old, new)


def describe_difference(old: Any, new: Any) -> str | None:
    """`first_difference` in words, from the point of view of the new run; None if the records are equal."""
    difference = first_difference(old, new)
    if difference is None:
        return None
    name, old_value, new_value = difference
    if name.startswith("source.files."):
        return f"another source: {name.removeprefix('source.files.')} has another size or modification time"
    return f"{name} {_truncated(old_value)}, this one has {_truncated(new_value)}"


def _truncated(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
