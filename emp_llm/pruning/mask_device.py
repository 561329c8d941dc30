"""The device that decides masks: the CPU, or a GPU if present and if its kernel supports the recipe."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError, reason
from emp_llm.pruning.row_pruners import CpuRowPruner, GpuRowPruner, RowPruner
from emp_llm.selection.scheme import Scheme

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_REMEDY = "Leave the option out, or give cpu."
# Present if a driver for NVIDIA GPUs is loaded. Without one, torch need not be imported.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def row_pruner(asked: str, scheme: Scheme) -> RowPruner:
    """The row pruner for a scheme.

    Args:
        asked: "auto": a GPU if present and if it gives the same bits; "cpu"; "cuda".

    Raises:
        UserError: "cuda" is asked for, and there is no suitable GPU or its kernel does not support the scheme.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise UserError(f"--mask-device {asked!r} is not one of auto, cpu, cuda.")
    if asked == "cpu" or (asked == "auto" and not _may_have_gpu()):
        return CpuRowPruner()
    try:
        return GpuRowPruner(_gpu(scheme), fallback=asked == "auto")
    except UserError:
        if asked == "cuda":
            raise
    except RuntimeError as error:  # from the driver: the GPU is full, or reserved by another process
        if asked == "cuda":
            raise UserError(f"--mask-device cuda: the GPU cannot be used ({reason(error)}). {_REMEDY}") from error
        logger.warning("warning: masks are decided on the CPU, because the GPU cannot be used (%s).", reason(error))
    return CpuRowPruner()


def _may_have_gpu() -> bool:
    if _interpreted():
        return False  # Triton's interpreter is only for those who ask for it
    torch: Any = sys.modules.get("torch")
    return bool(torch.cuda.is_available()) if torch is not None else any(driver.exists() for driver in _DRIVERS)


def _gpu(scheme: Scheme) -> "torch.device":
    """The GPU that decides the masks of a scheme; with Triton's interpreter, the CPU. Raises UserError if there is none."""
    import torch

    from emp_llm.selection.available_kernels import has_triton, triton_compiles_for

    device: torch.device | None = None
    if _interpreted():
        device = torch.device("cpu")
    elif torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        device = device if triton_compiles_for(device) else None
    if device is None or not has_triton():
        raise UserError(
            "--mask-device cuda: there is no NVIDIA GPU of compute capability 8.0 or higher that torch and Triton can use. "
            + _REMEDY
        )
    if not scheme.budget.has_kernel:
        raise UserError(f"--mask-device cuda: the GPU kernel supports only order 2 in float64. {_REMEDY}")
    return device


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
