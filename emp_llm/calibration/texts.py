"""The texts of a calibration: recipe files that define them, mixes of several, and the reading of their rows.

A recipe is a TOML file in `calibration/` or elsewhere. It defines the source of the text, how its rows become token sequences,
and how many sequences of what length. `wikitext2,samples=16` is the recipe `wikitext2` with one field changed; a text file or
a Hub data set id in place of the name is a recipe with that source. Rows may be conversations, which the tokenizer's chat
template makes text of.

A mix names several: `a.jsonl:64,c4:64` takes 64 sequences of each, `a.jsonl,c4` half of --samples of each. `,field=value`
belongs to the part before it. Each part is read and tokenised as if it were alone.
"""

import json
import logging
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.common.paths import data_folder
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.records.base import converted
from emp_llm.records.corpus import Corpus

logger = logging.getLogger(__name__)
Render = Callable[[list[dict[str, Any]]], str]
CHAT_COLUMNS = ("messages", "conversations")  # used if a data set has no column "text"
FIELDS = tuple(field for field in Corpus.__struct_fields__ if field != "about")  # those that can be changed
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
_NUMBERS, _SWITCHES = ("samples", "seqlen"), ("stream", "shuffle")
_SAMPLES, _SEQLEN = 128, 512  # defaults of texts that name none
_SEQLEN_WITH_IMAGES = 2048  # an image is hundreds of tokens
_CHANGE = re.compile(r"\s*\w+\s*=")
_FILE = re.compile(r"[/\\]|\.(toml|txt|jsonl?|parquet)$")  # what follows the colon of a path, such as C:\a.txt


@dataclass
class _Part:
    """A part as the user wrote it: "name,field=value", and the number of its sequences."""

    name: str
    samples: int | None


def calibration_corpora(options: CalibrationOptions, context: int | None) -> list[Corpus]:
    """The parts of the calibration text, each with its samples; all have the same seqlen.

    Args:
        options: its `calibration`, `samples` and `seqlen`.
        context: the model's context length in tokens; a recipe's seqlen is shortened to it. None: unknown.

    Raises:
        UserError: a part is no text; the numbers of sequences are wrong, or given twice; a part is named twice; --seqlen
            exceeds the model's context, or the parts differ in their seqlen.
    """
    parts = _parts(options.text_name)
    corpora = [find_corpus(part.name) for part in parts]
    if len(parts) > 1:
        _refuse_repetition(parts, corpora)
        for part, corpus in zip(parts, corpora, strict=True):
            if re.search(r",\s*samples\s*=", part.name):
                _refuse_two_numbers(part)
                part.samples = corpus.samples
    samples = _numbers(parts, corpora, options.samples)
    length = _common_length(parts, corpora, options.seqlen, context)
    return [replace(corpus, samples=count, seqlen=length) for corpus, count in zip(corpora, samples, strict=True)]


def has_images(calibration: str) -> bool:
    """Whether a part of a calibration text has a column of images."""
    return any(find_corpus(part.name).image is not None for part in _parts(calibration))


def _parts(text: str) -> list[_Part]:
    parts: list[_Part] = []
    for item in text.split(","):
        if parts and (_CHANGE.match(item) or item.strip() in ("", *FIELDS)):
            value = re.match(r"(.*[^:\s]):([0-9]+)\s*$", item)
            if value is not None and not item.strip().startswith("join"):
                first = parts[-1].name.partition(",")[0]
                raise UserError(
                    f"--calibration {quotable(text)!r}: the number of sequences follows the name of the text. Write "
                    f"{first}:{value[2]},{value[1]}"
                )
            parts[-1].name += f",{item}"
        else:
            parts.append(_part(item.strip(), text))
    return parts


def _part(item: str, text: str) -> _Part:
    """A part without its changes: a name, or a name, a colon and a number."""
    name, colon, number = item.rpartition(":")
    if not colon or _FILE.search(number) or Path(item).exists():
        return _Part(item, None)
    if not (number.isascii() and number.isdigit() and len(number) < 19 and int(number) > 0):
        raise UserError(
            f"--calibration {quotable(text)!r}: after the colon stands the number of sequences of a text, at least 1, such as "
            f"{name or 'wikitext2'}:64; got {quotable(number)!r}."
        )
    if not name:
        raise UserError(f"--calibration {quotable(text)!r}: the name of the text is missing before :{number}.")
    return _Part(name, int(number))


