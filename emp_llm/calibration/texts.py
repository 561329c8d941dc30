"""Data sets of the Hub where there is no network."""

import gzip
import json
import logging
import lzma
import os
import re
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

import msgspec
from msgspec.structs import replace

from emp_llm.calibration.chat import BESIDE, CHAT_COLUMNS, PROMPT_COLUMN, Chat, text_column, text_in
from emp_llm.checkpoint.files import reading
from emp_llm.common.errors import UserError, count_of, did_you_mean, quotable, reason
from emp_llm.common.paths import data_folder
from emp_llm.common.ranks import ranks
from emp_llm.models.placement import plain_config
from emp_llm.records.base import Corpus, converted

logger = logging.getLogger(__name__)


_SECONDS = 5.0  # for an answer
NO_NETWORK = (
    "it is not in the cache, and the Hub cannot be reached. Give a file (--calibration FILE.txt, "
    "or --suite perplexity,file=FILE.txt), or download it once where there is a network."
)


def hub_answers() -> bool:
    """Whether the Hub answers, whatever it says."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # of the HTTP library, whichever it is, and of the system
        return False
    return True


@contextmanager
def cache_alone(alone: bool) -> Iterator[None]:
    """Inside this context, `datasets` looks in the cache alone, if so said. It asks a Hub that does
    not answer for half a minute.
    """
    import datasets
    from huggingface_hub import constants

    # The library asks for them at each call.
    places: list[tuple[Any, str]] = [
        (constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_DATASETS_OFFLINE"),
    ]
    before = [getattr(place, name) for place, name in places]
    if alone:
        for place, name in places:
            setattr(place, name, True)
    try:
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)


# Text in files: .txt, .jsonl and .json, also compressed as .gz, .xz or .zst, and .parquet.
#
# Rows are read as they are needed. A file that is damaged, empty or not in UTF-8 is refused, and
# the message names the line.


TEXT_ENDINGS = (".txt", ".jsonl", ".json", ".parquet")
_PACKED = (".gz", ".xz", ".zst")
_PIECE = 1 << 20  # bytes
_HEAD = 1000  # rows whose fields are looked at
_WINDOW = 1 << 31  # bytes; the largest of zstd --long
_BOM = b"\xef\xbb\xbf"


def ending_of(file: str) -> str | None:
    """What a file holds, by its name: one of `TEXT_ENDINGS`; None if it is none of them."""
    path = Path(file)
    if path.suffix in _PACKED and Path(path.stem).suffix != ".parquet":
        path = Path(path.stem)
    return path.suffix if path.suffix in TEXT_ENDINGS else None


def text_of(path: Path) -> str:
    """The text of a .txt file."""
    raw = b"".join(_pieces(path)).removeprefix(_BOM)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, raw.count(b"\n", 0, error.start) + 1) from error
    if not text.strip():
        raise UserError(f"{path}: it is empty. Give a file with text.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def columns_of(path: Path) -> list[str]:
    """The names of the fields of a file's rows, in their order."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return list(file.schema_arrow.names)
    rows = islice(_json_rows(path), _HEAD)
    return list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of a file, in order: mappings with those of these columns that they have. A row of
    JSON that is no mapping is as it is.
    """
    if path.suffix != ".parquet":
        for row in _json_rows(path):
            yield {n: row[n] for n in columns if n in row} if isinstance(row, dict) else row
        return
    import pyarrow

    with _parquet(path) as file:
        kind = pyarrow.struct(file.schema_arrow)
        there = [name for name in columns if name in file.schema_arrow.names]
        batches = file.iter_batches(batch_size=_HEAD, columns=there)
        while True:
            try:
                batch = next(batches, None)
                rows = None if batch is None else plain(batch.to_pylist(), pyarrow.list_(kind))
            except (OSError, ValueError, RecursionError) as error:  # of pyarrow, or of JSON in it
                raise _damaged(path, error) from error
            if rows is None:
                return
            yield from rows


def plain(value: Any, kind: Any = None, decoded: bool = False) -> Any:
    """A value of Arrow, pandas, numpy or torch, as JSON would have it: lists for arrays, and
    no fields that are None, because Arrow gives a mapping the fields of all the others.

    Args:
        kind: its type in Arrow, or the schema of a row; None: unknown.
        decoded: values of Arrow's type JSON are parsed, not text.
    """
    if getattr(kind, "extension_name", "") == "arrow.json":
        return value if decoded or value is None else json.loads(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        of = {field.name: field.type for field in kind or ()}
        return {name: plain(v, of.get(name), decoded) for name, v in value.items() if v is not None}
    if isinstance(value, list):
        of_each = getattr(kind, "value_type", None)
        return [plain(each, of_each, decoded) for each in value]
    return value


def _parquet(path: Path) -> Any:
    import pyarrow.parquet

    with reading(path), path.open("rb"):  # its errors name the file
        pass
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _json_rows(path: Path) -> Iterator[Any]:
    """The rows of a .jsonl file, one a line; or those of a list, if the file is one."""
    lines = _lines(_pieces(path))
    begin: list[bytes] = []
    for line in lines:
        begin.append(line.removeprefix(_BOM) if not begin else line)
        if begin[-1].strip():
            break
    else:
        raise UserError(f"{path}: it is empty. Give a file with rows of JSON.")
    whole = begin[-1].lstrip().startswith(b"[")
    if not whole and ending_of(str(path)) == ".json":  # one object may take many lines
        begin += lines
        try:
            json.loads(b"".join(begin))
            whole = True
        except ValueError:
            whole = False
    if whole:
        value = _parsed(path, b"".join([*begin, *lines]), 1)
        yield from value if isinstance(value, list) else [value]
        return
    number = 0
    for many in (begin, lines):
        for line in many:
            number += 1
            if line.strip():
                yield _parsed(path, line.rstrip(), number)


def _parsed(path: Path, raw: bytes, first: int) -> Any:
    """JSON that begins in line `first` of a file; UserError names the line that is wrong."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, first + raw.count(b"\n", 0, error.start)) from error
    except RecursionError as error:
        raise UserError(f"{path}: line {first} is nested too deeply. Remove it.") from error
    except json.JSONDecodeError as error:
        line = first + error.lineno - 1
        if error.msg == "Extra data" and line > first:
            raise UserError(
                f"{path}: a list ends before line {line}, where more follows. Write each row as an "
                'object, such as {"messages": [...]}, or the whole file as one list.'
            ) from error
        raise UserError(
            f"{path}: line {line} is not JSON ({error.msg.lower()}). Mend or remove it, or write "
            "the file again."
        ) from error


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file, with their ends."""
    rest: list[bytes] = []
    for piece in pieces:
        first, *more = piece.split(b"\n")
        rest.append(first)
        for line in more:
            yield b"".join(rest) + b"\n"
            rest = [line]
    if any(rest):
        yield b"".join(rest)


def _pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked."""
    try:
        with path.open("rb") as file:
            if path.suffix in (".gz", ".xz"):
                with gzip.open(file) if path.suffix == ".gz" else lzma.open(file) as unpacked:
                    yield from iter(lambda: unpacked.read(_PIECE), b"")
            elif path.suffix == ".zst":
                yield from _unpacked(path, file)
            else:
                yield from iter(lambda: file.read(_PIECE), b"")
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        with reading(path):
            raise error


