"""Matrix products in full float32, and a check of what goes into them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def full_float32() -> Iterator[None]:
    """Within this context, float32 products round to float32 only: no TF32 on GPUs, no bfloat16 on CPUs."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set the precision of single backends
        with _each_backend():
            yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: then, and only then, their float64 sum is finite. One pass, without a copy."""
    return bool(values.sum(dtype=torch.float64).isfinite())


@contextmanager
def _each_backend() -> Iterator[None]:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
