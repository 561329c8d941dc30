"""Text corpora: recipe files that define them, and the reading of their rows.

A recipe is a TOML file in `calibration/` or elsewhere. It defines the source of the text, how its rows become token sequences,
and how many sequences of what length. `wikitext2,samples=16` is the recipe `wikitext2` with one field changed; a text file or
a Hub data set id in place of the name is a recipe with that source.
"""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from emp_llm.calibration.conversations import COLUMNS as CHAT_COLUMNS
from emp_llm.calibration.conversations import Render, messages_in
from emp_llm.common.data_folders import data_folder
from emp_llm.common.errors import UserError, reason
from emp_llm.common.wording import quotable
from emp_llm.records.base import converted
from emp_llm.records.corpus import Corpus

_NUMBERS, _SWITCHES = ("samples", "seqlen"), ("stream", "shuffle")
FIELDS = tuple(field for field in Corpus.__struct_fields__ if field != "about")  # those that can be changed


def find_corpus(name: str) -> Corpus:
    """The corpus that --calibration names.

    Args:
        name: a recipe of `calibration/`, the path of a recipe or text file, or a Hub data set id; then ",field=value" for
            each field to change.

    Raises:
        UserError: it is none of these, or a field is unknown or wrong.
    """
    base, _, changes = name.partition(",")
    return with_changes(_named_corpus(base), changes)


def with_changes(corpus: Corpus, changes: str) -> Corpus:
    """A corpus with fields changed.

    Args:
        changes: "field=value,field=value"; may be empty.

    Raises:
        UserError: a field is unknown, or its value is wrong.
    """
    values: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        key, equals, text = (part.strip() for part in change.partition("="))
        if key not in FIELDS or not equals:
            raise UserError(f"{change!r} after the comma: expected field=value with a field of {', '.join(FIELDS)}.")
        value: Any = text
        if key in _NUMBERS and text.isascii() and text.isdigit() and len(text) < 19:
            value = int(text)
        elif key in _SWITCHES and text in ("true", "false"):
            value = text == "true"
        _check_kind(key, value, repr(quotable(change)))
        values[key] = value
    return msgspec.structs.replace(corpus, **values).check(changes or "the corpus")


def corpus_of(values: dict[str, Any], path: Path) -> Corpus:
    """A corpus from the fields of a recipe or suite file.

    Args:
        values: the fields.
        path: of that file, for errors. A relative `file` starts at its folder.

    Raises:
        UserError: a field is unknown, or its value is wrong.
    """
    for key in values.keys() & set(Corpus.__struct_fields__):
        _check_kind(key, values[key], str(path))
    corpus = converted(values, Corpus, str(path)).check(str(path))
    return corpus if corpus.file is None else msgspec.structs.replace(corpus, file=str(path.parent / corpus.file))


def _check_kind(key: str, value: Any, where: str) -> None:
    """Raise UserError, in the words of TOML, if a value does not have the type of its field."""
    kind, words = (int, "a whole number") if key in _NUMBERS else (bool, "true or false") if key in _SWITCHES else (str, "text")
    if type(value) is not kind:
        got = quotable(json.dumps(value, default=str, ensure_ascii=False))
        raise UserError(f"{where}: {key} must be {words}, got {got}.")


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a recipe or suite file; UserError if it cannot be read as TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as TOML ({reason(error)}).") from error


def text_rows(corpus: Corpus, seed: int = 0, render: Render | None = None) -> Iterator[str]:
    """The rows of a corpus, in order; a .txt file is one row.

    Args:
        seed: for corpora that are shuffled.
        render: makes text of a conversation; None: conversations are empty rows.

    Raises:
        UserError: the file, the data set or its column does not exist, or the column does not hold text.
    """
    if corpus.file:
        path = _existing(corpus.file)
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8", errors="replace")
            return
    render = render or (lambda _: "")
    data, column = open_data_set(corpus, seed)
    for row in data:
        text = text_in(row[column], f"{corpus.source}: column {column!r}")
        yield text if isinstance(text, str) else render(text)


def open_data_set(corpus: Corpus, seed: int = 0) -> tuple[Any, str]:
    """The data set of a corpus, shuffled if the corpus says so, and the column of its text.

    Raises:
        UserError: the data set cannot be loaded, or has no such column of text or images.
    """
    data = _loaded(corpus)
    columns = data.column_names or list(next(iter(data), {}))
    column = corpus.column
    if column == "text" and column not in columns:
        column = next((name for name in CHAT_COLUMNS if name in columns), column)
    for wanted, field in ((column, "column"), (corpus.image, "image")):
        if wanted is not None and wanted not in columns:
            what = "" if field == "column" else " of images"
            raise UserError(f"{corpus.source}: no column{what} {wanted!r}; it has {', '.join(columns)}. Add ,{field}=NAME.")
    if corpus.shuffle:
        data = data.shuffle(seed=seed, buffer_size=10_000) if corpus.stream else data.shuffle(seed=seed)
    return data, column


def text_in(value: Any, where: str) -> str | list[dict[str, Any]]:
    """The text or the messages of a row; UserError, which begins with `where`, if it holds neither."""
    if isinstance(value, str):
        return value
    messages = messages_in(value)
    if messages is None:
        raise UserError(f"{where} holds neither text nor conversations.")
    return messages


def _named_corpus(name: str) -> Corpus:
    recipes = {path.stem: path for path in sorted(data_folder("calibration").glob("*.toml"))}
    path = recipes.get(name, Path(name))
    if path.suffix == ".toml":
        return corpus_of(read_toml(path), path)
    if path.suffix in (".txt", ".jsonl", ".json", ".parquet"):
        return Corpus(file=name)
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return Corpus(dataset=name)
    raise UserError(
        f"--calibration {name!r} is not a recipe ({', '.join(recipes)}), a .toml recipe, a .txt, .jsonl or .parquet file, or "
        "a Hub data set id (owner/name)."
    )


def _loaded(corpus: Corpus) -> Any:
    import datasets

    try:
        if corpus.file:
            path = _existing(corpus.file)
            builder = "parquet" if path.suffix == ".parquet" else "json"
            return datasets.load_dataset(builder, data_files=corpus.file, split="train", streaming=corpus.stream)
        return datasets.load_dataset(corpus.dataset, corpus.config, split=corpus.split, streaming=corpus.stream)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the library has a dozen errors for a missing data set, network or config
        raise UserError(f"{corpus.source}: the data set cannot be loaded ({reason(error)}).") from error


def _existing(file: str) -> Path:
    path = Path(file)
    if not path.is_file():
        raise UserError(f"--calibration or --evaluate text {path}: no such file.")
    return path