def _unpacked(path: Path, file: Any) -> Iterator[bytes]:
    """The bytes of a .zst file, which may hold several frames."""
    from emp_llm.checkpoint.matrices import need_zstandard

    need_zstandard(str(path))
    import zstandard

    engine = None
    for raw in iter(lambda: file.read(_PIECE), b""):
        while raw:
            engine = engine or zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            try:
                yield engine.decompress(raw)
            except zstandard.ZstdError as error:
                raise _damaged(path, error) from error
            raw = engine.unused_data if engine.eof else b""
            engine = None if engine.eof else engine
    if engine is not None:
        raise EOFError("it ends within a frame")


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: it is damaged or incomplete ({reason(error)}). Download or write it again."
    )


def _not_utf8(path: Path, line: int) -> UserError:
    return UserError(
        f"{path}: line {line:,} is not UTF-8. Convert the file: iconv -f ENCODING -t UTF-8, with "
        "the encoding in which it was written, such as LATIN1 or UTF-16."
    )


# The texts of a calibration: recipe files that define them, mixes of several, and the reading of
# their rows.
#
# A recipe is a TOML file in `calibration/` or elsewhere. It defines the source of the text, how its
# rows become token sequences, and the number and length of these. `wikitext2,samples=16` is the
# recipe `wikitext2` with one field changed; a text file or a Hub data set id in place of the name
# is a recipe with that source. Rows may be conversations, which the tokenizer's chat template makes
# text of, or token ids. `self:NAME` is the text that the model itself writes when it continues the
# rows of NAME.
#
# A mix names several: `a.jsonl:64,c4:64` takes 64 sequences of each, `a.jsonl,c4` half of --samples
# of each. `,field=value` belongs to the name before it. Each text is read and tokenised as if it
# were alone.


