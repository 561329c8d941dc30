"""Conversations in the usual formats, and their text by a tokenizer's chat template.

A row holds messages as OpenAI (`role`, `content`) or ShareGPT (`from`, `value`) writes them, or
a `prompt` and its `completion` or `chosen` answer, as TRL does. What its `tools` or `functions`,
`documents`, `system` and `chat_template_kwargs` hold belongs to the conversation. All of it may be
JSON text. A template gets it in the form that transformers documents: the arguments of tool calls
and the parameters of tools are mappings, and content is text or a list of parts, whichever the
template reads. What has no such form is refused, with its row and field.
"""

import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from emp_llm.common.errors import UserError, quotable, reason
from emp_llm.common.machine import at_most_more

CHAT_COLUMNS = ("messages", "conversations", "conversation")
IDS_COLUMN = "input_ids"  # of token ids
PROMPT_COLUMN = "prompt"
_ANSWERS = ("completion", "chosen")  # to a prompt; "chosen" may also hold the whole conversation
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
# What may belong to the text of a row, beside the column that holds it.
BESIDE = (
    *_ANSWERS,
    *("tools", "functions", "documents", "system", "chat_template_kwargs", "attention_mask"),
    *_MEDIA,
)
_ROLES = {  # of ShareGPT
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
    "function_call": "assistant",
}
_JSON_LIST = re.compile(r"\s*\[\s*\{\s*['\"]\w+['\"]\s*:")
_TEMPLATE_BYTES = 1 << 30  # of memory that a chat template may take
_PROBE = "emp-llm-probe"


@dataclass(frozen=True)
class Chat:
    """A conversation, in the form that chat templates read.

    Attributes:
        messages: mappings with "role", and mostly "content".
        where: the data set and the row, for errors.
        beside: "tools" and "documents" as the row has them, if there are some.
        variables: other variables of the template.
        unanswered: it is a prompt alone.
    """

    messages: list[dict[str, Any]]
    where: str
    beside: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    unanswered: bool = False

    def to_answer(self) -> "Chat":
        """The conversation without its last answer, for a model to write."""
        if self.messages[-1]["role"] != "assistant":
            return self
        return replace(self, messages=self.messages[:-1])

    def unread(self, tokenizer: Any) -> set[str]:
        """The fields that the template of a tokenizer does not read."""
        names = {*self.beside, *self.variables}
        if any("tool_calls" in message for message in self.messages):
            names.add("tool_calls")
        return {name for name in names if name not in str(tokenizer.chat_template)}


def text_column(columns: Any) -> str:
    """The column of the text among those of a row or data set; "text" if none is known."""
    known = ["text", *CHAT_COLUMNS, IDS_COLUMN]
    if not {*_ANSWERS}.isdisjoint(columns):
        known += [PROMPT_COLUMN, "chosen"]
    return next((name for name in known if name in columns), "text")


def text_in(
    row: Mapping[str, Any], column: str, where: str, answered: bool = True
) -> str | Chat | tuple[int, ...] | None:
    """The text, the conversation or the token ids of a row; None if it holds none of them.

    Args:
        column: of the text.
        where: the data set and the row, for errors.
        answered: a prompt is followed by its answer, if the row has one.

    Raises:
        UserError: a field of a conversation cannot be used.
    """
    value = row.get(column)
    if column == IDS_COLUMN:
        return _ids_in(value, row.get("attention_mask"))
    if column == "text" and isinstance(value, str):
        return value
    values = {column: value}
    if column == PROMPT_COLUMN and answered:
        values |= {name: row[name] for name in _ANSWERS if row.get(name) is not None}
    found = {name: _messages(each, name, where) for name, each in values.items()}
    if all(isinstance(each, str) for each in found.values()):
        return "".join(found.values())  # type: ignore[arg-type]  # all are text
    if None in found.values():
        return None
    if str in map(type, found.values()):
        raise UserError(
            f"{where}: of {' and '.join(values)}, one is text and the other a conversation. Write "
            "both in one form, or remove the row."
        )
    messages: list[Any] = [message for each in found.values() for message in each or ()]
    media = next((name for name in _MEDIA if _is_given(row.get(name))), None)
    if media is not None:
        raise UserError(
            f"{where}: {media}: the conversation has images, video or audio, and this is for text "
            "alone. Remove the row, or give batches with images to prune_model."
        )
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    beside = {"tools": row.get("tools") or row.get("functions"), "documents": row.get("documents")}
    variables = row.get("chat_template_kwargs") or {}
    return Chat(
        messages,
        where,
        {name: each for name, each in beside.items() if _is_given(each)},
        _typed(variables, Mapping, f"{where}: chat_template_kwargs"),
        unanswered=column == PROMPT_COLUMN and len(values) == 1,
    )


