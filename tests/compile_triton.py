"""Compiles the Triton kernels for GPUs of two generations, on a machine without one. test_triton runs it.

A stand-in for the driver names the GPU. The kernels are compiled and not run.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from emp_llm.runtime import cuda_kernel as runtime
from emp_llm.runtime.packed_rows import pack_rows
from emp_llm.selection.budgets import Budget, EffectiveBudget, PatternBudget, RatioBudget
from emp_llm.selection.kernels import cuda

CASES: list[tuple[int, torch.dtype, bool, int, Budget]] = [
    (80, torch.bfloat16, False, 128, EffectiveBudget()),
    (90, torch.float16, True, 11008, EffectiveBudget(0.7)),
    (80, torch.float32, True, 520, PatternBudget(2, 4)),
    (90, torch.bfloat16, False, 1, RatioBudget(0.5)),
]
RUNTIME_CASES = [(90, torch.bfloat16, 1), (80, torch.float16, 16)]


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


def ptx_of(capability: int, dtype: torch.dtype, wanda: bool, columns: int, budget: Budget) -> list[str]:
    """The PTX of all kernels that are launched for such a matrix, in place and to another tensor."""
    weight, norms = torch.ones(3, columns, dtype=dtype), torch.ones(columns) if wanda else None
    rule = budget.keep_rule(weight.shape)

    def run() -> None:
        cuda.enqueue(weight, norms, rule)
        cuda.enqueue(weight, norms, rule, out=torch.empty_like(weight))

    return compiled_by(capability, run)


def compiled_by(capability: int, run: Callable[[], object]) -> list[str]:
    """The PTX of all kernels that a function launches."""
    triton.runtime.driver.set_active(Driver(capability))
    texts: list[str] = []
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        texts.append(launch(self, *arguments, grid=grid, warmup=True, **options).asm["ptx"])

    JITFunction.run = compile_only
    try:
        run()
    finally:
        JITFunction.run = launch
    return texts


def main() -> None:
    """Check that divisions and constants stay in float64, and that subnormal numbers are not flushed to zero."""
    for case in CASES:
        check, *others = ptx_of(*case)
        assert len(others) == 2
        assert not case[2] or re.search(r"\bmul\.(rn\.)?f32\b", check)
        for ptx in others:
            divisions = set(re.findall(r"\bdiv\.\S*f64\b", ptx))
            assert divisions == {"div.rn.f64"}, divisions
            assert ".ftz" not in ptx + check
            assert "0d3FF0000000000100" in ptx  # 1 + 2^-44, not rounded to a float32
    for capability, stored, tokens in RUNTIME_CASES:
        check_runtime(capability, stored, tokens)


def check_runtime(capability: int, dtype: torch.dtype, tokens: int) -> None:
    """Check that bits are counted by an instruction, sums are float32, and nothing spills to memory."""
    rows = pack_rows(torch.ones(1000, 4096, dtype=dtype))
    matrix = runtime.device_rows(rows)
    x = torch.ones(tokens, rows.columns, dtype=dtype)
    (product,) = compiled_by(capability, lambda: runtime.multiply(matrix, x))
    (dense,) = compiled_by(capability, lambda: runtime.expand_rows(matrix, 0, 1000, dtype))
    for ptx in (product, dense):
        assert "popc.b64" in ptx or "popc.b32" in ptx
        assert ".local" not in ptx
        assert ".ftz" not in ptx
    assert re.search(r"\b(fma\.rn|add)(\.rn)?\.f32\b", product)


if __name__ == "__main__":
    sys.exit(main())
