"""Calibration data: text as token ids.

The text comes from the recipes and files of `calibration.texts`, from Python (texts, conversations,
rows, token ids), or from the model itself.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from mmap import mmap
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import GenerationConfig, PreTrainedModel

from emp_llm.calibration.chat import IDS_COLUMN, Chat, chat_text, text_column, text_in
from emp_llm.calibration.texts import (
    calibration_corpora,
    check_length,
    for_model,
    generates,
    plain,
    text_rows,
)
from emp_llm.checkpoint.checkpoint import Checkpoint, check_agreement, config_digest, identity_of
from emp_llm.checkpoint.files import lock, room_for, unfinished, write_bytes
from emp_llm.common.declared import check_type
from emp_llm.common.errors import UserError, count_of, repair_text, shorten_list
from emp_llm.common.machine import enough_memory
from emp_llm.common.paths import cache_folder
from emp_llm.common.progress import progress_bar
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Architecture
from emp_llm.models.blockwise import NOT_BY_BLOCKS
from emp_llm.models.loading import check_head, execution_device, load_tokenizer
from emp_llm.models.modules import finite_logits
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import Quantization, check_ids, max_context
from emp_llm.options.shared import CalibrationOptions, Propagate, check_values
from emp_llm.records.base import Corpus, samples_of

logger = logging.getLogger(__name__)
IN_MEMORY = "data in memory"  # the name of the text in records
_LENGTH = 2048  # tokens in a sequence of data in memory, if neither option nor model says less
_IN_MEMORY = Corpus(file=IN_MEMORY, column="")
_CHARACTERS = 8  # of a token; those of any common tokenizer have fewer on average
CHECKED = 8  # sequences after those of a calibration, which a run is checked on
CHOOSING = 24  # of a run that chooses by a loss: two thirds decide, one third judges
_MARGIN = 64  # tokens at the end of a cut text, which may differ from those of the whole
_IN_MEMORY_BYTES = 1 << 27  # of token ids; longer texts lie in a file
_WRITING = "emp-llm self 1"  # changes with the text that a model writes


@dataclass(frozen=True)
class CalibrationText:
    """The tokens of a calibration.

    Attributes:
        corpora: the sources of the text, in order; each has its number of samples.
        tokens: int64, shape (samples, seqlen).
        seed: the seed of shuffled and generated texts; None for others.
        held_out: the sequences of the text that follow those, in its shape; none where the text
            ends, or is generated.
        training: the sequences on which a healing may train, of each corpus: its own, and more that
            follow the held-out ones. None: `tokens` alone.
    """

    corpora: list[Corpus]
    tokens: Tensor
    seed: int | None
    held_out: Tensor | None = None
    training: tuple[Tensor, ...] | None = None

    @property
    def name(self) -> str:
        """The names of its sources, as --calibration names them."""
        return ", ".join(corpus.record().name for corpus in self.corpora)

    @property
    def number(self) -> int:
        """The number of tokens."""
        return self.tokens.numel()

    @property
    def signature(self) -> str:
        """SHA-256 of the tokens and their shape."""
        digest = hashlib.sha256(str(tuple(self.tokens.shape)).encode())
        digest.update(self.tokens.contiguous().numpy().data)
        return digest.hexdigest()

    @property
    def generated(self) -> bytes:
        """The text that the model itself wrote, as JSON lines of token ids, a sequence each;
        empty if there is none.
        """
        texts = zip(self.corpora, self._of_corpora(), strict=True)
        rows = [row for corpus, tokens in texts if corpus.generate for row in tokens.tolist()]
        return "".join(f"{json.dumps({IDS_COLUMN: row})}\n" for row in rows).encode()

    @property
    def in_turns(self) -> Tensor:
        """The tokens with the texts of a mix in turns: the last ones, which an update and a healing
        hold out, are of all texts.
        """
        if len(self.corpora) == 1:
            return self.tokens
        lengths = [len(tokens) for tokens in self._of_corpora()]
        places = torch.cat([(torch.arange(length) + 0.5) / length for length in lengths])
        order = places.argsort(stable=True)
        return torch.index_select(self.tokens, 0, order, out=_room(*self.tokens.shape))

    @cached_property
    def for_training(self) -> "CalibrationText":
        """The text on which a healing trains."""
        if self.training is None:
            return self
        corpora = [
            msgspec.structs.replace(corpus, samples=len(ids))
            for corpus, ids in zip(self.corpora, self.training, strict=True)
        ]
        return replace(self, corpora=corpora, tokens=_join(self.training), training=None)

    def _of_corpora(self) -> tuple[Tensor, ...]:
        return torch.split(self.tokens, [corpus.samples or 0 for corpus in self.corpora])


@dataclass(frozen=True)
class TextWriter:
    """The dense model, as the writer of a calibration text.

    Attributes:
        checkpoint: the model's.
        models: loads it.
        quantization: its form in memory; None: that of the checkpoint.
        batch_size: number of documents written at a time.
    """

    checkpoint: Checkpoint
    models: OneModel
    quantization: Quantization | None
    batch_size: int


def calibration_data(
    options: CalibrationOptions,
    architecture: Architecture,
    models: OneModel,
    propagate: Propagate = "dense",
    quantization: Quantization | None = None,
    held_out: int = CHECKED,
    training: int = 0,
) -> CalibrationText:
    """Read and tokenise calibration data, so that problems with it are reported before a model is
    loaded.

    Args:
        options: the name of the data, the number and length of samples, and the execution.
        architecture: the model's, whose folder holds a tokenizer.
        models: loads the dense model, if that is to write the text.
        propagate: the inputs of each block.
        quantization: the form in which the model is loaded; None: that of the checkpoint.
        held_out: number of sequences to read after those of the calibration.
        training: number of sequences that a healing needs, if the text has so many.

    Raises:
        UserError: the data cannot be read or is too short, or the model cannot be calibrated on it
            in this way.
    """
    folder = architecture.checkpoint.folder
    config = architecture.checkpoint.config
    if config.get("is_encoder_decoder") and (
        options.execution == "blocks" or propagate == "pruned"
    ):
        raise UserError(NOT_BY_BLOCKS.format(folder))
    if config.get("is_encoder_decoder") and generates(options.text_name):
        raise UserError(
            f"{folder}: --calibration self is for decoders, and this model has an "
            "encoder too. Name a text."
        )
    writer = TextWriter(architecture.checkpoint, models, quantization, options.batch_size)
    tokenizer = load_tokenizer(folder, models.trust_remote_code)
    return read_text(options, tokenizer, config, writer, held_out, training)


def read_text(
    options: CalibrationOptions,
    tokenizer: Any,
    config: Any,
    writer: TextWriter | None = None,
    held_out: int = CHECKED,
    training: int = 0,
) -> CalibrationText:
    """The text that options name, as tokens.

    Args:
        options: the name, number and length of samples, and the seed.
        tokenizer: the model's.
        config: the model's; it says the context length, and whether each sequence needs a begin
            token. None: unknown.
        writer: writes the texts of the model itself; None: there are none.
        held_out: number of sequences to read after those that options name.
        training: number of sequences that a healing needs, if the text has so many.

    Raises:
        UserError: a text cannot be read or is too short, or a token is beyond the vocabulary.
    """
    corpora = [
        for_model(corpus, config, tokenizer)
        for corpus in calibration_corpora(
            options.text_name, max_context(config), options.samples, options.seqlen
        )
    ]
    judging = max(1, held_out // len(corpora))
    lacking = max(0, training - samples_of(corpora))
    learned = math.ceil(lacking / len(corpora))
    tokens = []
    rest = []
    longer = []
    for corpus in corpora:
        ids = token_ids(corpus, tokenizer, options.seed, writer, judging + learned)
        check_ids(ids, config, f"--calibration {options.text_name}")
        samples = corpus.samples or len(ids)
        tokens.append(ids[:samples])
        rest.append(ids[samples : samples + judging].clone())
        # What follows them takes their place, since a copy of all would be as long.
        for first in range(samples + judging, len(ids), judging):
            moved = ids[first : first + judging]
            ids[first - judging :][: len(moved)] = moved
        longer.append(ids[: len(ids) - len(rest[-1])])
    following = torch.cat(rest)
    seeded = any(corpus.shuffle or corpus.generate for corpus in corpora)
    return CalibrationText(
        corpora,
        _join(tokens),
        seed=options.seed if seeded else None,
        held_out=following if len(following) else None,
        training=tuple(longer) if sum(map(len, tokens)) < sum(map(len, longer)) else None,
    )


# Text as token ids.


def token_ids(
    corpus: Corpus,
    tokenizer: Any,
    seed: int = 0,
    writer: TextWriter | None = None,
    more: int = 0,
) -> Tensor:
    """A corpus as token ids.

    Args:
        tokenizer: the model's.
        seed: the seed of corpora that are shuffled or generated.
        writer: writes generated texts; None: such a text is refused.
        more: number of sequences to append that follow the samples, as far as the text has them.

    Returns:
        int64, shape (samples, seqlen), or (tokens,) if the corpus has no samples or no seqlen.

    Raises:
        UserError: the text cannot be read, or is too short for samples x seqlen.
    """
    if corpus.generate:
        if writer is None:
            raise UserError(
                f"{corpus.source}: only --calibration lets the model write a text. Give a "
                "self.jsonl."
            )
        return write_ids(corpus, tokenizer, seed, writer)
    samples = corpus.samples
    seqlen = corpus.seqlen
    begin = begin_token(corpus.bos, tokenizer)
    wanted = math.inf if samples is None or seqlen is None else (samples + more) * seqlen
    texts = _texts(text_rows(corpus, seed), tokenizer, corpus.source, corpus.bos)
    ids = _ids(texts, tokenizer, corpus.source, wanted, corpus.join)
    if samples is None or seqlen is None:
        return ids
    whole = _whole_sequences(ids, seqlen, begin)
    if len(whole) < samples:
        raise UserError(
            f"{corpus.source}: {count_of(ids.numel(), 'token')}, too short for {samples} samples x "
            f"{seqlen} tokens. Lower --samples or --seqlen, or use more text."
        )
    return whole[: samples + more]


def begin_token(bos: str, tokenizer: Any) -> int | None:
    """The token at the beginning of each sequence; None unless `bos` is "each". It is the end token
    if the tokenizer has no begin token, as in lm-eval.
    """
    if bos != "each":
        return None
    begin = _begin_or_end(tokenizer)
    if begin is None:
        raise UserError(
            "bos=each: the tokenizer has neither a bos_token nor an eos_token. Name one in its "
            "config, or omit bos."
        )
    return begin


def _begin_or_end(tokenizer: Any) -> int | None:
    """The begin token of a tokenizer, or its end token if it has none."""
    begin: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if begin is None else begin


def sequences(ids: Tensor, length: int, begin: int | None) -> Iterator[Tensor]:
    """Token ids, shape (tokens,), in consecutive sequences of `length`; the last may be shorter.

    With `begin`, each sequence begins with that token. Where it does so already, none is added.
    """
    if begin is not None and length < 2:
        raise UserError(
            "bos=each: a sequence of 1 token holds the begin token alone. Give "
            "2 or more, or bos=none."
        )
    first = 0
    while first < ids.numel():
        head = ids.new_tensor([] if begin in (None, int(ids[first])) else [begin])
        end = first + length - head.numel()
        yield torch.cat([head, ids[first:end]])
        first = end


def _whole_sequences(ids: Tensor, length: int, begin: int | None) -> Tensor:
    """The `sequences` that have the whole length, shape (sequences, length). Without `begin`, they
    are not copied.
    """
    if begin is None:
        return ids[: len(ids) // length * length].view(-1, length)
    room = _room(math.ceil(len(ids) / max(1, length - 1)), length)
    count = 0
    for row in sequences(ids, length, begin):
        if row.numel() == length:
            room[count] = row
            count += 1
    return room[:count]


def _room(*shape: int) -> Tensor:
    """A tensor to put token ids in, int64, of this shape, uninitialised. A large one lies in an
    unnamed file in the folder for temporary files, and memory keeps only the parts in use.

    Raises:
        UserError: the disk is full.
    """
    size = 8 * math.prod(shape)
    if size <= _IN_MEMORY_BYTES:
        return torch.empty(shape, dtype=torch.int64)
    what = f"{math.prod(shape):,} tokens of text, 8 bytes each"
    with (
        tempfile.TemporaryFile(prefix="emp-llm-text-") as file,
        room_for(what, "read less text"),
    ):
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return torch.frombuffer(mmap(file.fileno(), size), dtype=torch.int64).view(shape)


def _join(tokens: Sequence[Tensor]) -> Tensor:
    """Token ids one after the other; a single tensor as it is."""
    if len(tokens) == 1:
        return tokens[0]
    return torch.cat(list(tokens), out=_room(sum(map(len, tokens)), *tokens[0].shape[1:]))


def _texts(
    rows: Iterable[Any], tokenizer: Any, source: str, bos: str = "auto", answer: bool = False
) -> Iterator[tuple[Any, bool]]:
    """The text or token ids of each row of `text_rows`, and whether the tokenizer adds special
    tokens to it: not to a conversation, and with `bos` "none" to none. At the end, the log says how
    many rows were conversations.

    With `answer`, a conversation ends with what begins an answer.
    """
    chats = texts = 0
    unread: set[str] = set()
    try:
        for row in rows:
            if isinstance(row, Chat):
                text = chat_text(row, tokenizer, answer)
                unread |= row.unread(tokenizer)
                chats += 1
                yield text, False
            else:
                texts += isinstance(row, str)
                yield row, bos != "none"
    finally:
        if chats and ranks().main:
            logger.info(
                "%s: %s rendered by the chat template, %s as plain text.",
                source,
                count_of(chats, "row"),
                f"{texts:,}",
            )
        if unread and ranks().main:
            logger.warning(
                "warning: %s: the chat template does not show %s of its rows.",
                source,
                ", ".join(sorted(unread)),
            )


def _ids(
    texts: Iterable[tuple[Any, bool]],
    tokenizer: Any,
    source: str,
    wanted: float = math.inf,
    join: str | None = None,
) -> Tensor:
    """The token ids of `_texts`, one after the other or joined by `join`: all, or at least `wanted`
    of them. int64, shape (tokens,).
    """
    if join is not None:
        joined = list(texts)
        if any(isinstance(text, tuple) for text, _ in joined):
            raise UserError(f"{source}: join= joins texts, and these are token ids. Leave it out.")
        texts = [(join.join(text for text, _ in joined), all(special for _, special in joined))]
    pieces = []
    ids = array("q")
    for text, special in texts:
        known = isinstance(text, tuple)
        try:
            ids.extend(text if known else _tokenise(text, tokenizer, special, wanted - len(ids)))
        except OverflowError as error:
            raise UserError(
                f"{source}: a token id has more than 63 bits, so it is none. Correct the row."
            ) from error
        if 8 * len(ids) > _IN_MEMORY_BYTES:
            wanted -= len(ids)
            pieces.append(_room(len(ids)).copy_(torch.frombuffer(ids, dtype=torch.int64)))
            ids = array("q")
        if len(ids) >= wanted:
            break
    if ids:
        pieces.append(torch.frombuffer(ids, dtype=torch.int64))
    return _join(pieces or [torch.empty(0, dtype=torch.int64)])


def _tokenise(text: str, tokenizer: Any, special: bool, wanted: float) -> list[int]:
    """The token ids of a text, or at least the first `wanted` of them: then only its beginning is
    tokenised.
    """
    if not text.strip():
        return []
    text = repair_text(text)
    size = int(min(len(text), _CHARACTERS * wanted))
    while True:
        # A warning of texts longer than the model's context would mislead: they are cut.
        ids: list[int] = tokenizer(text[:size], verbose=False, add_special_tokens=special)[
            "input_ids"
        ]
        if size >= len(text) or len(ids) >= wanted + _MARGIN:
            return ids
        size *= 4


# Text that the model itself writes.


def write_ids(
    corpus: Corpus,
    tokenizer: Any,
    seed: int,
    writer: TextWriter,
) -> Tensor:
    """The token ids of a text that the dense model writes: documents that continue prompts, one
    after the other.

    Tokens are sampled at temperature 1. With P prompts, document n continues prompt n mod P, with
    random numbers of its own, up to an end token or a number of tokens that is the same for all. So
    the batch size changes the text only through the last bits of the logits. Finished batches stay
    in the cache: the same text is not written twice, and an interrupted run continues it. Each of
    several ranks writes a part of the batches.

    Args:
        corpus: the prompts, with samples and seqlen of the text.
        tokenizer: the model's.
        seed: the seed of shuffled prompts and of sampled tokens.
        writer: the dense model.

    Returns:
        int64, shape (samples, seqlen).

    Raises:
        UserError: no prompt fits, memory runs out, or another run writes the text.
    """
    folder = writer.checkpoint.folder
    models = writer.models
    check_head(folder, "Give a text that was written, as --calibration.")
    samples = corpus.samples or 1
    seqlen = corpus.seqlen or 1
    prompts = _prompt_ids(corpus, tokenizer, seed)
    new = max(1, seqlen - max(map(len, prompts)))
    wanted = samples * seqlen
    check_agreement({"prompts": prompts, "seed": seed}, model=writer.checkpoint)
    identity = ranks().first(lambda: identity_of(writer.checkpoint))
    of_model = [identity, config_digest(folder), tokenizer.eos_token_id]
    made_of = json.dumps(
        [_WRITING, of_model, models.dtype, writer.quantization, prompts, new, seed]
    )
    path = cache_folder() / "self" / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.json"
    with ExitStack() as stack:
        documents = _documents_in(path)
        if wanted > sum(map(len, documents)):
            stack.enter_context(lock(path, str(path), math.inf))
            documents = _documents_in(path)  # by now, another run may have written it
        missing = wanted - sum(map(len, documents))
        bar = stack.enter_context(progress_bar(missing, "write text", "tok"))
        while missing > 0:
            first = len(documents) + ranks().index * writer.batch_size
            numbers = range(first, first + writer.batch_size)
            begun = {number: prompts[number % len(prompts)] for number in numbers}
            batch = _continue(models.get(folder, writer.quantization), tokenizer, begun, new, seed)
            written = [document for batch in ranks().gather(batch) for document in batch]
            documents += written
            if ranks().main:
                write_bytes(path, json.dumps(documents).encode())
            bar.update(sum(map(len, written)))
            missing -= sum(map(len, written))
    ids = torch.tensor([token for document in documents for token in document])
    return _whole_sequences(ids, seqlen, begin_token(corpus.bos, tokenizer))[:samples]


def _documents_in(path: Path) -> list[list[int]]:
    """The documents of a text in the cache; none if it is not begun. A collective call."""

    def read(path: Path) -> list[list[int]]:
        return msgspec.json.decode(
            path.read_bytes(), type=list[list[Annotated[int, msgspec.Meta(ge=0)]]]
        )

    return ranks().first(partial(unfinished, path, read)) or []


def keep_generated(path: Path, data: CalibrationText | None) -> None:
    """Write the text that the model itself wrote, if there is one, to a file for --calibration."""
    if data is not None and data.generated and ranks().main:
        write_bytes(path, data.generated)


def _prompt_ids(corpus: Corpus, tokenizer: Any, seed: int) -> list[list[int]]:
    """Prompts as token ids: the first `samples` rows that take at most half of seqlen tokens.

    Without rows, the token that begins a text; of a model without one, random tokens.
    """
    samples = corpus.samples or 1
    longest = (corpus.seqlen or 1) // 2
    head = begin_token(corpus.bos, tokenizer)
    if corpus.file is None and corpus.dataset is None:
        begin = _begin_or_end(tokenizer)
        random = torch.randint(len(tokenizer), (samples, 1), generator=_random(seed, -1))
        return random.tolist() if begin is None or corpus.bos == "none" else [[begin]]
    rows = text_rows(corpus, seed)
    prompted = (row.to_answer() if isinstance(row, Chat) else row for row in rows)
    texts = _texts(prompted, tokenizer, corpus.source, corpus.bos, answer=True)
    tokenised = (_ids([text], tokenizer, corpus.source).tolist() for text in texts)
    begun = (ids if head in (None, ids[0]) else [head, *ids] for ids in tokenised if ids)
    prompts = list(islice((ids for ids in begun if len(ids) <= longest), samples))
    if not prompts:
        raise UserError(
            f"{corpus.source}: no prompt of 1 to {longest} tokens, half of --seqlen. "
            "Raise it, or shorten prompts."
        )
    return prompts


def _continue(
    model: PreTrainedModel, tokenizer: Any, begun: dict[int, list[int]], new: int, seed: int
) -> list[list[int]]:
    """Documents, given prompts by their numbers: the prompt, and `new` tokens more, or up to an end
    token.

    A token is the greatest logit plus Gumbel noise, which is a sample of their softmax; the noise
    is the document's own.
    """
    width = max(map(len, begun.values()))
    device = execution_device(model)
    settings = model.generation_config
    ends = settings.eos_token_id
    if not isinstance(ends, list):
        ends = [token for token in (ends, tokenizer.eos_token_id) if token is not None]
    padding = [[0] * (width - len(prompt)) for prompt in begun.values()]
    padded = zip(padding, begun.values(), strict=True)
    ids = torch.tensor([zeros + prompt for zeros, prompt in padded], device=device)
    mask = torch.tensor([zeros + [1] * (width - len(zeros)) for zeros in padding], device=device)
    randoms = [_random(seed, number) for number in begun]

    def sampled(_: Tensor, logits: Tensor) -> Tensor:
        noise = torch.stack(
            [torch.empty(logits.shape[1]).exponential_(generator=random) for random in randoms]
        )
        return logits - noise.log().to(logits.device)

    # The model's own settings, such as top_p, would fill what is not set here.
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=0, max_new_tokens=new, do_sample=False
    )
    try:
        with enough_memory(lambda: (type(model).__name__, device), ids):
            processors = [finite_logits, sampled]
            rows = model.generate(ids, attention_mask=mask, logits_processor=processors)
    finally:
        model.generation_config = settings
    documents = []
    for prompt, row in zip(begun.values(), rows[:, width:].tolist(), strict=True):
        length = next((count for count, token in enumerate(row, 1) if token in ends), len(row))
        documents.append(prompt + row[:length])
    return documents


def _random(seed: int, number: int) -> torch.Generator:
    """The random numbers of a document."""
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7])
    )


# Data in Python.


def data_in_memory(
    data: Any, tokenizer: Any, options: CalibrationOptions, config: Any, training: int = 0
) -> CalibrationText | None:
    """Calibration data as a user has it in Python.

    Args:
        data: the name of a recipe, or the path of a text file; texts, conversations, or rows of a
            data set; token ids of shape (samples, length) or (length,).
        tokenizer: the model's, its processor, or its folder; None is for token ids.
        options: samples, seqlen and seed.
        config: the model's, as for `read_text`.
        training: as for `read_text`, of a named text. Texts in memory are taken whole, unless
            options give a number of samples.

    Returns:
        The text; None for batches, such as a DataLoader.

    Raises:
        UserError: an option has a wrong value, there is no such recipe, the tokenizer is missing,
            or the data is too short or cannot be used.
    """
    check_values(options)
    if isinstance(data, str | Path):
        named = replace(options, calibration=str(data))
        return read_text(named, _tokenizer(tokenizer), config, training=training)
    context = max_context(config)
    if isinstance(data, np.ndarray) and data.dtype.kind in "iu":
        data = torch.as_tensor(data)
    if isinstance(data, Tensor):
        return _text_of_ids(data, options, config)
    if isinstance(data, Mapping):
        raise UserError(
            f"data: a mapping of {shorten_list([*map(str, data)])}; give one of its values, "
            "texts, token ids, a DataLoader, or the name of a recipe."
        )
    rows = _rows_in_memory(data)
    first = next(rows, None)
    if first is None:
        return None
    length = options.seqlen or min(_LENGTH, context or _LENGTH)
    check_length(length, context)
    wanted = math.inf if options.samples is None else (options.samples + CHECKED) * length
    corpus = _IN_MEMORY
    if tokenizer is not None or not isinstance(first, tuple):
        tokenizer = _tokenizer(tokenizer)
        corpus = for_model(corpus, config, tokenizer)
    ids = _ids(_texts(chain([first], rows), tokenizer, "data"), tokenizer, "data", wanted)
    whole = _whole_sequences(ids, length, begin_token(corpus.bos, tokenizer))
    if len(whole) < (options.samples or 1):
        raise UserError(
            f"data: {len(ids)} tokens, too few for {count_of(options.samples or 1, 'sample')} x "
            f"{length} tokens. Give more text, or a smaller --seqlen or --samples."
        )
    return _text_of_ids(whole, options, config, corpus)


def _rows_in_memory(data: Any) -> Iterator[str | Chat | tuple[int, ...]]:
    """The texts, conversations or token ids of data with rows: a list, a data set, also one that
    streams, or a table of pandas. Nothing of other data, such as batches.

    Raises:
        UserError: a row holds none of these, or cannot be used.
    """
    rows: Iterable[Any]
    if hasattr(data, "notna"):
        known = data.astype(object).where(data.notna(), None)
        rows = map(plain, known.to_dict("records") if hasattr(data, "columns") else known.tolist())
    elif hasattr(data, "column_names"):
        schema = None if data.features is None else data.features.arrow_schema
        rows = (plain(row, schema, decoded=True) for row in data)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        rows = (data[number] for number in range(len(data)))
    elif isinstance(data, IterableDataset):
        rows = data
    else:
        if data is not None:
            check_type("data", data, Iterable)
        return
    for number, row in enumerate(rows, 1):
        found = _text_of_row(row, f"data, row {number:,}")
        if found is not None:
            yield found
            continue
        fields = row.items() if isinstance(row, Mapping) else ()
        is_batch = any(name == IDS_COLUMN or isinstance(each, Tensor) for name, each in fields)
        if number == 1 and (is_batch or not fields):
            return
        raise UserError(
            f"data, row {number:,} holds neither text, nor a conversation, nor token ids"
            f"{'; its fields are ' if fields else ''}{', '.join(str(name) for name, _ in fields)}."
        )


def _text_of_row(row: Any, where: str) -> str | Chat | tuple[int, ...] | None:
    """The text, conversation or token ids of a row; None if it holds none."""
    if isinstance(row, str):
        return row
    if not isinstance(row, Mapping):
        as_ids = text_in({IDS_COLUMN: plain(row)}, IDS_COLUMN, where)
        return text_in({"messages": row}, "messages", where) if as_ids is None else as_ids
    names = {IDS_COLUMN, "attention_mask"} & row.keys()
    return text_in({**row, **{name: plain(row[name]) for name in names}}, text_column(row), where)


def _tokenizer(given: Any) -> Any:
    if given is None:
        raise UserError(
            "data: texts need a tokenizer; give tokenizer=AutoTokenizer.from_pretrained(...)."
        )
    loaded = load_tokenizer(Path(given)) if isinstance(given, str | Path) else given
    tokenizer = getattr(loaded, "tokenizer", loaded)  # of a processor
    if not callable(tokenizer):
        raise UserError(
            f"tokenizer is of type {type(given).__name__}; give a tokenizer of transformers, or "
            "its folder."
        )
    return tokenizer


def _text_of_ids(
    ids: Tensor, options: CalibrationOptions, config: Any, corpus: Corpus = _IN_MEMORY
) -> CalibrationText:
    if (
        ids.is_floating_point()
        or ids.dtype == torch.bool
        or ids.dim() not in (1, 2)
        or ids.numel() == 0
    ):
        raise UserError(
            f"data: a tensor of {ids.dtype} {list(ids.shape)}; token ids are integers "
            "of shape (samples, length)."
        )
    ids = ids.detach().cpu().long().reshape(-1, ids.shape[-1])
    samples = options.samples or ids.shape[0]
    length = options.seqlen or ids.shape[1]
    if samples > ids.shape[0] or length > ids.shape[1]:
        raise UserError(
            f"data: token ids of shape {list(ids.shape)}, too few for "
            f"{count_of(samples, 'sample')} x {length} tokens. Give more, or a smaller --seqlen or "
            "--samples."
        )
    check_length(length, max_context(config))
    check_ids(ids, config, "data")
    corpus = msgspec.structs.replace(corpus, samples=samples, seqlen=length)
    held_out = ids[samples : samples + CHECKED, :length]
    return CalibrationText(
        [corpus], ids[:samples, :length], None, held_out if len(held_out) else None
    )