def _refuse_two_numbers(part: _Part) -> None:
    if part.samples is not None:
        raise UserError(f"--calibration: {part.name!r} has both a number after its colon and samples=; leave one out.")


def _refuse_repetition(parts: list[_Part], corpora: list[Corpus]) -> None:
    """Raise UserError if two parts are the same text, although their numbers of sequences may differ."""
    seen: dict[Corpus, str] = {}
    for part, corpus in zip(parts, corpora, strict=True):
        file = None if corpus.file is None else str(Path(corpus.file).resolve())
        text = replace(corpus, file=file, samples=None, about="")
        if text in seen:
            raise UserError(
                f"--calibration: {part.name.partition(',')[0]!r} is the same text as {seen[text]!r}; name it once, with the "
                "sum of the sequences."
            )
        seen[text] = part.name.partition(",")[0]


def _numbers(parts: list[_Part], corpora: list[Corpus], samples: int | None) -> list[int]:
    """The number of sequences of each part."""
    given = [part.samples for part in parts if part.samples is not None]
    if given and samples is not None:
        raise UserError(
            f"--samples {samples}: --calibration already sets the number of sequences of its texts; leave --samples out, or "
            "the numbers."
        )
    if len(parts) == 1:
        return [given[0] if given else samples or corpora[0].samples or _SAMPLES]
    if given and len(given) < len(parts):
        bare = next(part.name for part in parts if part.samples is None)
        raise UserError(
            f"--calibration: {bare!r} has no number of sequences, but another part has one. Give every part a number, such as "
            f"{bare}:64, or give none and set --samples."
        )
    if given:
        return given
    total = samples or _SAMPLES
    share, rest = divmod(total, len(parts))
    if share == 0:
        raise UserError(f"--samples {total}: --calibration names {len(parts)} texts, and each needs at least one sequence.")
    return [share + rest] + [share] * (len(parts) - 1)


def _common_length(parts: list[_Part], corpora: list[Corpus], seqlen: int | None, context: int | None) -> int:
    """Tokens per sequence: --seqlen, or the recipes', shortened to the context."""
    if seqlen is not None:
        if context is not None and seqlen > context:
            raise UserError(f"--seqlen {seqlen} is longer than the model's context of {context} tokens.")
        return seqlen
    named = [(part.name, corpus.seqlen) for part, corpus in zip(parts, corpora, strict=True) if corpus.seqlen is not None]
    default = _SEQLEN_WITH_IMAGES if any(corpus.image for corpus in corpora) else _SEQLEN
    named = named or [(parts[0].name, default)]
    lengths: dict[int, str] = {}
    for name, length in named:
        shorter = length if context is None else min(length, context)
        if shorter < length:
            logger.info("seqlen %d of recipe %s is shortened to the model's context of %d tokens.", length, name, shorter)
        lengths.setdefault(shorter, name)
    if len(lengths) > 1:
        told = ", ".join(f"{name} has {length}" for length, name in lengths.items())
        raise UserError(f"--calibration: its texts differ in tokens per sequence ({told}). Give one length with --seqlen.")
    return next(iter(lengths))


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
    return replace(corpus, **values).check(changes or "the corpus")


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
    return corpus if corpus.file is None else replace(corpus, file=str(path.parent / corpus.file))


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


class ChatText(str):
    """A conversation as text. The template has written the special tokens, so that the tokenizer must add none."""

    __slots__ = ()


def messages_in(value: Any) -> list[dict[str, Any]] | None:
    """The messages of a row, each with "role" and "content"; None if the row holds no conversation.

    Args:
        value: a list of messages with "role" and "content", or with "from" and "value" as in ShareGPT.
    """
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        return None
    if all("role" in each and "content" in each for each in value):
        return [{name: part for name, part in each.items() if part is not None} for each in value]
    if all("from" in each and "value" in each for each in value):
        return [{"role": _ROLES.get(each["from"], each["from"]), "content": each["value"]} for each in value]
    return None


def chat_text(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> ChatText:
    """A conversation as text.

    Args:
        messages: of `messages_in`.
        tokenizer: the model's.
        where: the data set, for errors.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{where}: its rows are conversations, and the tokenizer of the model has no chat template. Name a column of text "
            "with ,column=NAME, or add chat_template.jinja to the model's folder."
        )
    try:
        return ChatText(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"{where}: the chat template refuses a conversation ({reason(error)}).") from error
