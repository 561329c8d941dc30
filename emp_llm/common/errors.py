"""Errors that the user can fix."""

import re


class UserError(ValueError):
    """Wrong input. The message names the field or file, the rule, and the remedy. Commands print it and exit with code 2."""


class ReadError(UserError):
    """A file cannot be read at the moment. It may be intact, so work based on it stays valid."""


def reason(error: BaseException, whole: bool = False) -> str:
    """Another library's error as part of a sentence: the system's words, or the first line of the message.

    Args:
        whole: the first paragraph of the message in one line, up to 400 characters.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = str(error).strip()
    if whole:
        words = " ".join(re.split(r"\n\s*\n", text)[0].split()).rstrip(".")
        return (words if len(words) <= 400 else f"{words[:397]}...") or type(error).__name__
    return text.splitlines()[0].strip().rstrip(".") if text else type(error).__name__
