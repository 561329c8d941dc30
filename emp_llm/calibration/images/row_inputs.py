"""The inputs of a model for rows with images, made by the model's own processor."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from emp_llm.calibration.images.image_rows import ImageRow
from emp_llm.common.errors import UserError, reason
from emp_llm.common.wording import count_of
from emp_llm.storage.buffers import tensor_bytes

_MARK = "<image>"  # the place of an image in a conversation written as text
_OF_IMAGES = ("pixel", "image", "video", "audio")  # how the names of inputs begin that are not one value for each token


class RowProcessor:
    """Makes the inputs of a model.

    Args:
        processor: of the model.
        seqlen: longest sequence in tokens; the text of longer ones is cut at its end.
    """

    def __init__(self, processor: Any, seqlen: int) -> None:
        self._processor = processor
        self._seqlen = seqlen
        self._template = getattr(processor, "chat_template", None)
        self._placeholder = getattr(processor, "image_token", None) or getattr(processor.tokenizer, "image_token", None)

    def inputs(self, row: ImageRow) -> dict[str, Any]:
        """The keyword arguments of a forward pass on a row, `input_ids` first: int64, shape (1, tokens).

        Raises:
            UserError: an image cannot be opened, the processor refuses the row, or its images are too long.
        """
        from jinja2 import TemplateError

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
        places = self._image_places(ids)
        end = int(places[-1]) + 1 if len(places) else 0
        if end > self._seqlen:
            raise UserError(
                f"{row.name}: the tokens of its images end after {end} tokens, and a sequence has at most {self._seqlen}. "
                f"Raise --seqlen to {end} or more, or use smaller images."
            )
        return {
            name: value[:, : self._seqlen] if _is_by_token(name, value, ids) else value for name, value in arguments.items()
        }

    def _image_places(self, ids: Tensor) -> Tensor:
        """The places of the tokens of images, int64, shape (number,)."""
        known = getattr(self._processor, "image_token_ids", None) or [getattr(self._processor, "image_token_id", None)]
        known = [each for each in known if each is not None]
        if not known and self._placeholder is not None:
            known = [self._processor.tokenizer.convert_tokens_to_ids(self._placeholder)]
        return torch.isin(ids[0], torch.tensor(known, dtype=ids.dtype)).nonzero()[:, 0]


def inputs_digest(inputs: Iterable[dict[str, Any]]) -> tuple[str, int]:
    """SHA-256 of the inputs of rows, with their names, dtypes and shapes; and the number of their tokens."""
    digest, tokens = hashlib.sha256(), 0
    for arguments in inputs:
        for name in sorted(arguments):
            value = arguments[name]
            if isinstance(value, Tensor):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                digest.update(tensor_bytes(value.contiguous()))
            else:
                digest.update(f"{name} {value!r}\n".encode())
        tokens += arguments["input_ids"].numel()
    return digest.hexdigest(), tokens


def _is_by_token(name: str, value: Any, ids: Tensor) -> bool:
    """Whether an input has one value for each token: shape (1, tokens, ...)."""
    return isinstance(value, Tensor) and value.shape[:2] == ids.shape and not name.startswith(_OF_IMAGES)


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
