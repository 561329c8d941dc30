"""Calibration data: text as token ids, and rows with images as the inputs that a model's processor makes of them.

The data comes from the recipes and files of `calibration.texts`, or from Python: texts, conversations, rows, token ids. Text is
tokenised once and cached by content. An image is opened when its row is used.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emp_llm.calibration.texts import (
    CHAT_COLUMNS,
    ChatText,
    calibration_corpora,
    chat_text,
    has_images,
    messages_in,
    open_data_set,
    text_in,
    text_rows,
)
from emp_llm.checkpoint.files import tensor_bytes
from emp_llm.common.errors import UserError, count_of, quotable, reason
from emp_llm.common.paths import cache_folder
from emp_llm.common.progress import progress_bar
from emp_llm.models.architecture import Architecture
from emp_llm.models.blockwise import NOT_BY_BLOCKS
from emp_llm.models.loading import load_processor, load_tokenizer
from emp_llm.models.placement import max_context
from emp_llm.options.calibration import CalibrationOptions, Propagate
from emp_llm.records.corpus import Corpus

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)
IN_MEMORY = "data in memory"  # the name of the text in records
_BYTES_PER_TOKEN = 8  # enough text for any common tokenizer: on average, its tokens have fewer bytes
_IMAGE_COLUMNS = ("image", "images")  # of rows in memory
_MARK = "<image>"  # the place of an image in a conversation written as text
_OF_IMAGES = ("pixel", "image", "video", "audio")  # how the names of inputs begin that are not one value for each token


@dataclass(frozen=True)
class CalibrationText:
    """The tokens of a calibration.

    Attributes:
        corpora: the sources of the text, in order; each has its number of samples.
        tokens: int64, shape (samples, seqlen).
        seed: of shuffled corpora; None for others.
    """

    corpora: list[Corpus]
    tokens: Tensor
    seed: int | None

    @property
    def number(self) -> int:
        """The number of tokens."""
        return self.tokens.numel()

    @property
    def signature(self) -> str:
        """SHA-256 of the tokens and their shape."""
        shape = str(tuple(self.tokens.shape)).encode()
        return hashlib.sha256(shape + self.tokens.contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class CalibrationRows:
    """The rows of a calibration with images. Inputs are made again for the forward pass, so that memory holds one row's.

    Attributes:
        corpora, seed: the sources of the data, as for `CalibrationText`.
        number: of tokens.
        signature: SHA-256 of everything that the model is called with.
        rows: of all corpora, in order: rows with images, and token ids of texts, int64, shape (tokens,).
        processor: makes their inputs.
    """

    corpora: list[Corpus]
    seed: int | None
    number: int
    signature: str
    rows: list["ImageRow | Tensor"]
    processor: "RowProcessor"


def calibration_data(
    options: CalibrationOptions,
    architecture: Architecture,
    trust_remote_code: bool = False,
    propagate: Propagate = "dense",
) -> CalibrationText | CalibrationRows:
    """Read and tokenise calibration data, so that problems with it are reported before a model is loaded.

    Args:
        options: the name of the data, the number and length of samples, and the execution.
        architecture: of the model, whose folder holds a tokenizer or a processor.
        trust_remote_code: run code from that folder.
        propagate: the inputs of each block.

    Raises:
        UserError: the data cannot be read or is too short, or the model cannot be calibrated on it in this way.
    """
    folder, config = architecture.checkpoint.folder, architecture.checkpoint.config
    if config.get("is_encoder_decoder") and (options.execution == "blocks" or propagate == "pruned"):
        raise UserError(NOT_BY_BLOCKS.format(folder))
    if not has_images(options.text_name):
        return read_text(options, load_tokenizer(folder, trust_remote_code), max_context(config))
    check_images(architecture, options, propagate)
    check_pillow()
    return read_rows(options, load_processor(folder, trust_remote_code), max_context(config))


def check_images(architecture: Architecture, options: CalibrationOptions, propagate: Propagate = "dense") -> None:
    """Raise UserError if a model cannot be calibrated on images in the way that the options ask for."""
    if not architecture.reads_images:
        raise UserError(
            f"{architecture.checkpoint.folder}: the model reads only text, and --calibration names a column of images. Leave "
            "out image=."
        )
    flags = {"--execution blocks": options.execution == "blocks", "--propagate pruned": propagate == "pruned"}
    for flag, given in flags.items():
        if given:
            raise UserError(
                f"{flag}: a calibration on images runs the whole model, because the vision tower stands before the first "
                "decoder block. Leave it out, or leave out image=."
            )


def read_text(options: CalibrationOptions, tokenizer: Any, context: int | None) -> CalibrationText:
    """The text that options name, as tokens; `context` is the model's context length in tokens, None if unknown."""
    corpora = calibration_corpora(options, context)
    tokens = torch.cat([token_ids(corpus, tokenizer, options.seed) for corpus in corpora])
    return CalibrationText(corpora, tokens, _seed(corpora, options))


