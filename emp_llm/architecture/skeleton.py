"""Skeletons: models on the meta device, built from config.json without weights; and the class that builds a model."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from emp_llm.common.errors import UserError, quotable, reason

# The generating models of transformers, by auto class; a type in several of them is built as its config.json says.
_GENERATE = {
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
_TRUST = " Its code is in the repository; if you trust it, add --trust-remote-code."
_KINDS = "causal language model, image-text-to-text or encoder-decoder class"


class NoModelClassError(UserError):
    """transformers has no class for a model that generates text for a config.json, or the file is missing.

    Attributes:
        reads_text: whether the model may have a language tower.
    """

    def __init__(self, message: str, reads_text: bool = True) -> None:
        super().__init__(message)
        self.reads_text = reads_text


def build_skeleton(folder: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder's config.json on the meta device: all modules, no weights.

    Raises:
        NoModelClassError: config.json is missing, or transformers has no class that generates text for it.
    """
    if not (folder / "config.json").is_file():
        raise NoModelClassError(f"{folder}: no config.json, so its architecture is unknown. Copy it from the original model.")
    config, auto = read_config(folder, trust_remote_code)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise NoModelClassError(
            f"{folder}: transformers cannot build the model of its config.json ({reason(error, whole=True)})."
        ) from error
    return model


def read_config(folder: Path, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The configuration of a model folder, and the auto class of transformers that builds its model.

    Raises:
        NoModelClassError: transformers does not know the model type, or has no class that generates text for it.
    """
    version = transformers.__version__
    try:
        raw, _ = transformers.PreTrainedConfig.get_config_dict(folder)
    except (ValueError, OSError) as error:
        raise NoModelClassError(f"{folder}: config.json cannot be read ({reason(error)}).") from error
    remote = raw.get("auto_map") or {}
    kind = raw.get("model_type")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, TypeError) as error:
        known = not isinstance(kind, str) or kind in transformers.CONFIG_MAPPING
        if known or trust_remote_code:
            problem = f"transformers cannot read its config.json ({reason(error, whole=True)})."
        else:
            remedy = _TRUST if remote else " Install a version that does."
            problem = f"transformers {version} does not know the model type {quotable(kind)!r}.{remedy}"
        raise NoModelClassError(f"{folder}: {problem}") from error
    name = _auto_class(config, remote if trust_remote_code else {})
    if name is None:
        hint = _TRUST if raw.get("auto_map") and not trust_remote_code else ""
        what = next(iter(getattr(config, "architectures", None) or ()), f"the model type {config.model_type!r}")
        raise NoModelClassError(
            f"{folder}: transformers {version} has no {_KINDS} for {what}.{hint}",
            reads_text=_reads_text(config),
        )
    return config, getattr(transformers, name)


def _auto_class(config: Any, remote: dict[str, Any]) -> str | None:
    """The auto class of a configuration: that of its repository's code, or whose class config.json names, or the first one."""
    own = [name for name in _GENERATE if name in remote]
    if own:
        return own[0]
    classes = getattr(config, "architectures", None) or [""]
    known = {auto: getattr(modeling_auto, table, {}).get(config.model_type) for auto, table in _GENERATE.items()}
    fitting = [auto for auto, found in known.items() if found is not None]
    named = [auto for auto in fitting if classes[0] == known[auto]]
    if not named and "AutoModelForSeq2SeqLM" in fitting:
        if classes[0].endswith("EncoderModel"):  # half of the model
            return None
        if getattr(config, "is_encoder_decoder", False):
            return "AutoModelForSeq2SeqLM"
    return next(iter(named or fitting), None)


def _reads_text(config: Any) -> bool:
    """Whether a configuration, or a part of it, has a vocabulary."""
    parts = [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}) if getattr(config, name, None))]
    return any(getattr(part, "vocab_size", None) is not None for part in parts)
