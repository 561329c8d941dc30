"""Corpus recipes: the TOML files in `calibration/`, and the [perplexity] tables of suites."""

from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from emp_llm.common.errors import UserError, printable
from emp_llm.records.source import TextFields, TextRecord


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
