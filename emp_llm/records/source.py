"""The origin of a number: the model, the text, the recipe, and the stages of the run."""

from pathlib import Path, PurePath
from typing import Annotated, ClassVar

import msgspec

from emp_llm.checkpoint.checkpoint import config_digest, tokenizer_digest
from emp_llm.common.machine import Times
from emp_llm.records.base import FileRecord, Part, RecordedRecipe


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
    `records.corpus.Corpus`.
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
