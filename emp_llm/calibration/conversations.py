"""Chat data: conversations as text, by the tokenizer's chat template."""

from collections.abc import Callable
from typing import Any

from emp_llm.common.errors import UserError, reason

COLUMNS = ("messages", "conversations")  # used if a data set has no column "text"
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
Render = Callable[[list[dict[str, Any]]], str]


class ChatText(str):
    """A conversation as text. The template has written the special tokens, so that the tokenizer must add none."""

    __slots__ = ()


def messages_in(value: Any) -> list[dict[str, Any]] | None:
    """The messages of a row, each with "role" and "content"; None if the row holds no conversation.

    Args:
        value: a list of messages with "role" and "content", or with "from" and "value" as in ShareGPT.
    """
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        return None
    if all("role" in each and "content" in each for each in value):
        return [{name: part for name, part in each.items() if part is not None} for each in value]
    if all("from" in each and "value" in each for each in value):
        return [{"role": _ROLES.get(each["from"], each["from"]), "content": each["value"]} for each in value]
    return None


def chat_text(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> ChatText:
    """A conversation as text.

    Args:
        messages: of `messages_in`.
        tokenizer: the model's.
        where: the data set, for errors.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{where}: its rows are conversations, and the tokenizer of the model has no chat template. Name a column of text "
            "with ,column=NAME, or add chat_template.jinja to the model's folder."
        )
    try:
        return ChatText(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"{where}: the chat template refuses a conversation ({reason(error)}).") from error
