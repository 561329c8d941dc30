"""The dense model of a pruned checkpoint, as its own model card describes it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.repocard import metadata_load

from emp_llm.common.paths import CARD_NAME
from emp_llm.hub.retries import HUB_ERRORS
from emp_llm.publishing.public import cached_repository
from emp_llm.records.source import ModelSource

logger = logging.getLogger(__name__)
_NO_CARD: tuple[type[Exception], ...] = (*HUB_ERRORS, ValueError)  # no answer, or metadata that cannot be parsed
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")


@dataclass(frozen=True)
class Origin:
    """The dense model.

    Attributes:
        name: Hub id; None for a folder without a known repository.
        revision: its commit.
        metadata: the part of its card that holds for a pruned model too: licence, languages, pipeline tag, tags.
    """

    name: str | None
    revision: str | None
    metadata: dict[str, Any]


def find_origin(source: ModelSource, base_model: str | None = None) -> Origin:
    """The dense model, from the report, its folder and the Hub. Missing information is a warning, not an error.

    Args:
        source: the dense model, as the report of the pruning run names it.
        base_model: its Hub id, if the user gave it.
    """
    name: str | None = source.model
    revision = source.revision
    folder = None
    if revision is None:
        folder = Path(source.model).expanduser()
        name, revision = cached_repository(source.model) or (None, None)
    if base_model is not None and base_model != name:
        name, revision = base_model, None
    metadata = _of_folder(folder) if folder is not None else {}
    if name is None:
        logger.warning("warning: the model was pruned from a folder, so the card names no base model. Give --base-model ID.")
    elif not metadata:
        metadata = _of_hub(name, revision)
    if not metadata.get("license"):
        logger.warning("warning: no licence of the base model was found, so the card names none. Add it before others use it.")
    carried = {key: metadata[key] for key in _CARRIED if metadata.get(key)}
    tags = metadata.get("tags")
    return Origin(name, revision, carried | {"tags": [str(tag) for tag in tags] if isinstance(tags, list) else []})


def _of_folder(folder: Path) -> dict[str, Any]:
    card = folder / CARD_NAME
    if not card.is_file():
        return {}
    try:
        return metadata_load(card) or {}
    except Exception as error:  # people write cards by hand, so anything can be wrong in them
        logger.info("%s: its metadata cannot be read (%s).", card, type(error).__name__)
        return {}


def _of_hub(name: str, revision: str | None) -> dict[str, Any]:
    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        data = HfApi().model_info(name, revision=revision).card_data
    except _NO_CARD as error:
        logger.warning("warning: %s: its card cannot be read (%s).", name, type(error).__name__)
        return {}
    return {} if data is None else dict(data.to_dict())  # type: ignore[no-untyped-call]
