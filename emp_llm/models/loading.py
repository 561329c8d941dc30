"""Loading models and tokenizers the way transformers does it, with device maps and dtypes from the command line."""

import json
import logging
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedModel

from emp_llm.models.errors import UserError, reason
from emp_llm.models.memory import OutOfMemory, ran_out
from emp_llm.models.ranks import ranks

Quantization = Literal["8bit", "4bit"]
DTYPES = ("auto", "bfloat16", "float16", "float32")
_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def parse_device_map(text: str) -> str | dict[str, Any]:
    """A `--device-map`: a strategy of accelerate, one device (cpu, cuda:1, disk), or a JSON object (or a file with one).

    Raises:
        UserError: it is none of these, or one of several ranks is to have more than one device.
    """
    if ranks().count > 1:
        if text not in ("auto", "cpu", "disk"):
            raise UserError(
                f"--device-map {text}: each of the {ranks().count} ranks holds the whole model on a device of its own; leave "
                "the map out, or give cpu or disk."
            )
        text = str(ranks().device) if text == "auto" else text
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


def quantization_of(load_in_8bit: bool, load_in_4bit: bool) -> Quantization | None:
    """What the two options ask for; UserError where both are given, or bitsandbytes is not installed."""
    if load_in_8bit and load_in_4bit:
        raise UserError("--load-in-8bit and --load-in-4bit exclude each other; give one of them.")
    if not (load_in_8bit or load_in_4bit):
        return None
    if find_spec("bitsandbytes") is None:
        raise UserError("--load-in-8bit and --load-in-4bit need bitsandbytes. Install it: pip install 'emp-llm[quantize]'")
    return "8bit" if load_in_8bit else "4bit"


def quantization_record(quantization: Quantization | None) -> dict[str, str] | None:
    """What a report says of it: the format of the weights, and what made it."""
    if quantization is None:
        return None
    form = {"8bit": "LLM.int8", "4bit": "NF4, computed in bfloat16"}[quantization]
    return {"bits": quantization, "format": form, "bitsandbytes": version("bitsandbytes")}


def _quantization_config(quantization: Quantization | None) -> transformers.BitsAndBytesConfig | None:
    if quantization is None:
        return None
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of every cast that LLM.int8 consists of
    if quantization == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def check_options(device_map: str, dtype: str) -> None:
    """Raise UserError for a device map or dtype that no model could be loaded with here."""
    parse_device_map(device_map)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}.")


def load_model(
    folder: Path,
    device_map: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
) -> PreTrainedModel:
    """A causal language model in evaluation mode, its weights from safetensors only.

    Args:
        folder: the model folder.
        device_map: as for `parse_device_map`.
        dtype: "auto" for the checkpoint's own, or a torch dtype's name.
        quantization: of the linear layers but the head, while loading, by bitsandbytes.

    Raises:
        UserError: transformers cannot load it, or memory runs out.
    """
    check_options(device_map, dtype)
    placement = parse_device_map(device_map)
    if quantization is not None and isinstance(placement, dict) and "disk" in placement.values():
        raise UserError(f"--device-map {device_map}: a model quantised to {quantization} cannot lie on disk; it has to fit.")
    offload = tempfile.TemporaryDirectory(prefix="emp-llm-offload-", ignore_cleanup_errors=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=placement,
            offload_folder=offload.name,
            use_safetensors=True,
            quantization_config=_quantization_config(quantization),
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, KeyError, OSError, ImportError, MemoryError, RuntimeError) as error:
        if ran_out(error):
            raise OutOfMemory(
                f"{folder}: out of memory while it is loaded with --device-map {device_map}. Keep less of it in memory: "
                "--device-map auto, disk, or a JSON map."
            ) from error
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
    except (ValueError, KeyError, OSError, ImportError, AttributeError, RecursionError) as error:
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
