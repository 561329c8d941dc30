"""Compiles the Triton kernels for GPUs of two generations, on a machine without one.
test_runtime_cuda runs it.

A stand-in for the driver names the GPU. The kernels are compiled and not run.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from emp_llm.runtime import cuda_kernel
from emp_llm.runtime.packed_rows import pack_rows
from emp_llm.selection.cuda_kernel import LONGEST, cuts_of_rows, masks_of_rows
from emp_llm.update.cuda_kernel import prune_columns

LAUNCH = JITFunction.run
NEW = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 2)
CASES = [(90, torch.bfloat16, 1), (80, torch.float16, 16)]  # compute capability, dtype, tokens


class Driver:
    """The part of a GPU's driver that the compiler uses."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached for each device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_by(capability: int, run: Callable[[], object]) -> list[str]:
    """The PTX of all kernels that a function launches."""
    triton.runtime.driver.set_active(Driver(capability))
    texts = []

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        texts.append(LAUNCH(self, *arguments, grid=grid, warmup=True, **options).asm["ptx"])

    JITFunction.run = compile_only
    run()
    return texts


def check(ptx: str) -> None:
    """Nothing spills to memory, and small numbers are not zero."""
    assert ".local" not in ptx
    assert ".ftz" not in ptx


if __name__ == "__main__":
    for capability, dtype, tokens in CASES:
        matrix = cuda_kernel.device_rows(pack_rows(torch.ones(1000, 4096, dtype=dtype)))
        x = torch.ones(tokens, 4096, dtype=dtype)
        texts = compiled_by(capability, partial(cuda_kernel.multiply, matrix, x))
        assert re.search(r"\b(fma\.rn|add)(\.rn)?\.f32\b", texts[0]), "sums are float32"
        if tokens == 1:
            texts += compiled_by(
                capability, partial(cuda_kernel.expand_rows, matrix, 0, 1000, dtype)
            )
        for ptx in texts:
            if NEW:  # the compiler of 3.2 keeps the arithmetic
                assert "popc.b64" in ptx or "popc.b32" in ptx, "bits are counted by an instruction"
            check(ptx)
        weight = torch.ones(500, 128)
        for pattern in (None, (2, 4)):
            prune = partial(prune_columns, weight, weight > 0, torch.eye(128), pattern)
            (ptx,) = compiled_by(capability, prune)
            check(ptx)
            assert "div.rn.f32" in ptx, "scores are those of the reference"
        for dtype, columns in ((torch.int16, 4096), (torch.int32, LONGEST)):
            keys = torch.zeros(8, columns, dtype=dtype)
            counts = torch.ones(2, 8, dtype=torch.int64)
            check(*compiled_by(capability, partial(cuts_of_rows, keys, counts)))
            check(*compiled_by(capability, partial(masks_of_rows, keys, counts[0])))
