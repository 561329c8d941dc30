"""Compiles what the Triton kernels are launched with for GPUs of two generations, without one; run by test_triton.

A stand-in for the GPU's driver says which GPU it is, and the kernels are compiled and not run.
"""

import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from emp_llm.selection.budgets import Budget, EffectiveBudget, PatternBudget, RatioBudget
from emp_llm.selection.kernels import cuda

CASES: list[tuple[int, torch.dtype, bool, int, Budget]] = [
    (80, torch.bfloat16, False, 4096, EffectiveBudget()),
    (90, torch.bfloat16, True, 11008, RatioBudget(0.5)),
    (90, torch.float16, True, 70, EffectiveBudget(0.7)),
    (80, torch.float32, False, 11008, PatternBudget(2, 4)),
    (90, torch.float16, False, 1, EffectiveBudget()),
]


class Driver:
    """As much of a GPU's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept for each device

    def get_current_stream(self, device: int) -> int:
        return 0


def ptx_of(capability: int, dtype: torch.dtype, wanda: bool, columns: int, budget: Budget) -> list[str]:
    """The PTX of all kernels that pruning such a matrix launches, in place and to an output."""
    triton.runtime.driver.set_active(Driver(capability))
    texts: list[str] = []
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        texts.append(launch(self, *arguments, grid=grid, warmup=True, **options).asm["ptx"])

    JITFunction.run = compile_only
    try:
        weight, norms = torch.ones(3, columns, dtype=dtype), torch.ones(columns) if wanda else None
        cuda.enqueue(weight, norms, budget)
        cuda.enqueue(weight, norms, budget, out=torch.empty_like(weight))
    finally:
        JITFunction.run = launch
    return texts


def main() -> None:
    """Compile, and see that float64 division and constants are so, and that subnormal numbers are not flushed."""
    for case in CASES:
        check, *others = ptx_of(*case)
        assert len(others) == 2
        assert not case[2] or re.search(r"\bmul\.(rn\.)?f32\b", check)
        for ptx in others:
            divisions = set(re.findall(r"\bdiv\.\S*f64\b", ptx))
            assert divisions == {"div.rn.f64"}, divisions
            assert ".ftz" not in ptx + check
            assert "0d3FF0000000000100" in ptx  # 1 + 2^-44, not rounded to a float32


if __name__ == "__main__":
    sys.exit(main())
