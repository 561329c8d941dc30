"""Download of a repository of the Hub into the cache."""

import atexit
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import filter_repo_objects

from emp_llm.checkpoint.checkpoint import Checkpoint, why_not_gguf
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
        offline = constants.HF_HUB_OFFLINE or _info_of(name, revision) is None
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=offline))
    if not (folder / "config.json").is_file():
        where = "the Hub cache, and the Hub cannot be reached" if offline else "this repository"
        raise UserError(f"{name}: no config.json in {where}.")
    return folder


def headers_of(name: str, revision: str | None, trust_remote_code: bool) -> tuple[Path, str] | None:
    """The files of a Hub repository for a plan: of its shards, only the headers, with holes in place of the numbers.

    Returns:
        A folder that lives as long as this process, and the commit; None if the Hub cannot be reached, or all is in the cache.

    Raises:
        UserError: no such repository, no access to it, or no safetensors in it.
    """
    with _explained(name, revision):
        info = None if constants.HF_HUB_OFFLINE else _info_of(name, revision)
        if info is None or info.sha is None:
            return None
        _check_files(name, info)
        wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
        with suppress(UserError, LocalEntryNotFoundError):
            Checkpoint(Path(snapshot_download(name, revision=info.sha, allow_patterns=wanted, local_files_only=True)))
            return None
        unwanted = [*_UNWANTED, "*.safetensors"]
        snapshot = Path(snapshot_download(name, revision=info.sha, allow_patterns=wanted, ignore_patterns=unwanted))
        folder = Path(tempfile.mkdtemp(prefix="emp-llm-headers-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        shutil.copytree(snapshot, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        for shard in filter_repo_objects([file.rfilename for file in info.siblings or []], allow_patterns="model*.safetensors"):
            try:
                header = with_retries(partial(HfApi().parse_safetensors_file_metadata, name, shard, revision=info.sha), _WAITS)
            except SafetensorsParsingError as error:
                raise UserError(f"{name}: {shard} is not a safetensors file.") from error
            _write_hollow(folder / shard, {each: vars(tensor) for each, tensor in header.tensors.items()})
        return folder, info.sha


def _write_hollow(path: Path, tensors: dict[str, dict[str, Any]]) -> None:
    """Write a safetensors file with a header and without its numbers, as a sparse file."""
    entries = {
        name: {"dtype": tensor["dtype"], "shape": list(tensor["shape"]), "data_offsets": list(tensor["data_offsets"])}
        for name, tensor in tensors.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max((entry["data_offsets"][1] for entry in entries.values()), default=0))


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
    info = None if constants.HF_HUB_OFFLINE else _info_of(name, revision)
    if info is not None:
        _check_files(name, info)
    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    return Path(
        snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED, local_files_only=info is None
        )
    )


def _check_files(name: str, info: ModelInfo) -> None:
    """Raise UserError if a repository has no safetensors."""
    files = [each.rfilename for each in info.siblings or []]
    if files and not any(file.endswith(".safetensors") for file in files):
        gguf = why_not_gguf(name, files)
        if gguf is not None:
            raise UserError(gguf)
        raise UserError(
            f"{name}: no safetensors in this repository, and pickles are not loaded here. Use its automatic safetensors "
            "branch if it has one (--revision refs/pr/N), or convert it once: AutoModelForCausalLM.from_pretrained(...)"
            ".save_pretrained(DIR)."
        )


def _info_of(name: str, revision: str | None) -> ModelInfo | None:
    """The commit and the files of a repository; None if the Hub cannot be reached."""
    try:
        # Unlike the listing of files, this call of the client has no retries of its own.
        return with_retries(lambda: HfApi().model_info(name, revision=revision), _WAITS)
    except HfHubHTTPError:
        raise
    except HUB_ERRORS as error:
        logger.info("%s: %s Looking in the cache.", name, unreachable(error))
        return None
