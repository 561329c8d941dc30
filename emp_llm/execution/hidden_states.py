"""Hidden states between two blocks, one tensor for each batch: on the device, in CPU memory, or in a file."""

import errno
import tempfile
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from emp_llm.checkpoint.files import read_exactly, tensor_bytes, write_exactly
from emp_llm.common.errors import UserError
from emp_llm.common.machine import available_memory
from emp_llm.options.calibration import Place


class HiddenStates:
    """Numbered tensors. A new tensor replaces the one with its number.

    Args:
        place: "device", "cpu", or "disk": an unnamed file in the folder for temporary files, which disappears on `close`.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._tensors: dict[int, Tensor] = {}
        self._regions: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        self._file = tempfile.TemporaryFile(prefix="emp-llm-hidden-") if place == "disk" else None  # noqa: SIM115

    def get(self, number: int, device: torch.device) -> Tensor:
        """The tensor with a number, on a device."""
        if self._file is None:
            return self._tensors[number].to(device)
        offset, shape, dtype = self._regions[number]
        tensor = torch.empty(shape, dtype=dtype)
        read_exactly(self._file.fileno(), tensor_bytes(tensor), offset, Path("hidden states"))
        return tensor.to(device)

    def put(self, number: int, tensor: Tensor) -> None:
        """Store a tensor under a number.

        Raises:
            UserError: the disk is full.
        """
        if self._file is None:
            self._tensors[number] = tensor.cpu() if self.place == "cpu" else tensor
            return
        copy = tensor.contiguous().cpu()
        offset, shape, dtype = self._regions.get(number, (self._end, copy.shape, copy.dtype))
        if (shape, dtype) != (copy.shape, copy.dtype):
            offset = self._end
        try:
            write_exactly(self._file.fileno(), tensor_bytes(copy), offset)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"{tempfile.gettempdir()}: no space left for the hidden states. Set TMPDIR to a folder on a larger disk, or "
                "use --hidden-states cpu."
            ) from error
        self._regions[number] = (offset, copy.shape, copy.dtype)
        self._end = max(self._end, offset + copy.nbytes)

    def close(self) -> None:
        """Free the memory or the file."""
        self._tensors.clear()
        if self._file is not None:
            self._file.close()


def choose_place(wanted: Place, needed: int, device: torch.device) -> Place:
    """Where to store hidden states; for "auto", the nearest place in which they take less than half of the free memory.

    Args:
        wanted: the user's choice.
        needed: bytes of the hidden states.
        device: of the first block.

    Raises:
        UserError: `wanted` is not a place.
    """
    check_place(wanted)
    if device.type == "cpu" and wanted == "device":
        return "cpu"
    if wanted != "auto":
        return wanted
    if device.type == "cuda" and 2 * needed < torch.cuda.mem_get_info(device)[0]:
        return "device"
    available = available_memory()
    return "cpu" if available is None or 2 * needed < available else "disk"


def check_place(wanted: str) -> None:
    """Raise UserError for a value that is not a place."""
    if wanted not in get_args(Place):
        raise UserError(f"--hidden-states {wanted!r} is not one of {', '.join(get_args(Place))}.")