# Those that --calibration can change.
FIELDS = tuple(field for field in Corpus.__struct_fields__ if field != "about")
# Defaults of recipes that do not set them.
_SAMPLES = 128
_SEQLEN = 512
_CHANGE = re.compile(r"\s*\w+\s*=")
# The colon of a path, such as C:\a.txt, has no number behind it.
_NUMBER = re.compile(r"(.+):([0-9]+)")
_LONGEST = 8192  # characters of a mix of names


def calibration_corpora(
    mix: str, context: int | None = None, samples: int | None = None, seqlen: int | None = None
) -> list[Corpus]:
    """The texts of a calibration, each with its samples; all have the same seqlen.

    Args:
        mix: the name of a text, or of several.
        context: the model's context length in tokens; a recipe's seqlen is shortened to it. None:
            unknown.
        samples: number of sequences; None: the recipe's.
        seqlen: tokens per sequence; None: the recipe's.

    Raises:
        UserError: a name is not that of a text, or stands twice; the numbers of sequences are
            wrong, or given twice; --seqlen exceeds the model's context, or the texts differ in
            their seqlen.
    """
    names = names_in(mix)
    corpora = {name: find_corpus(name) for name in names}
    if len({replace(corpus, samples=None) for corpus in corpora.values()}) < len(names):
        raise UserError(
            "--calibration names a text twice; name it once, with the sum of the sequences."
        )
    given = [name for name in names if _sets_samples(name)]
    if given and samples is not None:
        raise UserError(
            f"--samples {samples}: --calibration sets the numbers of its texts already; "
            "leave one of the two out."
        )
    total = samples or _SAMPLES
    numbers: list[int | None]
    if given:
        bare = next((name for name in names if name not in given), None)
        if bare is not None:
            raise UserError(
                f"--calibration: {bare!r} has no number of sequences, but another text has one. "
                f"Give every text a number, such as {bare.partition(',')[0]}:64, or give none and "
                "set --samples."
            )
        numbers = [corpus.samples for corpus in corpora.values()]
    elif len(names) == 1:
        numbers = [samples or corpora[names[0]].samples or _SAMPLES]
    elif total < len(names):
        raise UserError(
            f"--samples {total}: --calibration names {len(names)} texts, and each "
            "needs at least one sequence."
        )
    else:
        number, rest = divmod(total, len(names))
        numbers = [number + rest, *[number] * (len(names) - 1)]
    length = seqlen or _common_length(corpora, context)
    check_length(length, context)
    return [
        replace(corpus, samples=number, seqlen=length)
        for corpus, number in zip(corpora.values(), numbers, strict=True)
    ]


def check_length(length: int, context: int | None) -> None:
    """Raise UserError for sequences longer than a model's context; None: unknown."""
    if context is not None and length > context:
        raise UserError(
            f"--seqlen {length} is longer than the model's context of {context} tokens."
        )


