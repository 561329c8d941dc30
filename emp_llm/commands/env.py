"""`emp-llm env`: versions, processor and kernels, for a report of an error."""

from emp_llm.cli import command

_RUNTIMES = {"avx512bf16": "AVX-512 BF16", "avx512": "AVX-512", "avx2": "AVX2"}
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@command
def env() -> dict[str, str]:
    """Show what emp-llm runs on: versions, processor, memory, GPUs, and the kernels that it chooses
    here.

    Add its output to a report of an error. It names no file and no model.

    Returns the lines by name.
    """
    import torch

    from emp_llm.common.errors import format_bytes
    from emp_llm.common.machine import (
        available_cores,
        available_memory,
        cpu_fields,
        processor_name,
        versions,
    )
    from emp_llm.runtime.loader import cpu_instructions
    from emp_llm.selection.rows import has_numba

    flags = set(cpu_fields().get("flags", "").split())
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    runtime = cpu_instructions(torch.bfloat16)
    return versions("huggingface-hub", "numpy", "numba") | {
        "processor": processor_name(),
        "instructions": ", ".join(name for name in _INSTRUCTIONS if name in flags)
        or f"none of {', '.join(_INSTRUCTIONS)}",
        "cores": f"{available_cores()}",
        "memory": f"{format_bytes(available_memory())} available",
        "GPUs": ", ".join(f"{gpu.name} ({format_bytes(gpu.total_memory)})" for gpu in gpus)
        or "none",
        "masks": "compiled" if has_numba() else "torch",
        "runtime": "torch" if runtime is None else _RUNTIMES[runtime.name],
    }


def show(lines: dict[str, str]) -> None:
    """Print the lines."""
    for name, value in lines.items():
        print(f"{name:<16}{value}")
