"""Explains errors of the Hub, the network and the account in a sentence with the remedy. Other errors keep their traceback."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled, RevisionNotFoundError

from emp_llm.common.errors import UserError, reason
from emp_llm.hub.retries import hub_error_behind, status_of, without_queries

LOG_IN = "you are not logged in to the Hub. Run hf auth login, or set HF_TOKEN to a token with write access."
BAD_TOKEN = "the Hub does not accept your token. Make a new one and log in with it: hf auth login --force"
RESUME = "Run the same command to resume."
_XET_NETWORK = re.compile(r"CAS service error|(network|request|reqwest|connection) error|timed out", re.IGNORECASE)
_REFUSED_FILES = "LFS batch API returned errors:"


@contextmanager
def hub_errors_explained(name: str) -> Iterator[None]:
    """Raise UserError, which begins with the repository's name, for errors that the user can mend; others pass through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        sentence = _explanation(error)
        if sentence is None:
            raise
        raise UserError(f"{name}: {sentence}") from error


def unreachable(error: BaseException) -> str:
    """A sentence: the Hub does not answer."""
    why = re.sub(r"^\[Errno -?\d+\] ", "", reason(error))
    return f"the Hub at {constants.ENDPOINT} cannot be reached ({without_queries(why)})."


def _explanation(error: Exception) -> str | None:
    """The cause of an error and its remedy; None if the user can do nothing."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it."
    if isinstance(error, LocalTokenNotFoundError):
        return LOG_IN
    if isinstance(error, PermissionError) and type(error).__module__.startswith("hf_xet"):
        return BAD_TOKEN
    cause = hub_error_behind(error)
    if cause is not None:
        return _of_hub_error(cause)
    text = str(error).strip()
    if type(error) is RuntimeError and _XET_NETWORK.search(text):  # older versions of hf_xet raise nothing better
        return f"{unreachable(error)} {RESUME}"
    if type(error) is ValueError and text.startswith(_REFUSED_FILES):  # for one, the account's storage is full
        words = text.removeprefix(_REFUSED_FILES).strip().splitlines() or [""]
        return (
            f"the Hub refuses a large file ({without_queries(words[0])[:200]}). When that is solved, the same command resumes."
        )
    return None


def _of_hub_error(error: BaseException) -> str:
    status = status_of(error)
    if status is None:
        return f"{unreachable(error)} Check the network. {RESUME}"
    if status == 401:
        return BAD_TOKEN if get_token() else LOG_IN
    if status == 403:
        return (
            f"your token may not write there{_answer(error)}. Name a repository of your own, or use a token with write access."
        )
    if isinstance(error, RevisionNotFoundError):
        return "the Hub has no such branch of it. Name a branch, or refs/pr/N of an open pull request."
    if status == 404:
        return "the Hub has no such repository, or hides it from you. Check its name, and your login: hf auth whoami"
    if status in (409, 412):
        return f"it changed during the push{_answer(error)}. See who else pushes to it. {RESUME}"
    if status == 429:
        return f"the Hub has had too many requests from you. Wait some minutes. {RESUME}"
    if status >= 500:
        return f"the Hub keeps answering {status}. Try later. {RESUME}"
    return f"the Hub answered {status}{_answer(error)}."


def _answer(error: BaseException) -> str:
    """The Hub's own words, in brackets."""
    words = (getattr(error, "server_message", None) or "").strip()
    return f" ({without_queries(words.splitlines()[0].rstrip('.'))[:200]})" if words else ""
