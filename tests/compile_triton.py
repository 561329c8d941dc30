"""Compiles the Triton kernels for GPUs of two generations, without one, and looks at the arithmetic; run by test_triton."""

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from emp_llm.selection.kernels import cuda, cuda_cut

POINTERS = {"weights": "*i16", "out": "*i16", "norms": "*fp32", "counts": "*i64", "flag": "*i32"}
POINTERS |= {"integers": "*i64", "floats": "*fp64"}
SIGNATURE = POINTERS | {"rows": "i32", "columns": "i32", "beta": "i64", "n": "i32"}


def compiled(kernel: Any, capability: int, constants: dict[str, Any], warps: int) -> str:
    """The PTX of a kernel."""
    wide = {"weights": "*i32", "out": "*i32"} if constants["KIND"] == "float32" else {}
    if not constants["NORMS"]:
        constants = constants | {"norms": None}
    types = SIGNATURE | wide | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*POINTERS, "columns") if name in names}
    aligned = {place: value for place, value in aligned.items() if types[names[place[0]]] != "constexpr"}
    source = ASTSource(
        kernel, {name: types[name] for name in names}, {n: v for n, v in constants.items() if n in names}, aligned
    )
    options = {"num_warps": warps, "maxnreg": cuda._REGISTERS}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return str(ptx)


def main() -> None:
    """Compile, and see that float64 division and constants are so, and that subnormal numbers are not flushed."""
    cases = [
        (80, "bfloat16", False, 4096, 0, cuda_cut.EFFECTIVE),
        (90, "bfloat16", True, 11008, 0, cuda_cut.GIVEN),
        (90, "float16", True, 70, 0, cuda_cut.BETA),
        (80, "float32", False, 11008, 4, cuda_cut.PATTERN),
    ]
    for capability, kind, norms, columns, m, budget in cases:
        how = cuda.launch(5000, columns, 4 if kind == "float32" else 2, m, 132)
        constants = {"KIND": kind, "NORMS": norms, "TOP": 0x7F800000 if norms or kind == "float32" else 0x7F80}
        ways = {"BUDGET": budget.value, "M": m, "BLOCK": how.block, "WHOLE": how.block >= columns, "CHUNK": how.chunk}
        ptx = compiled(cuda_cut.prune, capability, constants | ways | {"EVEN": columns % 64 == 0, "APART": m == 0}, how.warps)
        ptx += compiled(cuda_cut.check, capability, constants | {"BLOCK": cuda._CHUNK}, 4)
        divisions = set(re.findall(r"\bdiv\.\S*f64\b", ptx))
        assert divisions == {"div.rn.f64"}, divisions
        assert ".ftz" not in ptx
        assert not norms or re.search(r"\bmul\.(rn\.)?f32\b", ptx)
        assert "0d3FF0000000000100" in ptx  # 1 + 2^-44, not rounded to a float32


if __name__ == "__main__":
    main()
