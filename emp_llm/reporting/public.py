"""Removes local paths from records: pushed files name only models and files."""

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from emp_llm.records.base import Part

R = TypeVar("R", bound=Part)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_TEXTS = (".txt", ".json", ".jsonl", ".parquet", ".toml")
# Fields and options that hold a Hub id or a folder, and fields that hold a path, or a name without slashes.
_MODELS = ("model", "of", "dataset", "--model", "--calibration", "--baseline", "--push-to-hub")
_FILES = ("file", "match", "suite", "folder", "device_map")


def public(record: R, folders: Collection[str] = ()) -> R:
    """The same record without local paths: a path is reduced to its last component; Hub ids of models and data sets stay.

    Args:
        record: any record, with everything in it.
        folders: names of models that are known to be folders, although they may look like Hub ids.
    """
    return msgspec.convert(_public(msgspec.to_builtins(record), "", folders), type(record))


def cached_repository(path: str) -> tuple[str, str] | None:
    """(Hub id, commit) of a folder in the Hub cache; None for any other folder."""
    found = _CACHED.search(str(Path(path).expanduser().absolute()))
    return (f"{found[1]}/{found[2]}", found[3]) if found else None


def _public(value: Any, key: str, folders: Collection[str]) -> Any:
    """JSON values without folders; `key` is the name of the field that holds the value."""
    if isinstance(value, list):
        return [_public(each, key, folders) for each in value]
    if isinstance(value, dict):
        return {name: _public(each, name, folders) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    if key == "command":
        words, flag = [], ""
        for word in shlex.split(value):
            if word.startswith("--"):
                flag = word.partition("=")[0]
            words.append(_without_folders(word, flag, folders))
        return shlex.join(words)
    if key in (*_MODELS, *_FILES) or value.startswith(("/", "~", "./", "../")):
        return _without_folders(value, key, folders)
    return value


def _without_folders(text: str, key: str, folders: Collection[str]) -> str:
    """ "PATH", "--option=PATH" or "PATH,field=PATH", with the last component of each path."""
    return re.sub(r"[^,=]+", lambda found: _name_of(found[0], key in _MODELS, folders), text)


def _name_of(path: str, may_be_model: bool, folders: Collection[str]) -> str:
    """The last component of a path; a Hub id as it is."""
    if may_be_model:
        name = path.partition(":")[0]  # without the number of sequences of a calibration text
        if _HUB_ID.fullmatch(name) and name not in folders and not name.endswith(_TEXTS) and not Path(name).exists():
            return path
        cached = cached_repository(path)
        if cached:
            return cached[0]
    return path.rstrip("/").rpartition("/")[2] or path
