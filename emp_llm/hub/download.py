"""Download of a repository of the Hub into the cache."""

import atexit
import json
import logging
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import SafetensorsFileMetadata

from emp_llm.checkpoint.checkpoint import Checkpoint, why_not_gguf
from emp_llm.common.errors import UserError
from emp_llm.hub.client import HUB_ERRORS, explain_hub_errors, unreachable, with_retries

logger = logging.getLogger(__name__)

_WAITS = (1, 2)  # seconds before each retry of the first request; after that only the cache is used
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
            partial(HfApi().get_safetensors_metadata, name, revision=info.sha), _WAITS
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
        info = with_retries(lambda: HfApi().model_info(name, revision=revision), _WAITS)
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
