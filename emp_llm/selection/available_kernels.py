"""The compiled kernels that this machine can run, and the weights that they support."""

import logging
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from emp_llm.selection.budgets import Budget

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_DTYPES = ("BF16", "F16", "F32")
_CRITERIA = ("magnitude", "wanda", "relative", "sparsegpt", "admm")


def kernels_support(dtype: str, criterion: str, budget: Budget) -> bool:
    """Whether the kernels implement a criterion and a budget for weights of a dtype, named as in safetensors ("BF16")."""
    return dtype in _DTYPES and criterion in _CRITERIA and budget.has_kernel


@cache
def has_numba() -> bool:
    """Whether the CPU kernel loads. numba may be missing, built for another numpy, or without a folder for its cache."""
    return _loads("cpu", "numba", "pruning")


@cache
def has_triton() -> bool:
    """Whether the CUDA kernel loads. Triton comes with the CUDA builds of torch."""
    return _loads("cuda", "Triton", "pruning on GPUs")


def triton_compiles_for(device: "torch.device") -> bool:
    """Whether the Triton kernel runs on a device: an NVIDIA GPU of compute capability 8.0 or higher."""
    import torch

    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _loads(kernel: str, compiler: str, work: str) -> bool:
    try:
        import_module(f"emp_llm.selection.kernels.{kernel}")
    except (ImportError, RuntimeError, OSError) as error:
        if not isinstance(error, ModuleNotFoundError):
            logger.warning("warning: %s cannot be loaded (%s); %s continues without it, more slowly.", compiler, error, work)
        return False
    return True
