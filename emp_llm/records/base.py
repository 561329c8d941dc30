"""Typed records with a format version: one declaration serves writing and reading.

A file record begins with `"format": "emp-llm KIND VERSION"`; other versions are refused. Fields are
attributes; `record["field"]` works too, as in the JSON.
"""

import re
from abc import ABCMeta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from emp_llm.checkpoint.files import JSON_LIMIT, read_json, write_bytes
from emp_llm.common.declared import node_in
from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.options.recipe import Recipe

R = TypeVar("R", bound="FileRecord")
T = TypeVar("T")


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a record. Fields with their default value are not written, unless the class says
    otherwise.
    """

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(_with_trees(self))
        return values

    def as_json(self) -> bytes:
        """The record as JSON, in one line."""
        return msgspec.json.encode(_with_trees(self))


def _with_trees(value: Any) -> Any:
    """A part of a record with trees for recipes, which msgspec would write field by field."""
    if isinstance(value, Recipe):
        return value.as_dict()
    if isinstance(value, list):
        return [_with_trees(each) for each in value]
    if isinstance(value, Part):
        fields = {name: _with_trees(value[name]) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value


if TYPE_CHECKING:
    RecordedRecipe = Recipe
else:  # to msgspec a type of its own, and no dataclass
    RecordedRecipe = ABCMeta("RecordedRecipe", (), {})
    RecordedRecipe.register(Recipe)


def _read(kind: type[Any], values: Any) -> Any:
    """The recipe of a record."""
    if kind is not RecordedRecipe:
        raise NotImplementedError
    return node_in(Recipe, values)


class FileRecord(Part, kw_only=True):
    """A record with a file of its own.

    Attributes:
        format: "emp-llm KIND VERSION".
    """

    KIND: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1
    format: str = ""

    def __post_init__(self) -> None:
        if not self.format:
            self.format = f"emp-llm {self.KIND} {self.VERSION}"

    def save(self, path: Path) -> None:
        """Write the record atomically, indented."""
        write_bytes(path, self.encoded())

    def encoded(self) -> bytes:
        """The content of its file."""
        return msgspec.json.format(self.as_json(), indent=1) + b"\n"


def read_record(path: Path, kind: type[R], limit: int = JSON_LIMIT) -> R:
    """Read a record from a JSON file.

    Args:
        limit: largest size of the file in bytes.

    Raises:
        UserError: the file cannot be read as JSON, holds another kind of record or another version
            of it, or a field is missing or wrong.
    """
    return record_of(
        read_json(path, strict=True, limit=limit, remedy="Write it again."), kind, str(path)
    )


def record_of(values: dict[str, Any], kind: type[R], where: str) -> R:
    """`read_record` for JSON that is already in memory; `where` names the file in errors."""
    version = version_of(values, kind)
    if version is None:
        raise UserError(f"{where}: this is not {_article(kind.KIND)} of emp-llm; give one.")
    if version != kind.VERSION:
        remedy = (
            "Update emp-llm: git pull in its clone."
            if version > kind.VERSION
            else "Write it again."
        )
        raise UserError(
            f"{where}: it has format version {version} of {_article(kind.KIND)}, and this emp-llm "
            f"reads version {kind.VERSION}. {remedy}"
        )
    return converted(values, kind, where)


def version_of(values: dict[str, Any], kind: type[FileRecord]) -> int | None:
    """The format version of a record's JSON; None for a record of another kind."""
    named = re.fullmatch(
        rf"emp-llm {re.escape(kind.KIND)} "
        rf"([0-9]{{1,9}})",
        str(values.get("format")),
    )
    return None if named is None else int(named[1])


def converted(values: Any, kind: type[T], where: str, strict: bool = True) -> T:
    """Convert JSON or TOML values to a typed structure.

    Args:
        strict: else numbers and switches may be text, such as "12" and "true".

    Raises:
        UserError: a field is missing, unknown or wrong. The message names the field and the rule.
    """
    try:
        return msgspec.convert(values, kind, strict=strict, dec_hook=_read)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UserError(f"{where}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.targets.kept`" as "targets.kept: expected
    int, got str.".
    """
    text, _, path = reason(error).partition(" - at `")
    for phrase, plain in (
        ("`", ""),
        ("Object missing required", "missing"),
        ("Object contains ", ""),
        (" | null", ""),
    ):
        text = text.replace(phrase, plain)
    field = path.removeprefix("key` in `").strip("$.`")
    text = text.replace(
        "Invalid enum value", "unknown key" if "key` in" in path else "unknown value"
    )
    if text.startswith((".", ": ")):  # of a recipe: the path inside it, and a sentence
        inside, _, words = text.partition(": ")
        field += inside
    else:
        words = quotable(text[:1].lower() + text[1:])
    words = words if words.endswith("?") else f"{words}."
    return f"{field}: {words}" if field else words


def _article(kind: str) -> str:
    return f"an {kind} file" if kind[:1] in "aeiou" else f"a {kind} file"
