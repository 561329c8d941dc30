"""Provenance of results: the versions of the packages, and the command."""

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
