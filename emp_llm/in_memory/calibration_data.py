"""Calibration data as a user has it in Python: a recipe's name, texts, conversations, token ids, or batches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emp_llm.calibration.calibration import CalibrationText
from emp_llm.calibration.conversations import COLUMNS, chat_text, messages_in
from emp_llm.common.errors import UserError
from emp_llm.execution.loading import load_tokenizer
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.records.corpus import Corpus

IN_MEMORY = "data in memory"  # the name of the text in records
Batches = Iterable[Any]


def calibration_text(data: Any, tokenizer: Any, options: CalibrationOptions, context: int | None) -> CalibrationText | None:
    """The token ids of calibration data.

    Args:
        data: the name of a recipe, or the path of a text file; texts, conversations or rows of a data set; token ids of shape
            (samples, length) or (length,).
        tokenizer: the model's, or its folder; None is for token ids.
        options: samples, seqlen and seed.
        context: the model's context length in tokens, if known.

    Returns:
        The text; None for batches, such as a DataLoader.

    Raises:
        UserError: there is no such recipe, the tokenizer is missing, or the text is too short.
    """
    if isinstance(data, str | Path):
        named = _with_calibration(options, str(data))
        return CalibrationText.prepare(named, _tokenizer(tokenizer, "a text"), context)
    if isinstance(data, Tensor):
        return _text_of_ids(data, options)
    rows = _rows(data)
    if rows is None:
        return None
    ids = _ids_of_rows(rows, _tokenizer(tokenizer, "texts"))
    length = min(options.seqlen or 2048, context or 2048, len(ids))
    samples = min(options.samples or len(ids), len(ids) // length if length else 0)
    if samples < (options.samples or 1):
        raise UserError(f"data: {len(ids)} tokens, too few for {options.samples or 1} samples x {length} tokens.")
    return _text_of_ids(torch.tensor(ids[: samples * length]).reshape(samples, length), options)


def batches_of(data: Any) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """(keyword arguments for the model, the tokens that count) of each batch of a DataLoader or another iterable.

    A batch is a mapping with `input_ids` and optionally more, a tensor, or a list or tuple that begins with one. The tokens
    that `attention_mask` leaves out do not count. Labels are left out.

    Raises:
        UserError: a batch is none of these, or there is none.
    """
    empty = True
    for batch in data:
        empty = False
        if isinstance(batch, Mapping):
            if "input_ids" not in batch and "inputs_embeds" not in batch:
                raise UserError(f"data: a batch has no input_ids; its keys are {', '.join(map(str, batch)) or 'none'}.")
            arguments = {name: value for name, value in batch.items() if name != "labels" and value is not None}
            mask = arguments.get("attention_mask")
            padded = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
            yield arguments, mask.bool() if isinstance(mask, Tensor) and padded else None
            continue
        first = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(first, Tensor):
            raise UserError(f"data: a batch is {type(first).__name__}; give tensors, or mappings with input_ids.")
        yield {"": first}, None
    if empty:
        raise UserError("data: it gives no batches.")


def size_of(data: Any) -> int | None:
    """The number of batches, if it is known."""
    return len(data) if isinstance(data, Sized) else None


def _with_calibration(options: CalibrationOptions, name: str) -> CalibrationOptions:
    return CalibrationOptions(**(vars(options) | {"calibration": name}))


def _tokenizer(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise UserError(f"data: {what} needs a tokenizer; give tokenizer=AutoTokenizer.from_pretrained(...).")
    return load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer


def _text_of_ids(ids: Tensor, options: CalibrationOptions) -> CalibrationText:
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.dim() not in (1, 2) or ids.numel() == 0:
        raise UserError(f"data: a tensor of {ids.dtype} {list(ids.shape)}; token ids are integers of shape (samples, length).")
    ids = ids.detach().cpu().long().reshape(1, -1) if ids.dim() == 1 else ids.detach().cpu().long()
    ids = ids[: options.samples, : options.seqlen]
    corpus = Corpus(file=IN_MEMORY, column="", samples=ids.shape[0], seqlen=ids.shape[1])
    return CalibrationText([corpus], ids, None)


def _rows(data: Any) -> list[Any] | None:
    """Texts or conversations; None if the data is something else."""
    if isinstance(data, torch.utils.data.DataLoader) or not isinstance(data, Sequence | Iterable):
        return None
    if not isinstance(data, Sequence) and not hasattr(data, "__getitem__"):
        return None
    if isinstance(data, Mapping):
        raise UserError("data: a mapping; give texts, token ids, a DataLoader, or the name of a recipe.")
    rows = [_row(row) for row in data] if isinstance(data, Sized) and len(data) and _row(data[0]) is not None else None
    if rows is not None and any(row is None for row in rows):
        raise UserError("data: some rows are neither texts nor conversations.")
    return rows


def _row(row: Any) -> Any:
    """A text, or the messages of a conversation; None for anything else."""
    if isinstance(row, str):
        return row
    if isinstance(row, Mapping):
        for name in ("text", *COLUMNS):
            if name in row:
                return _row(row[name])
        return None
    return messages_in(row)


def _ids_of_rows(rows: list[Any], tokenizer: Any) -> list[int]:
    ids: list[int] = []
    for row in rows:
        text = row if isinstance(row, str) else chat_text(row, tokenizer, "data")
        ids += tokenizer(text, verbose=False, add_special_tokens=isinstance(row, str))["input_ids"]
    return ids
