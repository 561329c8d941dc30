"""Loading models and tokenizers the way transformers does it, with device maps and dtypes from the command line."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from emp_llm.models.errors import UserError, reason

DTYPES = ("auto", "bfloat16", "float16", "float32")
_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def parse_device_map(text: str) -> str | dict[str, Any]:
    """A `--device-map`: a strategy of accelerate, one device (cpu, cuda:1, disk), or a JSON object (or a file with one).

    Raises:
        UserError: it is none of these.
    """
    if text in _NAMED_MAPS:
        return text
    if text.lstrip().startswith("{") or text.endswith(".json"):
        try:
            value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--device-map {text}: cannot be read as a JSON object ({reason(error)}).") from error
        if not isinstance(value, dict):
            raise UserError(f"--device-map {text}: expected a JSON object of module names and devices.")
        for device in value.values():
            if device != "disk":
                _check_device(f"cuda:{device}" if isinstance(device, int) else str(device))
        return value
    if text == "disk":
        return {"": "disk"}
    _check_device(text)
    return {"": text}


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = ", ".join((*_NAMED_MAPS, "cpu", "cuda:N", "disk"))
        raise UserError(f"--device-map {name!r} is none of {known}, or a JSON object.") from error
    if device.type == "cpu":
        return
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        count = torch.accelerator.device_count() if here is not None else 0
        raise UserError(f"--device-map {name}: this machine has {count} accelerators{f' ({here.type})' if here else ''}.")


def check_options(device_map: str, dtype: str) -> None:
    """Raise UserError for a device map or dtype that no model could be loaded with here."""
    parse_device_map(device_map)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}.")


def load_model(folder: Path, device_map: str = "auto", dtype: str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model in evaluation mode, its weights from safetensors only.

    Args:
        folder: the model folder.
        device_map: as for `parse_device_map`.
        dtype: "auto" for the checkpoint's own, or a torch dtype's name.

    Raises:
        UserError: transformers cannot load it.
    """
    check_options(device_map, dtype)
    placement = parse_device_map(device_map)
    offload = tempfile.TemporaryDirectory(prefix="emp-llm-offload-", ignore_cleanup_errors=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=placement,
            offload_folder=offload.name,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except torch.OutOfMemoryError:
        raise
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        raise UserError(f"{folder}: transformers cannot load it ({reason(error)}).") from error
    model._emp_llm_offload = offload  # the folder goes when the model goes
    return model.eval()


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder.

    Raises:
        UserError: there is none that transformers can load.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
        raise UserError(
            f"{folder}: no tokenizer that transformers can load ({reason(error)}). Copy the model's tokenizer files into the "
            "folder."
        ) from error


def max_context(model_config: Any) -> int | None:
    """The longest sequence a model's positions reach, from its config (max_position_embeddings or n_positions)."""
    config = model_config if isinstance(model_config, dict) else model_config.to_dict()
    text = config.get("text_config") or config
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(text.get(key), int):
            return int(text[key])
    return None


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids have to be: the device of the input embedding, or, if it is offloaded, the one it runs on."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    return torch.device(next(embedding.parameters()).device)
