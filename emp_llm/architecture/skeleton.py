"""Skeletons: models on the meta device, built from config.json without weights."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError, reason


class NoModelClassError(UserError):
    """transformers has no causal language model class for a config.json, or the file is missing."""


def build_skeleton(folder: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder's config.json on the meta device: all modules, no weights.

    Raises:
        NoModelClassError: config.json is missing, or transformers has no causal language model class for it.
    """
    if not (folder / "config.json").is_file():
        raise NoModelClassError(f"{folder}: no config.json, so its architecture is unknown. Copy it from the original model.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        hint = "" if trust_remote_code else " If its code is in the repository and you trust it, add --trust-remote-code."
        raise NoModelClassError(
            f"{folder}: transformers has no causal language model class for it ({reason(error)}).{hint}"
        ) from error
