"""The Hugging Face Hub: from a model's name to a folder with its files."""

import logging
from dataclasses import dataclass
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

from emp_llm.models.errors import UserError
from emp_llm.services.hub_calls import BAD_TOKEN, status_of

logger = logging.getLogger(__name__)

# What a checkpoint in transformers' format consists of; not the same weights again in other formats.
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


@dataclass(frozen=True)
class Source:
    """Where a model comes from: what the user called it, its folder, and the commit of the Hub it is, if any."""

    name: str
    folder: Path
    revision: str | None

    @property
    def short_name(self) -> str:
        """The name without owner or path: what an output is called after."""
        return self.folder.name if self.revision is None else self.name.rpartition("/")[2]


def find_model(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """A local folder as it is, or the snapshot of a Hub repository, downloaded where it is not in the cache.

    Raises:
        UserError: no such folder, no such repository, no access to it, no network, or no safetensors in it.
    """
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if revision is not None:
            raise UserError(f"--revision {revision} goes with a Hub id; {name} is a folder.")
        if not path.is_dir():
            raise UserError(f"{path}: no such model folder. Give a folder with safetensors, or a Hub id (owner/name).")
        return Source(name, path.resolve(), None)
    try:
        return _download(name, revision, trust_remote_code)
    except GatedRepoError as error:
        raise UserError(
            f"{name}: access to it must be granted first. Ask on its Hub page, then log in: hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name}: the Hub has no revision {revision!r} of it.") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{name}: no such folder here, and no such repository on the Hub (or it is private).") from error
    except HFValidationError as error:
        raise UserError(f"{name}: no such folder, and not a Hub id (owner/name).") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise UserError(f"{name}: no such folder here, not in the Hub cache, and the Hub cannot be reached.") from error
    except HfHubHTTPError as error:
        status = status_of(error)
        raise UserError(f"{name}: {BAD_TOKEN if status == 401 else f'the Hub answered {status}; try again later.'}") from error


def _download(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    if not constants.HF_HUB_OFFLINE:
        try:
            files = HfApi().list_repo_files(name, revision=revision)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception as error:  # whatever the HTTP library raises without a network: what is in the cache has to do
            logger.info("%s: the Hub cannot be reached (%s); looking in the cache.", name, type(error).__name__)
            files = []
        if files and not any(file.endswith(".safetensors") for file in files):
            raise UserError(
                f"{name}: no safetensors in this repository, and pickles are not loaded here. Use its automatic safetensors "
                "branch if it has one (--revision refs/pr/N), or convert it once: AutoModelForCausalLM.from_pretrained(...)"
                ".save_pretrained(DIR)."
            )
    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED))
    return Source(name, folder, folder.name)
