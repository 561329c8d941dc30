"""Calls to the Hub: repeated after transient errors, and explained in a sentence where the user can mend the cause."""

import errno
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, RevisionNotFoundError

from emp_llm.common.errors import UserError, reason

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = (1, 2, 4, 8, 16)  # seconds before each retry; some calls of the client have retries of their own in addition
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
CONFLICTS = (409, 412)  # someone else changed the branch
LOG_IN = "you are not logged in to the Hub. Run hf auth login, or set HF_TOKEN to a token with write access."
BAD_TOKEN = "the Hub does not accept your token. Make a new one and log in with it: hf auth login --force"
RESUME = "Run the same command to resume."
# The base class of the HTTP library's errors, whichever library this version of the client uses; and JSONDecodeError, which the
# client raises if a proxy answers with a page of its own.
HUB_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError.__mro__[1], ConnectionError, TimeoutError, json.JSONDecodeError)

_LONGEST_WAIT = 600  # seconds, however long the Hub asks for
_NO_NETWORK = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL)
_XET_NETWORK = re.compile(r"CAS service error|(network|request|reqwest|connection) error|timed out", re.IGNORECASE)
_REFUSED_FILES = "LFS batch API returned errors:"
_SENTENCES = {
    403: "your token may not write there{answer}. Name a repository of your own, or use a token with write access.",
    404: "the Hub has no such repository, or hides it from you. Check its name, and your login: hf auth whoami",
    409: f"it changed during the push{{answer}}. See who else pushes to it. {RESUME}",
    412: f"it changed during the push{{answer}}. See who else pushes to it. {RESUME}",
    429: f"the Hub has had too many requests from you. Wait some minutes. {RESUME}",
}


def with_retries(
    call: Callable[[], T], waits: Sequence[float] = WAITS, answered: bool = False, retried: Sequence[int] = TRANSIENT
) -> T:
    """The result of a call to the Hub, which is repeated after a transient error.

    Args:
        call: the call.
        waits: seconds before each retry. The Hub may ask for other waits.
        answered: the Hub answered an earlier call, so a lost network may return. Without it, a machine that plainly has no
            network tries only twice.
        retried: HTTP statuses after which the call is repeated.

    Raises:
        Exception: the call's error, if it is not transient or no retry is left.
    """
    for number, wait in enumerate(waits):
        try:
            return call()
        except Exception as error:
            cause = _hub_error_behind(error)
            status = status_of(cause)
            lasting = cause is None or isinstance(cause, OfflineModeIsEnabled) or status not in (None, *retried)
            if lasting or (number > 0 and not answered and _is_offline(error)):
                raise
            asked = cause.response.headers.get("Retry-After", "") if isinstance(cause, HfHubHTTPError) else ""
            wait = min(int(asked), _LONGEST_WAIT) if asked.isdigit() else wait
            logger.warning("the Hub %s; next try in %g s.", f"answered {status}" if status else "did not answer", wait)
            time.sleep(wait)
    return call()


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
    return f"the Hub at {constants.ENDPOINT} cannot be reached ({_without_queries(why)})."


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status of an error; None if the Hub did not answer."""
    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) else None


def hide_signatures() -> None:
    """Remove the queries from the addresses that the client logs when it repeats a request."""
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_hide_queries)  # added only once


def _explanation(error: Exception) -> str | None:
    """The cause of an error and its remedy; None if the user can do nothing."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it."
    if isinstance(error, LocalTokenNotFoundError):
        return LOG_IN
    if isinstance(error, PermissionError) and type(error).__module__.startswith("hf_xet"):
        return BAD_TOKEN
    cause, text = _hub_error_behind(error), str(error).strip()
    if cause is not None:
        return _sentence_on(cause)
    if type(error) is RuntimeError and _XET_NETWORK.search(text):  # older versions of hf_xet raise nothing better
        return f"{unreachable(error)} {RESUME}"
    if type(error) is ValueError and text.startswith(_REFUSED_FILES):  # for one, the account's storage is full
        words = text.removeprefix(_REFUSED_FILES).strip().splitlines() or [""]
        return (
            f"the Hub refuses a large file ({_without_queries(words[0])[:200]}). When that is solved, the same command resumes."
        )
    return None


def _sentence_on(error: BaseException) -> str:
    """A sentence for an HTTP status, or for no answer."""
    status = status_of(error)
    words = (getattr(error, "server_message", None) or "").strip()
    answer = f" ({_without_queries(words.splitlines()[0].rstrip('.'))[:200]})" if words else ""
    if status is None:
        return f"{unreachable(error)} Check the network. {RESUME}"
    if status == 401:
        return BAD_TOKEN if get_token() else LOG_IN
    if isinstance(error, RevisionNotFoundError):
        return "the Hub has no such branch of it. Name a branch, or refs/pr/N of an open pull request."
    if status >= 500:
        return f"the Hub keeps answering {status}. Try later. {RESUME}"
    return _SENTENCES.get(status, f"the Hub answered {status}{{answer}}.").format(answer=answer)


def _hub_error_behind(error: BaseException | None) -> BaseException | None:
    """The error of the Hub or of the network that caused an error; None if there is none."""
    while error is not None and not isinstance(error, HUB_ERRORS):
        error = error.__cause__
    return error


def _is_offline(error: BaseException | None) -> bool:
    """Whether this machine plainly has no network: no route, or no name resolution."""
    while error is not None:
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _NO_NETWORK):
            return True
        error = error.__cause__ or error.__context__
    return False


def _without_queries(text: str) -> str:
    """Text without the queries of its addresses: the query of a large file's address is a signature that permits writing."""
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)


def _hide_queries(record: logging.LogRecord) -> bool:
    record.msg, record.args = _without_queries(record.getMessage()), ()
    return True