def _common_length(corpora: dict[str, Corpus], context: int | None) -> int:
    """Tokens per sequence of the recipes, shortened to the context; UserError if they differ."""
    wanted = {name: corpus.seqlen for name, corpus in corpora.items() if corpus.seqlen is not None}
    longest = max(wanted.values(), default=_SEQLEN)
    lengths = {min(length, context or length) for length in wanted.values() or (longest,)}
    if len(lengths) > 1:
        named = ", ".join(
            f"{name.partition(',')[0]} has {length}" for name, length in wanted.items()
        )
        raise UserError(
            f"--calibration: its texts differ in tokens per sequence ({named}). Give "
            "one length with --seqlen."
        )
    (length,) = lengths
    if length < longest:
        logger.info("seqlen %d is shortened to the model's context of %d tokens.", longest, length)
    return length


def generates(calibration: str) -> bool:
    """Whether a calibration text, or one of a mix, is written by the model itself."""
    return any(find_corpus(name).generate for name in names_in(calibration))


def self_notes(calibration: str) -> list[str]:
    """What a dry run tells of a text that the model is to write itself; empty for other texts."""
    if not generates(calibration):
        return []
    return [f"--calibration {calibration}: the dense model first writes the text"]


def names_in(mix: str) -> list[str]:
    """The names in a mix, each "name,field=value"; "name:64" becomes "name,samples=64".

    Raises:
        UserError: it is a text, not the name of one.
    """
    if "\n" in mix or len(mix) > _LONGEST:
        raise UserError(
            f"--calibration: a text of {count_of(len(mix), 'character')}, where the name of one is "
            "wanted. In Python, give data=[text]; in a command, the path of a file."
        )
    names: list[str] = []
    items = mix.split(",")
    while items:
        name, rest = with_path(items)
        number = None if _is_file(name) else _NUMBER.fullmatch(name)
        there = _is_file(number[1] if number is not None else name)
        is_change = _CHANGE.match(items[0]) or items[0].strip() in ("", *FIELDS)
        if names and is_change and not there:
            names[-1] += f",{items.pop(0)}"
            continue
        names.append(name if number is None else f"{number[1]},samples={number[2]}")
        items = rest
    return names


def with_path(items: list[str]) -> tuple[str, list[str]]:
    """The first of some items that stood between commas, and the others. A path whose name has
    commas is one item, if the file is there.
    """
    for count in range(len(items), 0, -1):
        name = ",".join(items[:count])
        number = _NUMBER.fullmatch(name)
        if _is_file(name) or (number is not None and _is_file(number[1])):
            return name, items[count:]
    return items[0].strip(), items[1:]


def _sets_samples(name: str) -> bool:
    """Whether a name of a mix has a number of sequences."""
    return any(re.match(r"\s*samples\s*=", change) for change in with_path(name.split(","))[1])


def _is_file(name: str) -> bool:
    """Whether a text, or the prompts of one, is a file that is there."""
    return os.path.isfile(name) or os.path.isfile(name.removeprefix("self:"))


def find_corpus(name: str) -> Corpus:
    """The corpus that --calibration names.

    Args:
        name: a recipe of `calibration/`, the path of a recipe or text file, or a Hub data set id;
            "self" or "self:" before one of them; then ",field=value" for each field to change.

    Raises:
        UserError: it is none of these, or a field is unknown or wrong.
    """
    base, rest = with_path(name.split(","))
    changes = ",".join(rest)
    if base == "self" or (base.startswith("self:") and not os.path.isfile(base)):
        prompts = find_corpus(base[5:]) if base != "self" else Corpus(generate=True)
        return with_changes(replace(prompts, generate=True, join=None), changes)
    recipes = {path.stem: path for path in sorted(data_folder("calibration").glob("*.toml"))}
    path = recipes.get(base, Path(base))
    if path.suffix == ".toml":
        corpus = corpus_of(read_toml(path), path)
    elif ending_of(base) is not None:
        corpus = Corpus(file=base)
    elif base.count("/") == 1 and not base.startswith((".", "/")):
        corpus = Corpus(dataset=base)
    else:
        raise UserError(
            f"--calibration {base!r} is not a recipe ({', '.join(recipes)}), a .toml recipe, a "
            ".txt, .jsonl or .parquet file (.gz, .xz and .zst too), a Hub data set id "
            f"(owner/name), or self.{did_you_mean(base, recipes)}"
        )
    return with_changes(corpus, changes)


