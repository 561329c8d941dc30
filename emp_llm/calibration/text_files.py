"""Text in files: .txt, .jsonl and .json, also compressed as .gz, .xz or .zst, and .parquet.

Rows are read as they are needed. A file that is damaged, empty or not in UTF-8 is refused, and the
message names the line.
"""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from emp_llm.checkpoint.files import reading
from emp_llm.common.errors import UserError, reason

ENDINGS = (".txt", ".jsonl", ".json", ".parquet")
_PACKED = (".gz", ".xz", ".zst")
_PIECE = 1 << 20  # bytes
_HEAD = 1000  # rows whose fields are looked at
_WINDOW = 1 << 31  # bytes; the largest of zstd --long
_BOM = b"\xef\xbb\xbf"


def ending_of(file: str) -> str | None:
    """What a file holds, by its name: one of `ENDINGS`; None if it is none of them."""
    path = Path(file)
    if path.suffix in _PACKED and Path(path.stem).suffix != ".parquet":
        path = Path(path.stem)
    return path.suffix if path.suffix in ENDINGS else None


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
    from emp_llm.checkpoint.bits import need_zstandard

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
