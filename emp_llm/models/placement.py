"""Where the weights of a loaded model lie, and in which form: --device-map, --load-in-8bit,
--load-in-4bit, --dtype.

Without torch and transformers until a model is loaded.
"""

import json
import logging
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from emp_llm.common.errors import UserError, count_of, quotable, reason
from emp_llm.common.ranks import ranks
from emp_llm.records.base import QuantizationRecord

if TYPE_CHECKING:
    import torch
    import transformers

Quantization = Literal["8bit", "4bit"]
_PADDED_POSITIONS = ("roberta", "camembert", "data2vec-text", "xmod", "prophetnet")
_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def parse_device_map(text: str) -> str | dict[str, Any]:
    """The value of --device-map in the form that transformers expects.

    Args:
        text: a strategy of accelerate, a device (cpu, cuda:1, disk), a JSON object, or the path of
            a file that holds one.

    Raises:
        UserError: it is none of these, names a device that this machine does not have, or spreads a
            rank over several devices.
    """
    if ranks().count > 1:
        if text not in ("auto", "cpu", "disk"):
            raise UserError(
                f"--device-map {text}: each rank holds the whole model on a device of its own. "
                "Leave it out, or use disk."
            )
        text = str(ranks().device) if text == "auto" else text
    if text in _NAMED_MAPS:
        return text
    if not text.lstrip().startswith("{") and not text.endswith(".json"):
        _check_device(text)
        return {"": text}
    try:
        value = json.loads(
            text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        )
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"--device-map {quotable(text)}: cannot be read as a JSON object ({reason(error)})."
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"--device-map {text}: expected a JSON object of module names and devices.")
    for device in value.values():
        _check_device(f"cuda:{device}" if isinstance(device, int) else str(device))
    return value


def _check_device(name: str) -> None:
    """Raise UserError unless a name is disk, or a device of this machine."""
    import torch

    if name == "disk":
        return
    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = ", ".join((*_NAMED_MAPS, "cpu", "cuda:N", "disk"))
        raise UserError(
            f"--device-map {name!r} is not one of {known}, nor a JSON object."
        ) from error
    if device.type == "cpu":
        return
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if present is not None else 0
    if present is None or present.type != device.type or (device.index or 0) >= count:
        kind = "GPU" if present is None or present.type == "cuda" else f"{present.type} device"
        raise UserError(f"--device-map {name}: {visible(count, kind)} Use cpu or auto.")


def visible(count: int, kind: str) -> str:
    """A sentence: how many devices of a kind there are, and the variable that may hide others."""
    hiding = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if hiding is None else f" (CUDA_VISIBLE_DEVICES={hiding!r})"
    return f"torch sees {count_of(count, kind)} here{why}."


def device_name(device_map: str) -> str:
    """The name of the device on which a model computes first: of a GPU, or "cpu".

    Args:
        device_map: with which the model is loaded.
    """
    import torch

    placement = parse_device_map(device_map)
    # A strategy begins with this rank's device, on which a model on disk computes.
    places = placement.values() if isinstance(placement, dict) else ()
    devices = [torch.device(place) for place in places if place != "disk"] or [ranks().device]
    gpus = [device for device in devices if device.type == "cuda"]
    return torch.cuda.get_device_name(gpus[0]) if gpus else "cpu"


def indexed(device: "torch.device") -> "torch.device":
    """A device with its number, as parameters that lie on it have."""
    import torch

    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def quantization_of(load_in_8bit: bool, load_in_4bit: bool) -> Quantization | None:
    """The quantisation that the two options request; UserError if both are given, or
    bitsandbytes is not installed.
    """
    if load_in_8bit and load_in_4bit:
        raise UserError("--load-in-8bit and --load-in-4bit exclude each other; give only one.")
    if not (load_in_8bit or load_in_4bit):
        return None
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "--load-in-8bit and --load-in-4bit need bitsandbytes. Install it: pip "
            "install bitsandbytes"
        )
    return "8bit" if load_in_8bit else "4bit"


def quantization_record(quantization: Quantization | None) -> QuantizationRecord | None:
    """The record of a quantisation for a report."""
    if quantization is None:
        return None
    form = {"8bit": "LLM.int8", "4bit": "NF4, computed in bfloat16"}[quantization]
    return QuantizationRecord(bits=quantization, format=form, bitsandbytes=version("bitsandbytes"))


def quantization_config(quantization: Quantization) -> "transformers.BitsAndBytesConfig":
    """The configuration with which transformers loads the model."""
    import torch
    import transformers

    # It warns of every cast, and LLM.int8 consists of casts.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if quantization == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def plain_config(model_config: Any) -> dict[str, Any]:
    """The values of a model's configuration; none for None."""
    values: dict[str, Any] = (
        model_config or {} if isinstance(model_config, dict | None) else model_config.to_dict()
    )
    return values


def check_ids(ids: Any, model_config: Any, where: str) -> None:
    """Raise UserError if token ids are not all of a model's vocabulary; `where` is what they
    come from.
    """
    config = plain_config(model_config)
    vocabulary = (config.get("text_config") or config).get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary <= 0 or not ids.numel():
        return
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise UserError(
            f"{where}: token id {wrong} is beyond the model's {vocabulary:,} tokens. The "
            "tokenizer may be another model's; copy the files of its own."
        )


def max_context(model_config: Any) -> int | None:
    """The longest sequence for which a model has positions, in tokens; None if its config does
    not say.
    """
    config = plain_config(model_config)
    text = config.get("text_config") or config
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(text.get(key), int):
            return int(text[key]) - _unused_positions(text)
    return None


def _unused_positions(text: dict[str, Any]) -> int:
    """Rows of a table of positions that no token has: RoBERTa counts from behind the padding's id,
    and ProphetNet predicts one position further.
    """
    kind = str(text.get("model_type"))
    if not any(name in kind for name in _PADDED_POSITIONS):
        return 0
    return (text.get("pad_token_id") or 0) + (2 if kind == "prophetnet" else 1)
