"""Typed records with a format version: one declaration serves writing and reading.

A file record begins with `"format": "emp-llm KIND VERSION"`; other versions are refused. Fields are
attributes; `record["field"]` works too, as in the JSON.
"""

import re
from abc import ABCMeta
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec

from emp_llm.checkpoint.checkpoint import config_digest, tokenizer_digest
from emp_llm.checkpoint.files import JSON_LIMIT, read_json, write_bytes
from emp_llm.common.declared import node_in
from emp_llm.common.errors import UserError, printable, quotable, reason
from emp_llm.common.machine import Times
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


# The origin of a number: the model, the text, the recipe, and the stages of the run.


class ModelIdentity(Part, kw_only=True):
    """What the numbers of a model depend on. What is null is unknown, as in older records.

    Attributes:
        identity: a hash of all its weights (`checkpoint.identity_of`).
        sha256_of_config: of the config, the settings of the generation, and code.
        sha256_of_tokenizer: of the tokenizer's files and chat templates.
    """

    identity: str | None = None
    sha256_of_config: str | None = None
    sha256_of_tokenizer: str | None = None

    @staticmethod
    def of(folder: Path, identity: str | None) -> "ModelIdentity":
        """The identity of the model in a folder, given that of its weights."""
        return ModelIdentity(
            identity=identity,
            sha256_of_config=config_digest(folder),
            sha256_of_tokenizer=tokenizer_digest(folder),
        )

    def difference(self, other: "ModelIdentity") -> str | None:
        """What differs from another model, as words before its name; None: nothing that is known
        of both.
        """
        if self.identity != other.identity:
            return "other weights than those of"
        for name, words in (("config", "another config"), ("tokenizer", "another tokenizer")):
            digests = {self[f"sha256_of_{name}"], other[f"sha256_of_{name}"]} - {None}
            if len(digests) > 1:
                return f"{words} than that of"
        return None


class ModelSource(ModelIdentity, kw_only=True):
    """A model.

    Attributes:
        model: the name or path that the user gave.
        revision: its commit, if it comes from the Hub.
    """

    model: str
    revision: str | None

    @property
    def key(self) -> str:
        """The most reliable known name of the weights: the identity, else the model's name."""
        return self.identity or self.model


class TextFields(Part, kw_only=True):
    """The fields of a recipe of a text and of its record, as described for
    `Corpus`.
    """

    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    column: str | None = None
    file: str | None = None
    generate: bool = False
    join: str | None = None
    bos: Annotated[str, msgspec.Meta(pattern="^(auto|each|none)$")] = "auto"
    stream: bool = False
    shuffle: bool = False
    samples: int | None = None
    seqlen: int | None = None


class TextRecord(TextFields, kw_only=True, omit_defaults=False):
    """A text. Files are named without their folders.

    Attributes:
        bos: "each" also where "auto" found that the model needs it; "auto": begin tokens are those
            of the tokenizer.
        sha256: hash of a text in memory, or of the file that holds the model's own text.
    """

    sha256: str | None = None

    @property
    def name(self) -> str:
        """The text in a few words, as --calibration names it."""
        source = self.dataset or PurePath(self.file or "").name
        return f"self:{source}".removesuffix(":") if self.generate else source

    @property
    def bos_note(self) -> str:
        """The begin tokens for a table, where they are not those of the tokenizer alone."""
        return "" if self.bos == "auto" else f" (bos={self.bos})"


class QuantizationRecord(Part, kw_only=True):
    """Quantisation by bitsandbytes."""

    bits: str
    format: str = ""
    bitsandbytes: str = ""


