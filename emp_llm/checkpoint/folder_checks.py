"""Checks of untrusted model folders: links, file names in the index, layer counts in the config."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from emp_llm.common.errors import UserError
from emp_llm.common.wording import quotable


def check_links(folder: Path) -> None:
    """Refuse links that point out of a model folder. Links of the Hub's cache (snapshots/REVISION to blobs) are allowed.

    Raises:
        UserError: a link points out of the folder, or is circular.
    """
    real = folder.resolve()
    blobs = real.parent.parent / "blobs" if real.parent.name == "snapshots" else None
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            end = path.resolve()
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: a circular link. Remove it.") from error
        if real not in end.parents and end.parent != blobs:
            raise UserError(
                f"{path}: a link to {end}, which lies outside the model folder. Give the folder that holds the files, or copy "
                "them into this one."
            )


def why_not_gguf(place: Path | str, files: Iterable[str]) -> str | None:
    """The refusal of a GGUF file, or of a folder or repository of GGUF files; None if no name ends in ".gguf"."""
    name = next((file for file in sorted(files) if file.lower().endswith(".gguf")), None)
    if name is None:
        return None
    what = "a GGUF file" if Path(name).name == Path(place).name else f"it holds its weights as GGUF ({quotable(name)})"
    return (
        f"{place}: {what}, a format of llama.cpp that cannot be pruned here. Give the safetensors checkpoint of the model that "
        "it was made from; then convert the pruned checkpoint to GGUF."
    )


def check_shard_name(index: Path, name: str) -> None:
    """Refuse a shard name in an index unless it is the plain name of a safetensors file in the same folder.

    Raises:
        UserError: the name is a path, has another suffix, or is not a valid file name.
    """
    plain = Path(name).name == name and name.isprintable() and len(name.encode()) <= 255
    if not plain or "\\" in name or not name.endswith(".safetensors") or name.startswith("."):
        raise UserError(
            f"{index}: '{quotable(name)}' is not the plain name of a safetensors file in this folder. Do not trust it."
        )


def check_layer_counts(path: Path, config: dict[str, Any], tensors: int) -> None:
    """Refuse a config with more layers than the checkpoint has tensors: building the model would take forever.

    Raises:
        UserError: a count of layers is too large.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            check_layer_counts(path, value, tensors)
        elif type(value) is int and key.endswith(("layer", "layers")) and value > max(tensors, 1000):
            raise UserError(
                f"{path}: {quotable(key)} is {value}, and the checkpoint has {tensors} tensors; they do not belong together. "
                "Download the model again."
            )
