"""Calls to the Hub: repeated after transient errors, and explained in a sentence where the user
can mend the cause.
"""

import atexit
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, ModelInfo, constants, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import SafetensorsFileMetadata

from emp_llm.checkpoint.checkpoint import Checkpoint, why_not_gguf
from emp_llm.common.errors import UserError, reason

logger = logging.getLogger(__name__)


T = TypeVar("T")

# The base class of the HTTP library's errors, whichever library this version of the client uses;
# and JSONDecodeError, which the client raises if a proxy answers with a page of its own.
HUB_ERRORS: tuple[type[Exception], ...] = (
    HfHubHTTPError.__mro__[1],
    ConnectionError,
    TimeoutError,
    json.JSONDecodeError,
)

# Seconds before each retry; some calls of the client have retries of their own in addition.
_WAITS = (1, 2, 4, 8, 16)
_LONGEST_WAIT = 600  # seconds, however long the Hub asks for
# 409 and 412: someone else changed the branch.
_TRANSIENT = (408, 409, 412, 425, 429, 500, 502, 503, 504)
_LOG_IN = (
    "you are not logged in to the Hub. Run hf auth login, or set HF_TOKEN to a token with "
    "write access."
)
_BAD_TOKEN = (
    "the Hub does not accept your token. Make a new one and log in with it: hf auth login --force"
)
_RESUME = "Run the same command to resume."
_REFUSED_FILES = "LFS batch API returned errors:"
_SENTENCES: dict[type[Exception], str] = {
    GatedRepoError: "you have no access to it yet. Ask for it on its Hub page, then log in: hf "
    "auth login",
    RevisionNotFoundError: "the Hub has no such branch or revision of it.",
    RepositoryNotFoundError: "no such folder here, and no such repository on the Hub (or it is "
    "private).",
    HFValidationError: "no such folder, and not a Hub id (owner/name).",
    LocalEntryNotFoundError: (
        "no such folder here, not (or not all of it) in the Hub cache, and "
        "the Hub cannot be reached. Give a folder, or download it once where there is a network: "
        "hf download NAME"
    ),
    LocalTokenNotFoundError: _LOG_IN,
    NotASafetensorsRepoError: "it holds no model.safetensors, and no index of shards.",
    OfflineModeIsEnabled: "HF_HUB_OFFLINE is set; unset it.",
    SafetensorsParsingError: "a shard of it is not a safetensors file.",
}
_CHANGED = f"it changed during the push{{answer}}. See who else pushes to it. {_RESUME}"
_STATUSES = {
    403: "your token may not write there{answer}. Name a repository of your own, or use a token "
    "with write access.",
    409: _CHANGED,
    412: _CHANGED,
    429: f"the Hub has had too many requests from you. Wait some minutes. {_RESUME}",
}


def _leave_out_query(record: logging.LogRecord) -> bool:
    """A filter of the client's log, which names the addresses of uploads: their query is a
    signature.
    """
    record.msg = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1", record.getMessage())
    record.args = None
    return True


for _handler in logging.getLogger("huggingface_hub").handlers:
    _handler.addFilter(_leave_out_query)


def with_retries(call: Callable[[], T], waits: Sequence[float] = _WAITS) -> T:
    """The result of a call to the Hub, which is repeated after a transient error.

    Args:
        call: the call.
        waits: seconds before each retry. The Hub may ask for other waits.

    Raises:
        Exception: the call's error, if it is not transient or no retry is left.
    """
    for wait in waits:
        try:
            return call()
        except Exception as error:
            cause = _hub_error_behind(error)
            status = _status_of(cause)
            if (
                cause is None
                or isinstance(cause, OfflineModeIsEnabled)
                or status not in (None, *_TRANSIENT)
            ):
                raise
            if isinstance(cause, HfHubHTTPError):
                asked = cause.response.headers.get("Retry-After", "")
                if re.fullmatch("[0-9]{1,9}", asked):
                    wait = min(int(asked), _LONGEST_WAIT)
            logger.warning(
                "the Hub %s; next try in %g s.",
                f"answered {status}" if status else "did not answer",
                wait,
            )
            time.sleep(wait)
    return call()


@contextmanager
def explain_hub_errors(name: str) -> Iterator[None]:
    """Raise UserError, which begins with the repository's name, for errors that the user can
    mend; others pass through.
    """
    try:
        yield
    except Exception as error:
        sentence = _explanation(error)
        if sentence is None:
            raise
        raise UserError(f"{name}: {sentence}") from error


def unreachable(error: BaseException) -> str:
    """A sentence: the Hub does not answer. The query of an address, which may be a signature, is
    left out.
    """
    return f"the Hub at {constants.ENDPOINT} cannot be reached ({reason(error).partition('?')[0]})."


