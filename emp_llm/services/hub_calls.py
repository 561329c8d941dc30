"""Calls to the Hub: made again where the reason of a failure passes, and explained in a sentence where it does not."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, RevisionNotFoundError

from emp_llm.models.errors import UserError, reason

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = (1, 2, 4, 8, 16)  # seconds; the client's own patience, where it has any, comes on top for each
_LONGEST_WAIT = 600  # seconds, however long the Hub asks for
LOG_IN = "you are not logged in to the Hub. Run hf auth login, or set HF_TOKEN to a token with write access."
BAD_TOKEN = "the Hub does not accept your token. Make a new one and log in with it: hf auth login --force"
_PASSING = (408, 425, 429, 500, 502, 503, 504)
# First the base of what the HTTP library raises, whichever one this version of the client uses; last what the client makes of
# a proxy's page in place of the Hub's answer.
NO_ANSWER: tuple[type[Exception], ...] = (HfHubHTTPError.__mro__[1], ConnectionError, TimeoutError, json.JSONDecodeError)


def patiently(call: Callable[[], T]) -> T:
    """What a call returns; where it fails for a reason that passes, it is made again, up to five times."""
    for wait in WAITS:
        try:
            return call()
        except Exception as error:
            if not passes(error):
                raise
            pause(error, wait)
    return call()


def passes(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    cause = cause_of(error)
    return cause is not None and (status_of(cause) is None or status_of(cause) in _PASSING)


def pause(error: BaseException, wait: float) -> None:
    """Wait before a call is made again, as long as the Hub asks for if it does."""
    cause = cause_of(error)
    status = None
    if isinstance(cause, HfHubHTTPError):
        status = status_of(cause)
        asked = cause.response.headers.get("Retry-After", "")
        wait = min(int(asked), _LONGEST_WAIT) if asked.isdigit() else wait
    what = f"answered {status}" if status else "did not answer"
    logger.warning("the Hub %s; the next try in %g s.", what, wait)
    time.sleep(wait)


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error; None where there was no answer."""
    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) else None


def cause_of(error: BaseException | None) -> BaseException | None:
    """The error of the Hub or of the network that is behind an error; None where it is something else."""
    while error is not None and not isinstance(error, NO_ANSWER):
        error = error.__cause__
    return error


@contextmanager
def explaining(name: str) -> Iterator[None]:
    """Failures of the Hub, the network or the account as one sentence about the repository `name`, a UserError."""
    try:
        yield
    except UserError:
        raise
    except (LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set; unset it." if isinstance(error, OfflineModeIsEnabled) else LOG_IN
        raise UserError(f"{name}: {why}") from error
    except Exception as error:
        cause = cause_of(error)
        if cause is not None:
            raise UserError(f"{name}: {_sentence(cause)}") from error
        if type(error) in (RuntimeError, ValueError) or type(error).__module__.startswith("hf_xet"):  # the client's own
            raise UserError(f"{name}: the upload failed ({_plain(reason(error))}). The same command goes on.") from error
        raise


def _sentence(error: BaseException) -> str:
    status = status_of(error)
    if status is None:
        return f"the Hub at {constants.ENDPOINT} cannot be reached ({_plain(reason(error))}). The same command goes on."
    if status == 401:
        return BAD_TOKEN if get_token() else LOG_IN
    if status == 403:
        return f"your token may not write there{_said(error)}. Name a repository of your own, or use a token with write access."
    if isinstance(error, RevisionNotFoundError):
        return "the Hub has no such branch of it. Name a branch, or refs/pr/N of a pull request that is open."
    if status == 404:
        return "the Hub has no such repository, or hides it from you. See its name, and who is logged in: hf auth whoami"
    if status in (409, 412):
        return f"it changes while it is being written{_said(error)}. See who else pushes to it; the same command goes on."
    if status == 429:
        return "the Hub has had too many requests from you. Wait some minutes; the same command goes on."
    if status >= 500:
        return f"the Hub answers {status}, again and again. Try later; the same command goes on."
    return f"the Hub answered {status}{_said(error)}."


def _said(error: BaseException) -> str:
    """The Hub's own words, in brackets."""
    words = getattr(error, "server_message", None) or ""
    return f" ({_plain(words.strip().splitlines()[0].rstrip('.'))[:200]})" if words.strip() else ""


def _plain(text: str) -> str:
    """Without the queries of addresses: those of large files are signed, and whoever has one may write."""
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)


class _PlainAddresses(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _plain(record.getMessage()), ()
        return True


@contextmanager
def plain_addresses() -> Iterator[None]:
    """The client names the address of a request that it makes again; without its query, in here."""
    handlers = logging.getLogger("huggingface_hub").handlers
    found = _PlainAddresses()
    for handler in handlers:
        handler.addFilter(found)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(found)
