"""Finds a model by its name: a folder on this machine, or a repository on the Hub, which is
downloaded into the cache.
"""

from dataclasses import dataclass
from pathlib import Path

from emp_llm.checkpoint.checkpoint import why_not_gguf
from emp_llm.common.errors import UserError
from emp_llm.records.base import ModelIdentity, ModelSource


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: as the user gave it.
        folder: with its files.
        revision: its commit on the Hub; None for a folder that the user named.
        headers_only: the folder has the headers of the shards, and holes in place of the weights.
    """

    name: str
    folder: Path
    revision: str | None
    headers_only: bool = False

    @property
    def short_name(self) -> str:
        """The name without owner or path, for the names of outputs."""
        return self.folder.name if self.revision is None else self.name.rpartition("/")[2]

    def as_source(self, identity: str) -> ModelSource:
        """The model of an identity, as reports name it."""
        known = ModelIdentity.of(self.folder, identity).as_dict()
        return ModelSource(model=self.name, revision=self.revision, **known)


def find_model(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    headers_suffice: bool = False,
) -> LocalModel:
    """A local folder, or the snapshot of a Hub repository; the missing part of it is downloaded.

    Args:
        name: a folder or a Hub id, which may end in @REVISION.
        headers_suffice: do not download weights. The result is `headers_only` if they are not
            in the cache.

    Raises:
        UserError: no such folder or repository, no access to it, no network, or no safetensors in
            it.
    """
    local = _local_folder(name, revision)
    if local is not None:
        return LocalModel(name, local, None)
    name, revision = _with_revision(name, revision)
    from emp_llm.models.hub import headers_of, snapshot_of

    headers = headers_of(name, revision, trust_remote_code) if headers_suffice else None
    if headers is not None:
        return LocalModel(name, *headers, headers_only=True)
    folder = snapshot_of(name, revision, trust_remote_code)
    return LocalModel(name, folder, folder.name)


def find_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The folder of a model's config.json: a local folder, or a folder of the Hub cache, where only
    config.json need be.

    Args:
        trust_remote_code: also download the repository's code.

    Raises:
        UserError: no such folder or repository, no access to it, no network, or no config.json in
            it.
    """
    folder = _local_folder(name, revision)
    if folder is None:
        from emp_llm.models.hub import config_of

        name, revision = _with_revision(name, revision)
        folder = config_of(name, revision, trust_remote_code)
    return folder


def _with_revision(name: str, revision: str | None) -> tuple[str, str | None]:
    """A Hub id and its revision, which is given beside it or in it: owner/name@revision."""
    repository, _, named = name.partition("@")
    if named and revision is not None:
        raise UserError(f"--revision {revision} and {name} both name a revision; give only one.")
    return (repository, named) if named else (name, revision)


def _local_folder(name: str, revision: str | None) -> Path | None:
    """The folder that a name means; None for a Hub id."""
    path = Path(name).expanduser()
    if not (path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return None
    if revision is not None:
        raise UserError(f"--revision {revision} is for Hub ids; {name} is a folder. Leave it out.")
    if path.is_file() and (gguf := why_not_gguf(path, [path.name])) is not None:
        raise UserError(gguf)
    if not path.is_dir():
        raise UserError(
            f"{path}: no such model folder. Give a folder with safetensors, or a Hub "
            "id (owner/name)."
        )
    return path.resolve()