def _explanation(error: Exception) -> str | None:
    """The cause of an error and its remedy; None if the user can do nothing."""
    for error_type, sentence in _SENTENCES.items():
        if isinstance(error, error_type):
            return sentence
    if isinstance(error, PermissionError) and type(error).__module__.startswith("hf_xet"):
        return _BAD_TOKEN
    text = str(error).strip()
    if type(error) is ValueError and text.startswith(_REFUSED_FILES):  # the storage may be full
        answer = text.removeprefix(_REFUSED_FILES).strip().partition("\n")[0]
        return (
            f"the Hub refuses a large file ({answer[:200]}). When that is solved, the same "
            "command resumes."
        )
    cause = _hub_error_behind(error)
    if cause is None:
        return None
    status = _status_of(cause)
    if status is None:
        return f"{unreachable(cause)} Check the network. {_RESUME}"
    if status == 401:
        return _BAD_TOKEN if get_token() else _LOG_IN
    if status >= 500:
        return f"the Hub keeps answering {status}. Try later. {_RESUME}"
    message = getattr(cause, "server_message", None) or ""
    answer = message.strip().partition("\n")[0].rstrip(".")
    sentence = _STATUSES.get(status, f"the Hub answered {status}{{answer}}.")
    return sentence.format(answer=f" ({answer[:200]})" if answer else "")


def _status_of(error: BaseException | None) -> int | None:
    """The HTTP status of an error; None if the Hub did not answer."""
    return int(error.response.status_code) if isinstance(error, HfHubHTTPError) else None


def _hub_error_behind(error: BaseException | None) -> BaseException | None:
    """The error of the Hub or of the network that caused an error; None if there is none."""
    while error is not None and not isinstance(error, HUB_ERRORS):
        error = error.__cause__
    return error


# Download of a repository of the Hub into the cache.


_SHORT = (1, 2)  # seconds before each retry of the first request; after that only the cache is used
# The files of a checkpoint in the format of transformers, without copies of the weights in other
# formats.
_WANTED = [
    "*.json",
    "model*.safetensors",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
]
_UNWANTED = ["original/*", "onnx/*", "consolidated*", "openvino/*", "gguf/*"]


def snapshot_of(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The snapshot of a Hub repository in the cache; the missing part of it is downloaded.

    Raises:
        UserError: no such repository, no access to it, no network, or no safetensors in it.
    """
    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    with explain_hub_errors(name):
        offline = _info_of(name, revision) is None
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=_UNWANTED,
                local_files_only=offline,
            )
        )


def config_of(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """As `snapshot_of`, of config.json alone; with `trust_remote_code` also of the repository's
    code.

    Raises:
        UserError: no such repository, no access to it, no network, or no config.json in it.
    """
    wanted = ["config.json", "*.py"] if trust_remote_code else ["config.json"]
    with explain_hub_errors(name):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name}: no config.json in this repository, or in the part of it in the Hub cache."
        )
    return folder


def headers_of(name: str, revision: str | None, trust_remote_code: bool) -> tuple[Path, str] | None:
    """The files of a Hub repository for a plan: of its shards, only the headers, with holes in
    place of the numbers.

    Returns:
        A folder that lives as long as this process, and the commit; None if the Hub cannot be
        reached, or all is in the cache.

    Raises:
        UserError: no such repository, no access to it, or no safetensors in it.
    """
    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    with explain_hub_errors(name):
        info = _info_of(name, revision)
        if info is None or info.sha is None:
            return None
        with suppress(UserError, LocalEntryNotFoundError):
            Checkpoint(
                Path(
                    snapshot_download(
                        name, revision=info.sha, allow_patterns=wanted, local_files_only=True
                    )
                )
            )
            return None
        folder = Path(tempfile.mkdtemp(prefix="emp-llm-headers-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        unwanted = [*_UNWANTED, "*.safetensors"]
        snapshot_download(
            name,
            revision=info.sha,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            local_dir=folder,
        )
        shards = with_retries(
            partial(HfApi().get_safetensors_metadata, name, revision=info.sha), _SHORT
        ).files_metadata
        for shard, header in shards.items():
            _write_hollow(folder / Path(shard).name, header)  # an index may name any path
        return folder, info.sha


def _write_hollow(path: Path, header: SafetensorsFileMetadata) -> None:
    """Write a safetensors file with a header and without its numbers, as a sparse file."""
    entries = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
        for name, tensor in header.tensors.items()
    }
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(
            8
            + len(text)
            + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
        )


def _info_of(name: str, revision: str | None) -> ModelInfo | None:
    """The commit and the files of a repository; None if the Hub cannot be reached.

    Raises:
        UserError: the repository has no safetensors.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        info = with_retries(lambda: HfApi().model_info(name, revision=revision), _SHORT)
    except HfHubHTTPError:
        raise
    except HUB_ERRORS as error:
        logger.info("%s: %s Looking in the cache.", name, unreachable(error))
        return None
    files = [each.rfilename for each in info.siblings or []]
    if files and not any(file.endswith(".safetensors") for file in files):
        raise UserError(
            why_not_gguf(name, files)
            or f"{name}: no safetensors in this repository, and pickles are not loaded here. Use "
            "its automatic safetensors branch if it has one (--revision refs/pr/N), or convert it "
            "once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)."
        )
    return info
