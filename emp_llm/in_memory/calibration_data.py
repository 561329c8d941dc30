"""Calibration data as a user has it in Python: a recipe's name, texts, conversations, rows with images, ids, or batches."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emp_llm.calibration.calibration import CalibrationText
from emp_llm.calibration.conversations import COLUMNS, chat_text, messages_in
from emp_llm.calibration.images.image_calibration import CalibrationRows
from emp_llm.calibration.images.image_rows import ImageRow, image_cells
from emp_llm.calibration.text_mix import has_images
from emp_llm.common.errors import UserError
from emp_llm.common.wording import count_of
from emp_llm.models.loading import load_processor, load_tokenizer
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.records.corpus import Corpus

IN_MEMORY = "data in memory"  # the name of the text in records
_IMAGES = ("image", "images")  # columns of rows


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


def holds_images(data: Any, tokenizer: Any) -> bool:
    """Whether data is the name of a text with a column of images, or rows with images and `tokenizer` a processor."""
    if isinstance(data, str | Path):
        return has_images(str(data))
    if not _is_processor(tokenizer) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return False
    if isinstance(data, Tensor | Mapping) or len(data) == 0:
        return False
    return isinstance(data[0], Mapping) and _row(data[0]) is not None and any(name in data[0] for name in _IMAGES)


def _is_processor(tokenizer: Any) -> bool:
    """Whether a tokenizer, or a folder in its place, is a processor of images too."""
    if isinstance(tokenizer, str | Path):
        return any((Path(tokenizer) / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    return hasattr(tokenizer, "image_processor")


def calibration_rows(data: Any, processor: Any, options: CalibrationOptions, context: int | None) -> CalibrationRows:
    """The rows of data that `holds_images`.

    Args:
        data: the name of a text with a column of images; or rows of a data set with a text or a conversation, and with an
            "image" or "images".
        processor: the model's, or its folder.
        options, context: as for `calibration_text`.

    Raises:
        UserError: the processor is missing, there are too few rows, or a row cannot be used.
    """
    if processor is None:
        raise UserError("data: images need a processor; give tokenizer=AutoProcessor.from_pretrained(...).")
    processor = load_processor(Path(processor)) if isinstance(processor, str | Path) else processor
    if not hasattr(processor, "image_processor"):
        raise UserError(
            f"data: images need a processor, and tokenizer= is a {type(processor).__name__}; give an AutoProcessor."
        )
    if isinstance(data, str | Path):
        return CalibrationRows.prepare(_with_calibration(options, str(data)), processor, context)
    rows = [_image_row(row, number) for number, row in zip(range(1, (options.samples or len(data)) + 1), data, strict=False)]
    if len(rows) < (options.samples or 1):
        raise UserError(f"data: {count_of(len(rows), 'row')}, too few for {options.samples} samples.")
    length = min(options.seqlen or 2048, context or 2048)
    corpus = Corpus(file=IN_MEMORY, column="", samples=len(rows), seqlen=length)
    return CalibrationRows.of_rows(list(rows), [corpus], processor, None)


def _image_row(row: Any, number: int) -> ImageRow:
    name = f"data, row {number}"
    text = _row(row)
    if text is None:
        raise UserError(f"{name}: it holds neither a text nor a conversation.")
    cells = [cell for each in _IMAGES for cell in image_cells(row.get(each), f"{name}: {each!r}")]
    return ImageRow(name, text, tuple(cells))


def _with_calibration(options: CalibrationOptions, name: str) -> CalibrationOptions:
    return CalibrationOptions(**(vars(options) | {"calibration": name}))


def _tokenizer(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise UserError(f"data: {what} needs a tokenizer; give tokenizer=AutoTokenizer.from_pretrained(...).")
    loaded = load_tokenizer(Path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
    return getattr(loaded, "tokenizer", loaded)  # of a processor


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
