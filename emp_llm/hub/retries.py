"""Retries of calls to the Hub after transient errors; only one retry if the machine has no network."""

import errno
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = (1, 2, 4, 8, 16)  # seconds before each retry; some calls of the client have retries of their own in addition
_LONGEST_WAIT = 600  # seconds, however long the Hub asks for
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_NO_NETWORK = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL)
# The base class of the HTTP library's errors, whichever library this version of the client uses; and JSONDecodeError, which the
# client raises if a proxy answers with a page of its own.
HUB_ERRORS: tuple[type[Exception], ...] = (HfHubHTTPError.__mro__[1], ConnectionError, TimeoutError, json.JSONDecodeError)


class _Contact:
    """Whether the Hub has ever answered this process. If it has, a lost network may come back."""

    made = False


def with_retries(call: Callable[[], T], waits: Sequence[float] = WAITS) -> T:
    """The result of a call to the Hub, which is repeated after a transient error.

    Args:
        call: the call.
        waits: seconds before each retry. Without a network there is only one retry.

    Raises:
        Exception: the call's error, if it is not transient or no retry is left.
    """
    for number, wait in enumerate(waits):
        try:
            result = call()
        except Exception as error:
            note_contact(error)
            if not is_transient(error) or (number > 0 and is_offline(error)):
                raise
            wait_to_retry(error, wait)
        else:
            _Contact.made = True
            return result
    return call()


def note_contact(error: BaseException) -> None:
    """Note that the Hub can be reached, if an error is one of its answers."""
    cause = hub_error_behind(error)
    if cause is not None and status_of(cause) is not None:
        _Contact.made = True


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    cause = hub_error_behind(error)
    if cause is None or isinstance(cause, OfflineModeIsEnabled):
        return False
    return status_of(cause) is None or status_of(cause) in _TRANSIENT


def is_offline(error: BaseException) -> bool:
    """Whether this machine plainly has no network: no route, or no name resolution, and no answer of the Hub so far."""
    step: BaseException | None = error
    while step is not None and not _Contact.made:
        if isinstance(step, socket.gaierror) or (isinstance(step, OSError) and step.errno in _NO_NETWORK):
            return True
        step = step.__cause__ or step.__context__
    return False


def wait_to_retry(error: BaseException, wait: float) -> None:
    """Log one line and wait before a retry, for as long as the Hub asks, else for `wait` seconds."""
    cause = hub_error_behind(error)
    status = None
    if isinstance(cause, HfHubHTTPError):
        status = status_of(cause)
        asked = cause.response.headers.get("Retry-After", "")
        wait = min(int(asked), _LONGEST_WAIT) if asked.isdigit() else wait
    answer = f"answered {status}" if status else "did not answer"
    logger.warning("the Hub %s; next try in %g s.", answer, wait)
    time.sleep(wait)


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an error; None if the Hub did not answer."""
    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) else None


def hub_error_behind(error: BaseException | None) -> BaseException | None:
    """The error of the Hub or of the network that caused an error; None if there is none."""
    while error is not None and not isinstance(error, HUB_ERRORS):
        error = error.__cause__
    return error


def without_queries(text: str) -> str:
    """Text without the queries of its addresses: the query of a large file's address is a signature that permits writing."""
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)


class _QueryFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_queries(record.getMessage()), ()
        return True


@contextmanager
def signatures_hidden() -> Iterator[None]:
    """Remove the queries from the addresses that the client logs when it repeats a request."""
    handlers = logging.getLogger("huggingface_hub").handlers
    query_filter = _QueryFilter()
    for handler in handlers:
        handler.addFilter(query_filter)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(query_filter)