def _ids_in(value: Any, mask: Any) -> tuple[int, ...] | None:
    """Token ids, without those that an attention mask leaves out; None if they are none."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        return None
    if isinstance(mask, list) and len(mask) == len(value):
        return tuple(token for token, kept in zip(value, mask, strict=True) if kept)
    return tuple(value)


def _messages(value: Any, column: str, where: str) -> list[dict[str, Any]] | str | None:
    """The messages of a conversation, or the text that a column holds; None if it is neither."""
    where = f"{where}: {column}"
    text = value if isinstance(value, str) else None
    if text is not None and not _JSON_LIST.match(text):
        return text
    if column in (*CHAT_COLUMNS, PROMPT_COLUMN, *_ANSWERS):
        value = _parsed(value, where)
        text = None
    elif text is not None:  # any column may hold JSON as such
        with suppress(UserError):
            value = _parsed(text, where)
    if isinstance(value, Mapping):  # of lists, as older versions of datasets have it
        lists = [each for each in value.values() if isinstance(each, list)]
        if len(lists) < len(value) or len({len(each) for each in lists}) != 1:
            return None
        value = [dict(zip(value, each, strict=True)) for each in zip(*lists, strict=True)]
    if not isinstance(value, list) or not value:
        return text
    value = [
        _parsed(each, where) if isinstance(each, str) and each.lstrip().startswith("{") else each
        for each in value
    ]
    if not all(isinstance(each, Mapping) and {"role", "from"} & each.keys() for each in value):
        return text
    return [_message(each, where) for each in value]


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with "role", and with tool calls whose arguments are mappings."""
    message = {name: value for name, value in given.items() if value is not None}
    call = message.pop("function_call", None)
    role = message.pop("role", None)
    value = message.pop("value", None)
    if role is None:  # of ShareGPT
        role = message.pop("from", None)
        if role == "function_call":
            call, value = value, None
        role = _ROLES.get(role, role) if isinstance(role, str) else role
    if value is not None:
        message.setdefault("content", value)
    if not isinstance(role, str):
        raise UserError(
            f"{where}: the role of a message is {quotable(repr(role))}. Name one, such as user, or "
            "remove the row."
        )
    calls = _list(message.pop("tool_calls", None) or call, f"{where}: tool_calls")
    message = {"role": "tool" if role == "function" else role} | message
    if calls:
        each = f"{where}: tool_calls"
        message["tool_calls"] = [_function(call, "arguments", each) for call in calls]
    return message


def _function(given: Any, key: str, where: str) -> Any:
    """A tool, or a call of one, as {"type": "function", "function": {...}}; its parameters or
    arguments, under `key`, are a mapping. A tool may also be a function of Python.
    """
    if callable(given):
        return given
    typed = _typed(given, Mapping, where)
    value = {name: each for name, each in typed.items() if each is not None}
    if "function" not in value and "name" in value:
        names = ("name", "description", "strict", key)
        function = {name: value.pop(name) for name in names if name in value}
        value = {"type": "function"} | value | {"function": function}
    if "function" in value:
        function = dict(_typed(value["function"], Mapping, f"{where}: function"))
        if key in function or key == "arguments":
            function[key] = _typed(function.get(key) or {}, Mapping, f"{where}: {key}")
        value["function"] = function
    return value


