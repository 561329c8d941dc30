"""Text corpora: recipe files name them, this turns them into token ids.

A recipe is a TOML file in `calibration/` (or anywhere): where the text comes from, how its rows become token sequences, how
many and how long. `wikitext2,samples=16` takes the recipe `wikitext2` and sets one field; a text file or a Hub data set id
in place of the name is a recipe with that source.
"""

import hashlib
import json
import logging
import os
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emp_llm.models.errors import UserError, reason

logger = logging.getLogger(__name__)

# Enough text for any tokenizer in use: they need fewer than 8 bytes a token on average.
_BYTES_PER_TOKEN = 8


@dataclass(frozen=True)
class Corpus:
    """Where text comes from and how it becomes tokens.

    Attributes:
        dataset: Hub data set id (or a local folder laid out like one); config, split and column select in it.
        file: a .txt, .jsonl, .json or .parquet file, used in place of `dataset`; a relative one lies beside the recipe.
        join: rows are joined with this and tokenised once; None: every row is a document, tokenised alone.
        stream: read rows as they are needed instead of downloading the whole split.
        shuffle: take rows in a seeded random order.
        samples, seqlen: how many sequences of how many tokens; None: all of the text.
    """

    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"
    file: str | None = None
    join: str | None = None
    stream: bool = False
    shuffle: bool = False
    samples: int | None = None
    seqlen: int | None = None

    @property
    def source(self) -> str:
        """The source in words, for messages and reports."""
        if self.file:
            return self.file
        return "/".join(part for part in (self.dataset, self.config, self.split) if part)


def find_corpus(name: str) -> Corpus:
    """The corpus that a `--calibration` names.

    Args:
        name: a recipe of the folder, a path of a recipe or text file, or a Hub data set id; then ",field=value" to change
            fields of the recipe.

    Raises:
        UserError: it is none of these; the nearest names are offered.
    """
    base, _, changes = name.partition(",")
    return with_changes(_named_corpus(base), changes)


def with_changes(corpus: Corpus, changes: str) -> Corpus:
    """A corpus with fields changed as "field=value,field=value" says; UserError for an unknown field or a wrong value."""
    for change in filter(None, changes.split(",")):
        key, equals, value = (part.strip() for part in change.partition("="))
        known = {field.name: str(field.type) for field in fields(Corpus)}
        if key not in known or not equals:
            raise UserError(f"{change!r} behind the comma: expected field=value with a field of {', '.join(known)}.")
        if "int" in known[key] and not value.isdigit():
            raise UserError(f"{change!r}: {key} must be a whole number.")
        if "bool" in known[key] and value not in ("true", "false"):
            raise UserError(f"{change!r}: {key} must be true or false.")
        typed = int(value) if "int" in known[key] else value == "true" if "bool" in known[key] else value
        corpus = replace(corpus, **{key: typed})  # type: ignore[arg-type]
    return corpus


def data_folder(name: str) -> Path:
    """`calibration/` or `eval/`: inside the installed package, or beside it in a source checkout."""
    packaged = Path(str(resources.files("emp_llm"))) / name
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / name


def token_ids(corpus: Corpus, tokenizer: Any, seed: int = 0) -> Tensor:
    """The corpus as token ids, int64: shape (samples, seqlen), or (tokens,) where it has no samples and seqlen.

    Tokenised text is kept in a cache, by its content.

    Raises:
        UserError: the text cannot be read, or is too short for samples x seqlen.
    """
    samples, seqlen = corpus.samples, corpus.seqlen
    wanted = None if samples is None or seqlen is None else samples * seqlen
    rows = text_rows(corpus, seed)
    if corpus.join is not None:
        documents = [corpus.join.join(rows)]
    else:
        documents = list(_up_to(rows, wanted))
    key = _content_key(documents, tokenizer, wanted)
    ids = _from_cache(key)
    if ids is None:
        ids = _tokenise(documents, tokenizer, wanted)
        _to_cache(key, ids)
    if samples is None or seqlen is None or wanted is None:
        return ids
    if ids.numel() < wanted:
        raise UserError(
            f"{corpus.source}: {ids.numel()} tokens, too short for {samples} samples x {seqlen} tokens. "
            "Lower --samples or --seqlen, or give more text."
        )
    return ids[:wanted].reshape(samples, seqlen)


def _named_corpus(name: str) -> Corpus:
    recipes = {path.stem: path for path in sorted(data_folder("calibration").glob("*.toml"))}
    if name in recipes:
        path = recipes[name]
        return corpus_of(read_toml(path), path)
    path = Path(name)
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