class CalibrationRecord(ModelIdentity, kw_only=True):
    """The origin of activations.

    Attributes:
        model, revision: of the model.
        text, tokens: the calibration text, and the number of tokens; seed: of a shuffled or
            generated text only.
        texts: for a mix, its parts in place of `text`; each has its number of samples.
        dtype, quantization, batch_size, ranks: how the forward passes ran.
        execution: "model" or "blocks"; propagate: the inputs of a block, "dense" or "pruned";
            hidden_states: their place.
        pruned_by: for pruned propagation, the recipe of the masks.
        versions: package -> version.
    """

    model: str = ""
    revision: str | None = None
    text: TextRecord | None = None
    texts: list[TextRecord] = []
    seed: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    quantization: QuantizationRecord | None = None
    batch_size: int | None = None
    ranks: int | None = None
    execution: str | None = None
    propagate: str | None = None
    hidden_states: str | None = None
    pruned_by: RecordedRecipe | None = None
    versions: dict[str, str] = {}

    @property
    def all_texts(self) -> list[TextRecord]:
        """The calibration texts: one, or the parts of a mix."""
        return self.texts if self.text is None else [self.text]


class ActivationsInfo(FileRecord, kw_only=True):
    """The metadata of an activations file, beside the statistics.

    Attributes:
        inputs: layer name -> name of its norm.
        about: the origin of the norms.
        tokens: name of a norm -> number of tokens in its sum.
        relative: layer name -> name of its norm relative to the layer's outputs.
        statistics: name of a further statistic -> layer name -> name of its tensor.
    """

    KIND: ClassVar[str] = "activations"

    inputs: dict[str, str]
    about: CalibrationRecord = msgspec.field(default_factory=CalibrationRecord)
    tokens: dict[str, int] = {}
    relative: dict[str, str] = {}
    statistics: dict[str, dict[str, str]] = {}


class StageRecord(Part, kw_only=True):
    """Time of a stage in seconds, and its peak memory in bytes."""

    seconds: float
    peak_bytes: float = 0
    peak_cuda_bytes: float | None = None


def stage_records(measured: dict[str, Times]) -> dict[str, StageRecord]:
    """Time and memory of stages (`Stopwatch.record`), for a report."""
    return {name: StageRecord(**entry) for name, entry in measured.items()}


# Corpus recipes: the TOML files in `calibration/`, and the [perplexity] tables of suites.


class Corpus(TextFields, kw_only=True, frozen=True, forbid_unknown_fields=True):  # type: ignore[misc]  # as `Quartiles`
    """The source of a text, and its division into token sequences.

    Attributes:
        dataset: Hub data set id, or a local folder with the same layout; config, split and column
            select in it.
        file: a .txt, .jsonl, .json or .parquet file in place of `dataset`, the first three also as
            .gz, .xz or .zst; a relative path starts at the recipe's folder.
        generate: the model itself writes the text; it continues the rows, or nothing if there is no
            dataset or file.
        join: separator that joins all rows before they are tokenised; None: each row is a document,
            tokenised alone.
        bos: begin tokens. auto: as lm-eval, those that the tokenizer puts before a text; for Gemma,
            each. each: one at the beginning of each sequence or block, among its tokens. none: the
            tokenizer puts none.
        stream: read rows as they are needed, without downloading the whole split.
        shuffle: take rows in a seeded random order.
        samples, seqlen: number of sequences, and tokens in each; None: all of the text.
        about: a description in one sentence.
    """

    split: str = "train"
    column: str = "text"
    about: str = ""

    @property
    def source(self) -> str:
        """The source as text, for messages and reports."""
        parts = (self.dataset, self.config, self.split) if self.dataset else ()
        source = self.file or "/".join(part for part in parts if part)
        return printable(f"self:{source}".removesuffix(":") if self.generate else source, 400)

    def check(self, where: str) -> "Corpus":
        """Return the corpus; UserError if it names no text, or samples or seqlen below 1."""
        if self.file is None and self.dataset is None and not self.generate:
            raise UserError(f"{where}: a corpus needs a dataset or a file; name one.")
        for name in ("samples", "seqlen"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{where}: {name} must be at least 1, got {value}.")
        return self

    def record(self) -> TextRecord:
        """The record of the corpus for a report, which names files without their folders."""
        record = msgspec.convert(self, TextRecord, from_attributes=True)
        record.file = self.file and PurePath(self.file).name
        if self.dataset is not None and PurePath(self.dataset).is_absolute():
            record.dataset = PurePath(self.dataset).name
        return record


def samples_of(corpora: Sequence[Corpus]) -> int:
    """The sequences of a calibration."""
    return sum(corpus.samples or 0 for corpus in corpora)
