"""Hidden states between two blocks, one tensor to a batch: on the device, in CPU memory, or in a file."""

import errno
import tempfile
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from emp_llm.models.direct import bytes_of, read_exactly, write_exactly
from emp_llm.models.errors import UserError
from emp_llm.models.memory import available_memory

Place = Literal["auto", "device", "cpu", "disk"]


class HiddenStates:
    """Tensors by number; what is put at a number replaces what was there.

    Args:
        place: "device", "cpu" or "disk": an unnamed file in the folder for temporary files, gone when this is closed.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._tensors: dict[int, Tensor] = {}
        self._regions: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        self._file = tempfile.TemporaryFile(prefix="emp-llm-hidden-") if place == "disk" else None  # noqa: SIM115

    def get(self, number: int, device: torch.device) -> Tensor:
        """The tensor at a number, on a device."""
        if self._file is None:
            return self._tensors[number].to(device)
        offset, shape, dtype = self._regions[number]
        tensor = torch.empty(shape, dtype=dtype)
        read_exactly(self._file.fileno(), bytes_of(tensor), offset, Path("hidden states"))
        return tensor.to(device)

    def put(self, number: int, tensor: Tensor) -> None:
        """Keep a tensor at a number.

        Raises:
            UserError: the disk is full.
        """
        if self._file is None:
            self._tensors[number] = tensor.cpu() if self.place == "cpu" else tensor
            return
        here = tensor.contiguous().cpu()
        offset, shape, dtype = self._regions.get(number, (self._end, here.shape, here.dtype))
        if (shape, dtype) != (here.shape, here.dtype):
            offset = self._end
        try:
            write_exactly(self._file.fileno(), bytes_of(here), offset)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"{tempfile.gettempdir()}: no space left for the hidden states. Set TMPDIR to a folder on a larger disk, or "
                "give --hidden-states cpu."
            ) from error
        self._regions[number] = (offset, here.shape, here.dtype)
        self._end = max(self._end, offset + here.nbytes)

    def close(self) -> None:
        """Free the memory or the file."""
        self._tensors.clear()
        if self._file is not None:
            self._file.close()


def choose_place(wanted: Place, needed: int, device: torch.device) -> Place:
    """Where hidden states of `needed` bytes are kept: the nearest place of which they take less than half.

    Raises:
        UserError: `wanted` is no such place.
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
    """Raise UserError for what is no place."""
    if wanted not in get_args(Place):
        raise UserError(f"--hidden-states {wanted!r} is none of {', '.join(get_args(Place))}.")
