"""The calibration text: one corpus, or a mix of several, each with its number of sequences.

`a.jsonl:64,c4:64` takes 64 sequences of each, `a.jsonl,c4` half of --samples of each. `,field=value` belongs to the part before
it. Each part is read and tokenised as if it were alone.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from emp_llm.calibration.corpora import FIELDS, find_corpus
from emp_llm.common.errors import UserError
from emp_llm.common.wording import quotable
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.records.corpus import Corpus

logger = logging.getLogger(__name__)
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
