"""Device maps of the command line, checked against the devices of this machine."""

import json
from pathlib import Path
from typing import Any

import torch

from emp_llm.common.errors import UserError, count_of, reason
from emp_llm.common.ranks import ranks

_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def parse_device_map(text: str) -> str | dict[str, Any]:
    """The value of --device-map in the form that transformers expects.

    Args:
        text: a strategy of accelerate, a device (cpu, cuda:1, disk), a JSON object, or the path of a file that holds one.

    Raises:
        UserError: it is none of these, names a device that this machine does not have, or spreads a rank over several devices.
    """
    if ranks().count > 1:
        if text not in ("auto", "cpu", "disk"):
            raise UserError(
                f"--device-map {text}: each of the {ranks().count} ranks holds the whole model on a device of its own; leave "
                "the map out, or use cpu or disk."
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
        raise UserError(f"--device-map {name!r} is not one of {known}, nor a JSON object.") from error
    if device.type == "cpu":
        return
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if present is None or present.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        count = torch.accelerator.device_count() if present is not None else 0
        kind = f" ({present.type})" if present is not None else ""
        raise UserError(f"--device-map {name}: this machine has {count_of(count, 'accelerator')}{kind}.")
