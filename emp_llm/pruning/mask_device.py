"""The device that decides masks: the CPU, or a GPU if present and if its kernel supports the recipe."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.pruning.row_pruners import CpuRowPruner, GpuRowPruner, RowPruner
from emp_llm.selection.scheme import Scheme

if TYPE_CHECKING:
    import torch

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
        raise UserError(f"--mask-device {asked!r} is none of auto, cpu, cuda.")
    if asked == "cpu" or (asked == "auto" and not _may_have_gpu()):
        return CpuRowPruner()
    device = _gpu()
    if device is None:
        if asked == "auto":
            return CpuRowPruner()
        raise UserError(
            "--mask-device cuda: there is no NVIDIA GPU of compute capability 8.0 or higher that torch and Triton can use. "
            "Leave the option out, or give cpu."
        )
    if not scheme.budget.has_kernel:
        if asked == "auto":
            return CpuRowPruner()
        raise UserError(
            "--mask-device cuda: the GPU kernel supports only order 2 in float64. Leave the option out, or give cpu."
        )
    return GpuRowPruner(device)


def _may_have_gpu() -> bool:
    torch: Any = sys.modules.get("torch")
    return bool(torch.cuda.is_available()) if torch is not None else any(driver.exists() for driver in _DRIVERS)


def _gpu() -> "torch.device | None":
    """The GPU that decides masks, or None; with Triton's interpreter, the CPU."""
    import torch

    from emp_llm.selection.available_kernels import has_triton, triton_compiles_for

    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu") if has_triton() else None
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return device if triton_compiles_for(device) and has_triton() else None
