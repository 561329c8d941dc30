"""The CPU kernel: chooses the instructions, compiles the loops at their first use, and runs them on the threads of torch."""

import ctypes
from functools import cache
from typing import Any, Literal

from llvmlite import binding as llvm
from llvmlite import ir

from emp_llm.runtime.kernels.dense_rows import DenseRows
from emp_llm.runtime.kernels.instructions import INSTRUCTIONS, LONGEST_LOAD, Instructions
from emp_llm.runtime.kernels.products import Products
from emp_llm.runtime.kernels.row_loops import TASK

__all__ = ["LONGEST_LOAD", "MOST_VECTORS", "KernelTask", "dense_rows", "instructions_for", "processor_features", "products"]
MOST_VECTORS = 16  # that one product takes
KernelTask = ctypes.c_int64 * len(TASK)
_compiled: list[Any] = []  # engines, which own the code


@cache
def processor_features() -> frozenset[str]:
    """The names in LLVM of what this processor can do."""
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


@cache
def instructions_for(dtype: str, most: str | None = None) -> Instructions | None:
    """The fastest instructions of this processor for weights of a dtype; None: plain loops.

    Args:
        most: the name of a set; faster ones are left out. "plain": all are.
    """
    names = [each.name for each in INSTRUCTIONS]
    allowed = INSTRUCTIONS[names.index(most) :] if most in names else () if most == "plain" else INSTRUCTIONS
    return next((each for each in allowed if dtype in each.dtypes and processor_features().issuperset(each.features)), None)


@cache
def products(dtype: str, how: Instructions | None, vectors: int, result: Literal["BF16", "F16", "F32"]) -> int:
    """The address of the function of `Products`."""
    return compiled(Products(dtype, how, vectors, result).module())


@cache
def dense_rows(dtype: str, how: Instructions | None, as_floats: bool) -> int:
    """The address of the function of `DenseRows`."""
    return compiled(DenseRows(dtype, how, as_floats).module())


def compiled(module: ir.Module) -> int:
    """The address of a module's function "run", compiled for this processor."""
    machine = _machine()
    module.triple = machine.triple
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _compiled.append(engine)
    return int(engine.get_function_address("run"))


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    if "avx512f" in processor_features():
        features += ",-prefer-256-bit"  # or LLVM halves the vectors
    return llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), features, opt=3)
