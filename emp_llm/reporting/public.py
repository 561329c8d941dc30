"""Removes local paths from records: pushed files name only models and files."""

import re
import shlex
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from emp_llm.records.base import Part

R = TypeVar("R", bound=Part)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_PATH = re.compile(r"/|~[\w.-]*/|\.{1,2}/|[A-Za-z]:[/\\]|\\\\")  # how a path begins that cannot be anything else
_NUMBER = re.compile(r":[0-9]+$")
_TEXTS = (".txt", ".json", ".jsonl", ".parquet", ".toml")
_MODELS = ("model", "of", "dataset")  # fields that hold a Hub id or a folder
_FILES = ("file", "match", "suite", "folder", "device_map")  # fields that hold a path, or a name without slashes
_MODEL_FLAGS = ("--model", "--calibration", "--baseline", "--push-to-hub")  # the same in commands


def public(record: R, *folders: str) -> R:
    """The same record without local paths: a path is reduced to its last component; Hub ids of models and data sets stay.

    Args:
        record: any record, with everything in it.
        folders: names of models that are known to be folders, although they may look like Hub ids.
    """
    return msgspec.convert(_public(msgspec.to_builtins(record), "", folders), type(record))


def local_folder(source: Any) -> tuple[str, ...]:
    """The name of a record's model if it is a folder; empty for one of the Hub."""
    return (source.model,) if source.revision is None else ()


def cached_repository(path: str) -> tuple[str, str] | None:
    """(Hub id, commit) of a folder in the Hub cache; None for any other folder."""
    found = _CACHED.search(str(Path(path).expanduser().absolute()))
    return (f"{found[1]}/{found[2]}", found[3]) if found else None


def _public(value: Any, key: str, folders: tuple[str, ...]) -> Any:
    """JSON values without folders; `key` is the name of the field that holds the value."""
    if isinstance(value, list):
        return [_public(each, key, folders) for each in value]
    if isinstance(value, dict):
        hub = value.get("model") if value.get("revision") else None
        return {
            name: each if each is not None and each == hub else _public(each, name, folders) for name, each in value.items()
        }
    if not isinstance(value, str):
        return value
    if key == "command":
        return _command(value, folders)
    if key in _MODELS:
        return _model(value, folders)
    return _options(value, key, folders) if key in _FILES or _PATH.match(value) else value


def _command(command: str, folders: tuple[str, ...]) -> str:
    try:
        words = shlex.split(command)
    except ValueError:  # without a closing quotation mark, its paths cannot be found
        return ""
    found, flag = [], ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append(f"{flag}{equals}{_options(value, flag, folders)}")
        else:
            found.append(_options(word, flag, folders))
    return shlex.join(found)


def _options(text: str, key: str, folders: tuple[str, ...]) -> str:
    """ "PATH", or "PATH,field=PATH", without folders; `key` is the field or the flag that it belongs to."""
    parts = []
    for part in text.split(","):
        field, equals, value = part.partition("=")
        if not equals:
            field, value = "", part
        number = _NUMBER.search(value) if key == "--calibration" and not equals else None  # of sequences: NAME:64
        value = value[: number.start()] if number else value
        shorten = _model(value, folders) if (key in _MODEL_FLAGS and not equals) or field == "dataset" else _file(value)
        parts.append(f"{field}{equals}{shorten}{number[0] if number else ''}")
    return ",".join(parts)


def _model(name: str, folders: tuple[str, ...]) -> str:
    """A Hub id as it is; the name of a folder without its path."""
    if "/" not in name and not _PATH.match(name):
        return name
    if _HUB_ID.fullmatch(name) and name not in folders and not name.endswith(_TEXTS) and not Path(name).exists():
        return name
    cached = cached_repository(name)
    return cached[0] if cached else _file(name)


def _file(path: str) -> str:
    """The last component of a path."""
    if "/" not in path and not _PATH.match(path):
        return path
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path