def read_toml(path: Path) -> dict[str, Any]:
    """A recipe or suite file without its `about`; UserError where it is not one."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as TOML ({reason(error)}).") from error
    values.pop("about", None)
    return values


def corpus_of(values: dict[str, Any], path: Path) -> Corpus:
    """A corpus from the fields of a file; `path` names it in errors and is where a relative `file` lies."""
    known = {field.name: str(field.type) for field in fields(Corpus)}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{path}: unknown field {key!r}; a corpus has {', '.join(known)}.")
        if type(value).__name__ not in known[key]:
            raise UserError(f"{path}: {key} must be {known[key].removesuffix(' | None')}, got {value!r}.")
    if "file" in values:
        values = values | {"file": str(path.parent / values["file"])}
    if "file" not in values and "dataset" not in values:
        raise UserError(f"{path}: a corpus needs a dataset or a file.")
    return Corpus(**values)


def text_rows(corpus: Corpus, seed: int = 0) -> Iterator[str]:
    """The rows of a corpus, in order; a .txt file is one. UserError where they cannot be read."""
    if corpus.file:
        path = Path(corpus.file)
        if not path.is_file():
            raise UserError(f"--calibration or --evaluate text {path}: no such file.")
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8", errors="replace")
            return
    yield from _data_set_rows(corpus, seed)


def _data_set_rows(corpus: Corpus, seed: int) -> Iterator[str]:
    import datasets

    where = corpus.source
    try:
        if corpus.file:
            builder = "parquet" if corpus.file.endswith(".parquet") else "json"
            data = datasets.load_dataset(builder, data_files=corpus.file, split="train", streaming=corpus.stream)
        else:
            data = datasets.load_dataset(corpus.dataset, corpus.config, split=corpus.split, streaming=corpus.stream)
    except Exception as error:  # the library raises a dozen kinds of its own for a missing set, network or config
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{where}: the data set cannot be loaded ({first}).") from error
    columns = data.column_names or list(next(iter(data), {}))
    if corpus.column not in columns:
        raise UserError(f"{where}: no column {corpus.column!r}; it has {', '.join(columns)}. Add ,column=NAME.")
    if corpus.shuffle:
        data = data.shuffle(seed=seed, buffer_size=10_000) if corpus.stream else data.shuffle(seed=seed)
    for row in data:
        if not isinstance(row[corpus.column], str):
            raise UserError(f"{where}: column {corpus.column!r} does not hold text.")
        yield row[corpus.column]


def _up_to(rows: Iterator[str], tokens: int | None) -> Iterator[str]:
    left = None if tokens is None else tokens * _BYTES_PER_TOKEN
    for row in rows:
        if not row.strip():
            continue
        yield row
        if left is not None:
            left -= len(row.encode())
            if left <= 0:
                return


def _tokenise(documents: list[str], tokenizer: Any, wanted: int | None) -> Tensor:
    ids: list[int] = []
    remaining = iter(documents)
    while batch := list(islice(remaining, 256)):
        # verbose=False: a text longer than the model's context is cut into blocks here, there is nothing to warn of
        for document in tokenizer(batch, verbose=False)["input_ids"]:
            ids.extend(document)
        if wanted is not None and len(ids) >= wanted:
            break
    return torch.tensor(ids, dtype=torch.int64)


def _content_key(documents: list[str], tokenizer: Any, wanted: int | None) -> str:
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)).encode())
    settings = {name: getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token", "special_tokens_map")}
    digest.update(f"{type(tokenizer).__name__} {settings} {wanted}".encode())
    for document in documents:
        raw = document.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def _cache_file(key: str) -> Path:
    root = os.environ.get("EMP_LLM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "emp_llm"
    return Path(root) / "tokens" / f"{key}.safetensors"


def _from_cache(key: str) -> Tensor | None:
    path = _cache_file(key)
    try:
        return load_file(path)["tokens"].long() if path.is_file() else None
    except Exception as error:  # a damaged cache entry is made anew
        logger.warning("%s: unreadable, tokenising again (%s)", path, error)
        return None


def _to_cache(key: str, ids: Tensor) -> None:
    path = _cache_file(key)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": ids.int()}, partial)
        partial.replace(path)
    except OSError as error:  # no place for a cache is no reason to stop
        logger.debug("%s: not cached (%s)", path, error)
        partial.unlink(missing_ok=True)


def corpus_record(corpus: Corpus) -> dict[str, Any]:
    """The fields that are set, for a report."""
    return {key: value for key, value in asdict(corpus).items() if value not in (None, False)}