def for_model(corpus: Corpus, config: Any, tokenizer: Any) -> Corpus:
    """The corpus as a model needs it: "auto" in `bos` becomes "each" for Gemma, known by its model
    type, because its perplexity is many times as large without begin tokens.

    Args:
        config: the model's; None: unknown.
        tokenizer: the model's.
    """
    values = plain_config(config)
    types = values.get("model_type"), (values.get("text_config") or {}).get("model_type")
    needed = any("gemma" in str(name) for name in types) and tokenizer.bos_token_id is not None
    return replace(corpus, bos="each") if needed and corpus.bos == "auto" else corpus


def with_changes(corpus: Corpus, changes: str) -> Corpus:
    """A corpus with fields changed.

    Args:
        changes: "field=value,field=value"; may be empty.

    Raises:
        UserError: a field is unknown or without effect, or its value is wrong.
    """
    values: dict[str, Any] = msgspec.to_builtins(corpus)
    given: list[str] = []
    items = changes.split(",")
    while items:
        change = items.pop(0)
        if not change:
            continue
        key, equals, value = map(str.strip, change.partition("="))
        if key == "file":
            value, items = with_path([change.partition("=")[2], *items])
        if key not in FIELDS or not equals:
            raise UserError(
                f"{change!r} after the comma: expected field=value with a field of "
                f"{', '.join(FIELDS)}.{did_you_mean(key, FIELDS)}"
            )
        values[key] = value
        given.append(key)
    corpus = converted(values, Corpus, quotable(changes), strict=False).check(changes)
    _check_used(given, corpus, changes)
    return corpus


def corpus_of(values: dict[str, Any], path: Path) -> Corpus:
    """A corpus from the fields of a recipe or suite file.

    Args:
        values: the fields.
        path: the path of that file. A relative `file` starts at its folder.

    Raises:
        UserError: a field is unknown or without effect, or its value is wrong.
    """
    corpus = converted(values, Corpus, str(path)).check(str(path))
    _check_used(values, corpus, str(path))
    return corpus if corpus.file is None else replace(corpus, file=str(path.parent / corpus.file))


def _check_used(given: Iterable[str], corpus: Corpus, where: str) -> None:
    """Raise UserError for a field that a text in a file does not use."""
    if corpus.file is None:
        return
    unused = ["dataset", "config", "split"]
    if ending_of(corpus.file) == ".txt":
        unused += ["column", "stream", "shuffle"]
    name = next((name for name in given if name in unused), None)
    if name is not None:
        raise UserError(
            f"{quotable(where)}: {name} has no effect on {PurePath(corpus.file).name}. Leave it "
            "out."
        )


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a recipe or suite file; UserError if it cannot be read as TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as TOML ({reason(error)}).") from error


