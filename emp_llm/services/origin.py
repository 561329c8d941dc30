"""The dense model that a checkpoint was made from, as its own model card describes it."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.repocard import metadata_load

from emp_llm.services.hub_calls import NO_ANSWER

logger = logging.getLogger(__name__)
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})$")
_LOST: tuple[type[Exception], ...] = (*NO_ANSWER, ValueError)  # no answer, or one that is no card
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")


@dataclass(frozen=True)
class Origin:
    """The dense model.

    Attributes:
        name: Hub id; None: a folder of which none is known.
        revision: its commit.
        metadata: of its card, what holds for a pruned model as well: licence, languages, pipeline tag, tags.
    """

    name: str | None
    revision: str | None
    metadata: dict[str, Any]


def find_origin(report: dict[str, Any], base_model: str | None = None) -> Origin:
    """What can be found of the model that a report names, in its folder and on the Hub; what cannot is said, not raised.

    Args:
        report: of the pruning run.
        base_model: its Hub id, where the user names it.
    """
    source = report["source"]
    name, revision = source["model"], source["revision"]
    folder = None
    if revision is None:
        folder = Path(name).expanduser()
        cached = _CACHED.search(str(folder.absolute()))
        name, revision = (f"{cached[1]}/{cached[2]}", cached[3]) if cached else (None, None)
    if base_model is not None and base_model != name:
        name, revision = base_model, None
    metadata = _of_folder(folder) if folder is not None else {}
    if name is None:
        logger.warning("warning: the card names no base model, because it was a folder; its Hub id goes into --base-model.")
    elif not metadata:
        metadata = _of_hub(name, revision)
    if not metadata.get("license"):
        logger.warning("warning: no licence of the base model was found; the card names none. Add it before others rely on it.")
    carried = {key: metadata[key] for key in _CARRIED if metadata.get(key)}
    tags = metadata.get("tags")
    return Origin(name, revision, carried | {"tags": [str(tag) for tag in tags] if isinstance(tags, list) else []})


def _of_folder(folder: Path) -> dict[str, Any]:
    if not (folder / "README.md").is_file():
        return {}
    try:
        return metadata_load(folder / "README.md") or {}
    except Exception as error:  # what people write into one
        logger.info("%s: no metadata of a model card there (%s).", folder, type(error).__name__)
        return {}


def _of_hub(name: str, revision: str | None) -> dict[str, Any]:
    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        data = HfApi().model_info(name, revision=revision).card_data
    except _LOST as error:
        logger.warning("warning: %s: its card could not be read (%s).", name, type(error).__name__)
        return {}
    return {} if data is None else dict(data.to_dict())  # type: ignore[no-untyped-call]
