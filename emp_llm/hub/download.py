"""Download of a repository of the Hub into the cache."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from emp_llm.checkpoint.checkpoint import why_not_gguf
from emp_llm.common.errors import UserError
from emp_llm.hub.client import BAD_TOKEN, HUB_ERRORS, RESUME, status_of, unreachable, with_retries

logger = logging.getLogger(__name__)

_WAITS = (1, 2)  # seconds before each retry of the first request; after that only the cache is used
# The files of a checkpoint in the format of transformers, without copies of the weights in other formats.
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
    with _explained(name, revision):
        return _download(name, revision, trust_remote_code)


def config_of(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """As `snapshot_of`, of config.json alone; with `trust_remote_code` also of the repository's code.

    Raises:
        UserError: no such repository, no access to it, no network, or no config.json in it.
    """
    wanted = ["config.json", "*.py"] if trust_remote_code else ["config.json"]
    with _explained(name, revision):
        files = None if constants.HF_HUB_OFFLINE else _files_on_hub(name, revision)
        offline = files is None
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=offline))
    if not (folder / "config.json").is_file():
        where = "the Hub cache, and the Hub cannot be reached" if offline else "this repository"
        raise UserError(f"{name}: no config.json in {where}.")
    return folder


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Raise UserError for errors of the Hub inside this context."""
    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{name}: you have no access to it yet. Ask for it on its Hub page, then log in: hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name}: the Hub has no revision {revision!r} of it.") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{name}: no such folder here, and no such repository on the Hub (or it is private).") from error
    except HFValidationError as error:
        raise UserError(f"{name}: no such folder, and not a Hub id (owner/name).") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{name}: no such folder here, not (or not all of it) in the Hub cache, and the Hub cannot be reached."
        ) from error
    except HfHubHTTPError as error:
        status = status_of(error)
        raise UserError(f"{name}: {BAD_TOKEN if status == 401 else f'the Hub answered {status}; try again later.'}") from error
    except HUB_ERRORS as error:  # the network was lost during the download
        raise UserError(f"{name}: {unreachable(error)} {RESUME}") from error


def _download(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    files = None if constants.HF_HUB_OFFLINE else _files_on_hub(name, revision)
    if files and not any(file.endswith(".safetensors") for file in files):
        gguf = why_not_gguf(name, files)
        if gguf is not None:
            raise UserError(gguf)
        raise UserError(
            f"{name}: no safetensors in this repository, and pickles are not loaded here. Use its automatic safetensors "
            "branch if it has one (--revision refs/pr/N), or convert it once: AutoModelForCausalLM.from_pretrained(...)"
            ".save_pretrained(DIR)."
        )
    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    return Path(
        snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED, local_files_only=files is None
        )
    )


def _files_on_hub(name: str, revision: str | None) -> list[str] | None:
    """The paths in a repository; None if the Hub cannot be reached."""
    try:
        # Unlike the listing of files, this call of the client has no retries of its own.
        info = with_retries(lambda: HfApi().model_info(name, revision=revision), _WAITS)
    except HfHubHTTPError:
        raise
    except HUB_ERRORS as error:
        logger.info("%s: %s Looking in the cache.", name, unreachable(error))
        return None
    return [each.rfilename for each in info.siblings or []]