def read_rows(options: CalibrationOptions, processor: Any, context: int | None) -> CalibrationRows:
    """The rows that options name, of which at least one part has images.

    Raises:
        UserError: the data cannot be read, has too few rows, or the processor refuses a row.
    """
    rows: list[ImageRow | Tensor] = []
    corpora = calibration_corpora(options, context)
    for corpus in corpora:
        if corpus.image is None:
            rows += list(token_ids(corpus, processor.tokenizer, options.seed))
            continue
        found = list(islice(image_rows(corpus, options.seed), corpus.samples))
        if len(found) < (corpus.samples or 1):
            raise UserError(
                f"{corpus.source}: {count_of(len(found), 'row')}, too few for {corpus.samples} samples; a row with images "
                "is one sequence. Lower --samples, or use more data."
            )
        rows += found
    return _with_inputs(rows, corpora, processor, _seed(corpora, options))


def _seed(corpora: list[Corpus], options: CalibrationOptions) -> int | None:
    return options.seed if any(corpus.shuffle for corpus in corpora) else None


# Text as token ids.


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
    path = cache_folder() / "tokens" / f"{_content_key(documents, tokenizer, wanted, chat)}.safetensors"
    ids = _from_cache(path)
    if ids is None:
        ids = _tokenise(documents, tokenizer, wanted, chat)
        _to_cache(path, ids)
    if samples is None or seqlen is None or wanted is None:
        return ids
    if ids.numel() < wanted:
        raise UserError(
            f"{corpus.source}: {count_of(ids.numel(), 'token')}, too short for {samples} samples x {seqlen} tokens. "
            "Lower --samples or --seqlen, or use more text."
        )
    return ids[:wanted].reshape(samples, seqlen)


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


def _from_cache(path: Path) -> Tensor | None:
    try:
        return load_file(path)["tokens"].long() if path.is_file() else None
    except Exception as error:  # a damaged entry is replaced
        logger.warning("%s: it cannot be read (%s); the text is tokenised again.", path, error)
        return None


def _to_cache(path: Path, ids: Tensor) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": ids.int()}, partial)
        partial.replace(path)
    except OSError as error:  # the cache is optional
        logger.debug("%s: not cached (%s)", path, error)
        partial.unlink(missing_ok=True)


# Data in Python.