def text_rows(corpus: Corpus, seed: int = 0) -> Iterator[str | Chat | tuple[int, ...]]:
    """The rows of a corpus, texts, conversations or token ids, in order; a .txt file is one row, or
    a prompt a line.

    Args:
        seed: the seed of corpora that are shuffled.

    Raises:
        UserError: the file, the data set or its column does not exist, or the column does not hold
            text, or a conversation cannot be used.
    """
    if corpus.file is not None and ending_of(corpus.file) == ".txt":
        text = text_of(check_there(corpus.file))
        yield from text.split("\n") if corpus.generate else [text]
        return
    rows, column = _rows(corpus, seed)
    answered = corpus.column == "text" and not corpus.generate
    shuffled = " as shuffled" if corpus.shuffle else ""
    number = used = first = texts = 0
    wrong = ""
    try:
        for number, row in enumerate(rows, 1):
            where = f"{corpus.source}: row {number:,}{shuffled}"
            found = text_in(row, column, where, answered) if isinstance(row, Mapping) else None
            if found is None:
                if not first:
                    first = number
                    wrong = repr(row.get(column) if isinstance(row, Mapping) else row)
                continue
            used += 1
            texts += isinstance(found, str)
            yield found
    finally:
        if texts and column in (*CHAT_COLUMNS, PROMPT_COLUMN, "chosen") and ranks().main:
            logger.info(
                "%s: column %r holds text in %s, to which no chat template is applied.",
                corpus.source,
                column,
                count_of(texts, "row"),
            )
        if used and number > used and ranks().main:
            logger.warning(
                "warning: %s: %s of the %s that were read left out, because column %r holds "
                "neither text nor conversations there (the first is row %s).",
                corpus.source,
                f"{number - used:,}",
                f"{number:,}",
                column,
                f"{first:,}",
            )
    if not used:
        found_in = ": the file has no rows"
        if number:
            found_in = f"in any of {count_of(number, 'row')} ({quotable(wrong)} in row {first:,})"
        raise UserError(
            f"{corpus.source}: column {column!r} holds neither text nor conversations"
            f"{' ' if number else ''}{found_in}. Name a column of text with ,column=NAME."
        )


def _rows(corpus: Corpus, seed: int) -> tuple[Iterable[Any], str]:
    """The rows, shuffled if the corpus says so, and the name of the column of text."""
    if corpus.file is None:
        data, column = open_data_set(corpus, seed)
        schema = None if data.features is None else data.features.arrow_schema
        names = (column, *BESIDE)
        own = ({name: row[name] for name in names if name in row} for row in data)
        return (plain(row, schema, decoded=True) for row in own), column
    path = check_there(corpus.file)
    if ending_of(corpus.file) is None:
        raise UserError(f"{path}: its name must end in {', '.join(TEXT_ENDINGS)}.")
    column = _column(corpus, columns_of(path))
    rows: Iterable[Any] = rows_of(path, [column, *BESIDE])
    if corpus.shuffle:  # in the order of `datasets`
        import numpy as np

        every = list(rows)
        rows = (every[index] for index in np.random.default_rng(seed).permutation(len(every)))
    return rows, column


def open_data_set(corpus: Corpus, seed: int = 0) -> tuple[Any, str]:
    """A data set, shuffled if the corpus says so, and the column of its text.

    Raises:
        UserError: the data set cannot be loaded, or has no such column of text.
    """
    import datasets

    alone = not os.path.isdir(corpus.dataset or "") and not hub_answers()
    try:
        with cache_alone(alone):
            data = datasets.load_dataset(
                corpus.dataset, name=corpus.config, split=corpus.split, streaming=corpus.stream
            )
    except MemoryError:
        raise
    # The library has a dozen errors for a missing data set, network or config.
    except Exception as error:
        if alone:
            raise UserError(
                f"{corpus.source}: the data set cannot be loaded: {NO_NETWORK}"
            ) from error
        raise UserError(
            f"{corpus.source}: the data set cannot be loaded ({reason(error)})."
        ) from error
    column = _column(corpus, data.column_names or list(next(iter(data), {})))
    if corpus.shuffle:
        buffer = {"buffer_size": 10_000} if corpus.stream else {}
        data = data.shuffle(seed=seed, **buffer)
    return data, column


def _column(corpus: Corpus, columns: Sequence[str]) -> str:
    """The column of a corpus's text; UserError if there is none of its name."""
    column = corpus.column
    if column == "text":
        column = text_column(columns)
    if column not in columns:
        has = f"it has {', '.join(columns)}" if columns else "its rows have no fields"
        raise UserError(f"{corpus.source}: no column {column!r}; {has}. Add ,column=NAME.")
    return column


def check_there(file: str) -> Path:
    """The path of a text; UserError if there is no such file."""
    path = Path(file)
    if not path.is_file():
        raise UserError(f"--calibration or --evaluate text {path}: no such file.")
    return path
