"""What made a number: versions, command, and the commit of a model."""

import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("emp-llm", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "lm-eval")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """The command that runs, as it could be typed again."""
    program = Path(sys.argv[0])
    if program.parent.name == "emp_llm" and program.suffix == ".py":
        start = ["python", "-m", f"emp_llm.{program.stem}" if program.stem != "__main__" else "emp_llm"]
    else:
        start = [program.name]
    return shlex.join(start + sys.argv[1:])