def data_in_memory(
    data: Any, tokenizer: Any, options: CalibrationOptions, context: int | None
) -> CalibrationText | CalibrationRows | None:
    """Calibration data as a user has it in Python.

    Args:
        data: the name of a recipe, or the path of a text file; texts, conversations, or rows of a data set, with images if
            `holds_images`; token ids of shape (samples, length) or (length,).
        tokenizer: the model's, or its folder; a processor for images; None is for token ids.
        options: samples, seqlen and seed.
        context: the model's context length in tokens; None: unknown.

    Returns:
        The text or the rows; None for batches, such as a DataLoader.

    Raises:
        UserError: there is no such recipe, the tokenizer is missing, or the data is too short or cannot be used.
    """
    images = holds_images(data, tokenizer)
    if isinstance(data, str | Path):
        named = CalibrationOptions(**(vars(options) | {"calibration": str(data)}))
        if images:
            return read_rows(named, _processor(tokenizer), context)
        return read_text(named, _tokenizer(tokenizer, "a text"), context)
    if isinstance(data, Tensor):
        return _text_of_ids(data, options)
    length = min(options.seqlen or 2048, context or 2048)
    if images:
        numbered = zip(range(1, (options.samples or len(data)) + 1), data, strict=False)
        found: list[ImageRow | Tensor] = [_image_row(row, number) for number, row in numbered]
        if len(found) < (options.samples or 1):
            raise UserError(f"data: {count_of(len(found), 'row')}, too few for {options.samples} samples.")
        corpus = Corpus(file=IN_MEMORY, column="", samples=len(found), seqlen=length)
        return _with_inputs(found, [corpus], _processor(tokenizer), None)
    rows = _rows(data)
    if rows is None:
        return None
    tokenizer, ids = _tokenizer(tokenizer, "texts"), []
    for row in rows:
        text = row if isinstance(row, str) else chat_text(row, tokenizer, "data")
        ids += tokenizer(text, verbose=False, add_special_tokens=isinstance(row, str))["input_ids"]
    length = min(length, len(ids))
    samples = min(options.samples or len(ids), len(ids) // length if length else 0)
    if samples < (options.samples or 1):
        raise UserError(f"data: {len(ids)} tokens, too few for {options.samples or 1} samples x {length} tokens.")
    return _text_of_ids(torch.tensor(ids[: samples * length]).reshape(samples, length), options)


def holds_images(data: Any, tokenizer: Any) -> bool:
    """Whether data is the name of a text with a column of images, or rows with images and `tokenizer` a processor."""
    if isinstance(data, str | Path):
        return has_images(str(data))
    if isinstance(tokenizer, str | Path):
        names = ("processor_config.json", "preprocessor_config.json")
        reads_images = any((Path(tokenizer) / name).is_file() for name in names)
    else:
        reads_images = hasattr(tokenizer, "image_processor")
    if not reads_images or isinstance(data, Tensor | Mapping):
        return False
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        return False
    return isinstance(data[0], Mapping) and _row(data[0]) is not None and any(name in data[0] for name in _IMAGE_COLUMNS)


def _processor(given: Any) -> Any:
    if given is None:
        raise UserError("data: images need a processor; give tokenizer=AutoProcessor.from_pretrained(...).")
    processor = load_processor(Path(given)) if isinstance(given, str | Path) else given
    if not hasattr(processor, "image_processor"):
        raise UserError(
            f"data: images need a processor, and tokenizer= is a {type(processor).__name__}; give an AutoProcessor."
        )
    return processor


def _tokenizer(given: Any, what: str) -> Any:
    if given is None:
        raise UserError(f"data: {what} needs a tokenizer; give tokenizer=AutoTokenizer.from_pretrained(...).")
    loaded = load_tokenizer(Path(given)) if isinstance(given, str | Path) else given
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
    if isinstance(row, Mapping):
        name = next((name for name in ("text", *CHAT_COLUMNS) if name in row), None)
        return None if name is None else _row(row[name])
    return row if isinstance(row, str) else messages_in(row)


def _image_row(row: Any, number: int) -> "ImageRow":
    name = f"data, row {number}"
    text = _row(row)
    if text is None:
        raise UserError(f"{name}: it holds neither a text nor a conversation.")
    cells = [cell for each in _IMAGE_COLUMNS for cell in image_cells(row.get(each), f"{name}: {each!r}")]
    return ImageRow(name, text, tuple(cells))


# Rows with images.


@dataclass(frozen=True)
class ImageRow:
    """A row of a data set that holds a text and images.

    Attributes:
        name: of the data set and the row, for errors.
        text: a text, or the messages of a conversation.
        cells: its images, as the data set holds them: paths, bytes, {"bytes", "path"}, or images of Pillow.
        folder: where relative paths start.
    """

    name: str
    text: str | list[dict[str, Any]]
    cells: tuple[Any, ...]
    folder: Path = Path()

    def images(self) -> list["Image"]:
        """The images, in RGB; UserError if one cannot be opened."""
        return [self._opened(cell) for cell in self.cells]

    def _opened(self, cell: Any) -> "Image":
        from PIL import Image, ImageOps

        try:
            return ImageOps.exif_transpose(_image_of(cell, self.folder)).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            file = cell.get("path") if isinstance(cell, Mapping) else cell
            shown = f" {quotable(str(file))}" if isinstance(file, str | Path) else ""
            raise UserError(
                f"{self.name}: its image{shown} cannot be opened ({reason(error)}). Mend the row, or leave it out."
            ) from error


def _image_of(cell: Any, folder: Path) -> "Image":
    """An image of a cell. OSError, ValueError or SyntaxError if it cannot be read."""
    from PIL import Image

    if isinstance(cell, Image.Image):
        return cell
    data: Any = cell.get("bytes") if isinstance(cell, Mapping) else cell
    path: Any = cell.get("path") if isinstance(cell, Mapping) else cell
    if isinstance(data, bytes):
        return Image.open(BytesIO(data))
    if isinstance(cell, Mapping) and "://" in str(path):  # in an archive, or on the Hub
        import datasets

        decoded: Image.Image = datasets.Image().decode_example({"bytes": None, "path": path})
        return decoded
    return Image.open(folder / path)


def image_rows(corpus: Corpus, seed: int = 0) -> Iterator[ImageRow]:
    """The rows of a corpus with a column of images, in order. Rows are counted from 1.

    Args:
        seed: for corpora that are shuffled.

    Raises:
        UserError: Pillow is not installed; the data set or one of its columns does not exist, or does not hold text or images.
    """
    check_pillow()
    assert corpus.image is not None
    data, column = open_data_set(corpus, seed)
    data = _undecoded(data, corpus.image)
    folder = Path(corpus.file).parent if corpus.file else Path()
    for number, row in enumerate(data, 1):
        name = f"{corpus.source}, row {number}"
        text = text_in(row[column], f"{name}: column {column!r}")
        yield ImageRow(name, text, image_cells(row[corpus.image], f"{name}: column {corpus.image!r}"), folder)


def image_cells(value: Any, where: str) -> tuple[Any, ...]:
    """The images of a row: of one image, a list of them, or None; UserError, which begins with `where`, for anything else."""
    from PIL.Image import Image

    cells = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for cell in cells:
        stored = isinstance(cell, Mapping) and (cell.get("bytes") is not None or cell.get("path") is not None)
        if not stored and not isinstance(cell, str | bytes | Path | Image):
            raise UserError(f"{where} does not hold images. Name a column of images, or of the paths of image files.")
    return cells


def check_pillow() -> None:
    """Raise UserError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UserError("Calibration on images needs Pillow. Install it: pip install pillow") from error


def _undecoded(data: Any, column: str) -> Any:
    """The data set with its images as stored, so that one that cannot be opened is found with its row."""
    import datasets

    stored = datasets.Image(decode=False)
    feature = (data.features or {}).get(column)
    if isinstance(feature, datasets.Image):
        return data.cast_column(column, stored)
    if isinstance(getattr(feature, "feature", None), datasets.Image):
        return data.cast_column(column, datasets.List(stored))
    return data


def _with_inputs(rows: list[ImageRow | Tensor], corpora: list[Corpus], processor: Any, seed: int | None) -> CalibrationRows:
    """The rows of corpora, which have one `seqlen`, with the hash of their inputs: their names, dtypes, shapes and values."""
    made, digest, number = RowProcessor(processor, corpora[0].seqlen or 0), hashlib.sha256(), 0
    with progress_bar(len(rows), "images", "row") as bar:
        for row in rows:
            arguments = made.inputs(row)
            for name, value in sorted(arguments.items()):
                if isinstance(value, Tensor):
                    digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                    digest.update(tensor_bytes(value.contiguous()))
                else:
                    digest.update(f"{name} {value!r}\n".encode())
            number += arguments["input_ids"].numel()
            bar.update(1)
    return CalibrationRows(corpora, seed, number, digest.hexdigest(), rows, made)


class RowProcessor:
    """Makes the inputs of a model by the model's own processor.

    Args:
        processor: of the model.
        seqlen: longest sequence in tokens; the text of longer ones is cut at its end.
    """

    def __init__(self, processor: Any, seqlen: int) -> None:
        self._processor = processor
        self._seqlen = seqlen
        self._template = getattr(processor, "chat_template", None)
        self._placeholder = getattr(processor, "image_token", None) or getattr(processor.tokenizer, "image_token", None)

    def inputs(self, row: "ImageRow | Tensor") -> dict[str, Any]:
        """The keyword arguments of a forward pass on a row, `input_ids` first: int64, shape (1, tokens).

        Raises:
            UserError: an image cannot be opened, the processor refuses the row, or its images are too long.
        """
        from jinja2 import TemplateError

        if isinstance(row, Tensor):
            return {"input_ids": row.reshape(1, -1)}
        images = row.images()
        try:
            made = self._by_template(row, images) if self._template else self._by_placeholder(row, images)
        except UserError:
            raise
        except (TemplateError, TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
            raise UserError(f"{row.name}: the model's processor refuses it ({reason(error)}).") from error
        arguments = {"input_ids": made["input_ids"], **{name: value for name, value in made.items() if value is not None}}
        return self._cut(arguments, row)

    def _by_template(self, row: ImageRow, images: list[Any]) -> Any:
        """The inputs of a conversation. A plain text is the user's message, after its images."""
        messages = [{"role": "user", "content": row.text}] if isinstance(row.text, str) else row.text
        conversation = _with_images(messages, images, row.name)
        return self._processor.apply_chat_template(conversation, tokenize=True, return_dict=True, return_tensors="pt")

    def _by_placeholder(self, row: ImageRow, images: list[Any]) -> Any:
        """The inputs of a text after the processor's placeholders for its images, unless it has them."""
        if not isinstance(row.text, str):
            raise UserError(
                f"{row.name}: it is a conversation, and the model's processor has no chat template. Name a column of text with "
                ",column=NAME, or add chat_template.jinja to the model's folder."
            )
        if self._placeholder is None:
            raise UserError(
                f"{type(self._processor).__name__}: it has neither a chat template nor an image_token, so the place of an "
                "image in a text is unknown. Add chat_template.jinja to the model's folder."
            )
        missing = len(images) - row.text.count(self._placeholder)
        text = f"{self._placeholder * missing}{row.text}"
        return self._processor(text=[text], images=[images] if images else None, return_tensors="pt")

    def _cut(self, arguments: dict[str, Any], row: ImageRow) -> dict[str, Any]:
        """The inputs without the tokens after the longest length."""
        ids: Tensor = arguments["input_ids"]
        if ids.shape[1] <= self._seqlen:
            return arguments
        known = getattr(self._processor, "image_token_ids", None) or [getattr(self._processor, "image_token_id", None)]
        known = [each for each in known if each is not None]
        if not known and self._placeholder is not None:
            known = [self._processor.tokenizer.convert_tokens_to_ids(self._placeholder)]
        places = torch.isin(ids[0], torch.tensor(known, dtype=ids.dtype)).nonzero()[:, 0]
        end = int(places[-1]) + 1 if len(places) else 0
        if end > self._seqlen:
            raise UserError(
                f"{row.name}: the tokens of its images end after {end} tokens, and a sequence has at most {self._seqlen}. "
                f"Raise --seqlen to {end} or more, or use smaller images."
            )

        def by_token(name: str, value: Any) -> bool:  # one value for each token: shape (1, tokens, ...)
            return isinstance(value, Tensor) and value.shape[:2] == ids.shape and not name.startswith(_OF_IMAGES)

        return {name: value[:, : self._seqlen] if by_token(name, value) else value for name, value in arguments.items()}


def _with_images(messages: list[dict[str, Any]], images: list[Any], name: str) -> list[dict[str, Any]]:
    """The messages of a conversation in parts, each image at its place.

    Places are parts of the type "image"; in a conversation without such parts, each "<image>" in a text; without both, the
    images come first in the first message of the user.

    Raises:
        UserError: the numbers of places and of images differ.
    """
    filled = [message | {"content": _parts_of(message.get("content"))} for message in messages]
    if not any(part["type"] == "image" for message in filled for part in message["content"]):
        for message in filled if images else ():
            message["content"] = [piece for part in message["content"] for piece in _split(part)]
    places = [part for message in filled for part in message["content"] if part["type"] == "image"]
    if not places and images:
        first = next((message for message in filled if message.get("role") == "user"), filled[0])
        places = [{"type": "image"} for _ in images]
        first["content"] = places + first["content"]
    if len(places) != len(images):
        raise UserError(
            f"{name}: its conversation has {count_of(len(places), 'place')} for images, and its column "
            f"{count_of(len(images), 'image')}; the numbers must be equal. Mend the row, or leave it out."
        )
    for place, image in zip(places, images, strict=True):
        place.clear()
        place.update(type="image", image=image)
    return filled


def _parts_of(content: Any) -> list[dict[str, Any]]:
    """The parts of a message: of a text, or of a list whose parts a data set has padded with None."""
    if isinstance(content, list):
        parts = [{key: value for key, value in part.items() if value is not None} for part in content]
        return [part | {"type": "image"} if part.get("type") == "image_url" else part for part in parts]
    return [{"type": "text", "text": content or ""}]


def _split(part: dict[str, Any]) -> list[dict[str, Any]]:
    """A part of text, divided at the marks of images."""
    if part["type"] != "text" or _MARK not in part["text"]:
        return [part]
    pieces: list[dict[str, Any]] = []
    for number, text in enumerate(part["text"].split(_MARK)):
        if number:
            pieces.append({"type": "image"})
        if text.strip():
            pieces.append({"type": "text", "text": text.strip("\n") if number else text})
    return pieces
