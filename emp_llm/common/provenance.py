"""Provenance of results: the versions of the packages, the command, and the processor."""

import platform
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("emp-llm", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "lm-eval")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a result."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    installed = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def command_line() -> str:
    """The running command, quoted for a shell."""
    program = Path(sys.argv[0])
    if program.parent.name == "emp_llm" and program.suffix == ".py":
        start = ["emp-llm"] if program.stem == "__main__" else ["emp-llm", program.stem]
    else:
        start = [program.name]
    return shlex.join(start + sys.argv[1:])


def processor_name() -> str:
    """The name of the CPU."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def cpu_fields() -> dict[str, str]:
    """The description of the last core in /proc/cpuinfo; empty without this file."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): " ".join(value.split()) for key, value in pairs}
