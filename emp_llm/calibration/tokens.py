"""Text as token ids, tokenised once and cached by content."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emp_llm.calibration.conversations import ChatText, chat_text
from emp_llm.calibration.corpora import text_rows
from emp_llm.common.cache_folder import cache_folder
from emp_llm.common.errors import UserError
from emp_llm.common.wording import count_of
from emp_llm.records.corpus import Corpus

logger = logging.getLogger(__name__)

# Enough text for any common tokenizer: on average, its tokens have fewer than 8 bytes.
_BYTES_PER_TOKEN = 8


def token_ids(corpus: Corpus, tokenizer: Any, seed: int = 0) -> Tensor:
    """A corpus as token ids.

    Args:
        tokenizer: the model's.
        seed: for corpora that are shuffled.

    Returns:
        int64, shape (samples, seqlen), or (tokens,) if the corpus has no samples or no seqlen.

    Raises:
        UserError: the text cannot be read, or is too short for samples x seqlen.
    """
    samples, seqlen = corpus.samples, corpus.seqlen
    wanted = None if samples is None or seqlen is None else samples * seqlen
    rows = text_rows(corpus, seed, lambda messages: chat_text(messages, tokenizer, corpus.source))
    documents = list(rows if corpus.join is not None else _up_to(rows, wanted))
    chat = any(isinstance(document, ChatText) for document in documents)
    documents = [corpus.join.join(documents)] if corpus.join is not None else documents
    key = _content_key(documents, tokenizer, wanted, chat)
    ids = _from_cache(key)
    if ids is None:
        ids = _tokenise(documents, tokenizer, wanted, chat)
        _to_cache(key, ids)
    if samples is None or seqlen is None or wanted is None:
        return ids
    if ids.numel() < wanted:
        raise UserError(
            f"{corpus.source}: {count_of(ids.numel(), 'token')}, too short for {samples} samples x {seqlen} tokens. "
            "Lower --samples or --seqlen, or use more text."
        )
    return ids[:wanted].reshape(samples, seqlen)


def tokens_signature(tokens: Tensor) -> str:
    """SHA-256 of token ids and their shape."""
    return hashlib.sha256(str(tuple(tokens.shape)).encode() + tokens.contiguous().numpy().tobytes()).hexdigest()


def _up_to(rows: Iterator[str], tokens: int | None) -> Iterator[str]:
    """The rows that hold text, up to as many as a number of tokens needs."""
    left = None if tokens is None else tokens * _BYTES_PER_TOKEN
    for row in rows:
        if not row.strip():
            continue
        yield row
        if left is not None:
            left -= len(row.encode())
            if left <= 0:
                return


def _tokenise(documents: list[str], tokenizer: Any, wanted: int | None, chat: bool) -> Tensor:
    ids: list[int] = []
    remaining = iter(documents)
    while batch := list(islice(remaining, 256)):
        # verbose=False: longer texts than the model's context are cut into sequences, so a warning would mislead.
        for document in tokenizer(batch, verbose=False, add_special_tokens=not chat)["input_ids"]:
            ids.extend(document)
        if wanted is not None and len(ids) >= wanted:
            break
    return torch.tensor(ids, dtype=torch.int64)


def _content_key(documents: list[str], tokenizer: Any, wanted: int | None, chat: bool) -> str:
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)).encode())
    settings = {name: getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token", "special_tokens_map")}
    digest.update(f"{type(tokenizer).__name__} {settings} {wanted}{' chat' if chat else ''}".encode())
    for document in documents:
        raw = document.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def _cache_file(key: str) -> Path:
    return cache_folder() / "tokens" / f"{key}.safetensors"


def _from_cache(key: str) -> Tensor | None:
    path = _cache_file(key)
    try:
        return load_file(path)["tokens"].long() if path.is_file() else None
    except Exception as error:  # a damaged entry is replaced
        logger.warning("%s: it cannot be read (%s); the text is tokenised again.", path, error)
        return None


def _to_cache(key: str, ids: Tensor) -> None:
    path = _cache_file(key)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": ids.int()}, partial)
        partial.replace(path)
    except OSError as error:  # the cache is optional
        logger.debug("%s: not cached (%s)", path, error)
        partial.unlink(missing_ok=True)