def _is_given(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _typed(value: Any, kind: type, where: str) -> Any:
    """A value that must be a list or a mapping; JSON text is parsed."""
    value = _parsed(value, where)
    if not isinstance(value, kind):
        raise UserError(
            f"{where}: a {kind.__name__.lower()} is wanted, and it is of type "
            f"{type(value).__name__}. Correct or remove the row."
        )
    return value


def _list(value: Any, where: str) -> list[Any]:
    """A list of mappings, which may be one alone, or none."""
    value = _parsed(value or [], where)
    return [value] if isinstance(value, Mapping) else list(_typed(value, list, where))


def _parsed(value: Any, where: str) -> Any:
    """A value, parsed if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: it is text, but not JSON ({quotable(reason(error))}). Correct or remove the "
            "row."
        ) from error


def chat_text(chat: Chat, tokenizer: Any, answer: bool = False) -> str:
    """A conversation as text, by the tokenizer's chat template, which writes the special tokens
    too.

    Args:
        answer: end with what begins an answer.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the conversation,
            cannot show a part of it, or needs too much memory.
    """
    where = chat.where
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{where}: it is a conversation, and the tokenizer of the model has no chat "
            "template. Name a column of text with ,column=NAME, or add chat_template.jinja to the "
            "model's folder."
        )
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    wrong = next((name for name in chat.variables if name in reserved), None)
    if wrong is not None:
        raise UserError(
            f"{where}: chat_template_kwargs: {wrong} is an argument of transformers, not a "
            "variable of a template. Remove it."
        )
    template = str(tokenizer.chat_template)
    beside = {
        name: [
            _function(each, "parameters", f"{where}: {name}")
            if name == "tools"
            else _typed(each, Mapping, f"{where}: {name}")
            for each in _list(value, f"{where}: {name}")
        ]
        for name, value in chat.beside.items()
        if name in template
    }
    reads_text, reads_parts = _forms(tokenizer, template)
    messages = []
    for message in chat.messages:
        content = message.get("content")
        if isinstance(content, str) and not reads_text:
            message = message | {"content": [{"type": "text", "text": content}]}
        elif "content" in message and not isinstance(content, str):
            shown = _parts(message, f"{where}: content", template if reads_parts else "")
            message = message | {"content": shown}
        messages.append(message)
    answer = answer or (chat.unanswered and chat.messages[-1]["role"] != "assistant")
    try:
        with at_most_more(_TEMPLATE_BYTES):
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=answer,
                    **beside,
                    **chat.variables,
                )
            )
    except Exception as error:  # any: a template is a program of the model's folder
        problem = quotable(reason(error))
        raise UserError(
            f"{where}: the chat template refuses a conversation ({problem})."
        ) from error


@lru_cache(maxsize=4)
def _forms(tokenizer: Any, template: str) -> tuple[bool, bool]:
    """Whether the template of a tokenizer shows content that is text, and content in parts; both
    if it shows neither, because it refuses the question.
    """
    shown = []
    for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
        try:
            with at_most_more(_TEMPLATE_BYTES):
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], tokenize=False
                )
        except Exception:  # as in `chat_text`
            text = ""
        # Quotes are those of a list that is shown as such.
        shown.append(_PROBE in text and not re.search(f"['\"]{_PROBE}['\"]", text))
    return (shown[0], shown[1]) if any(shown) else (True, True)


def _parts(message: Mapping[str, Any], where: str, template: str) -> Any:
    """Content that is not text, as a template shows it; UserError if it does not.

    Args:
        template: its source, if it reads parts; else empty, and the parts are joined by line ends.
    """
    content = message["content"]
    is_parts = isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and {"type", "text"} & part.keys())
        for part in content
    )
    if not is_parts:
        if message["role"] == "tool":
            return content  # an object that a tool returned
        raise UserError(
            f"{where} is of type {type(content).__name__}; text or a list of parts is wanted. "
            "Correct or remove the row."
        )
    parts = []
    for part in content:
        given = {"text": part} if isinstance(part, str) else part
        given = {name: value for name, value in given.items() if value is not None}
        kind = given.get("type", "text")
        if kind in ("text", "input_text", "output_text") and isinstance(given.get("text"), str):
            parts.append(given | {"type": "text"})
            continue
        is_medium = re.search("image|video|audio|file", str(kind)) is not None
        if is_medium or not isinstance(kind, str) or kind not in template:
            raise UserError(
                f"{where} has a part of type {quotable(str(kind))}, which "
                + ("is not text" if is_medium else "the chat template does not show")
                + ". Remove the row."
            )
        parts.append(given)
    return parts if template else "\n".join(part["text"] for part in parts)
