"""emp-llm: Effective Model Pruning for Hugging Face causal language models.

The mathematics is importable from here (`from emp_llm import effective_mask`); the commands are modules
(`python -m emp_llm.prune`), each with one typed function of the same name.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emp_llm.selection.criteria import exponential, shift
    from emp_llm.selection.effective import (
        effective_mask,
        effective_mass,
        effective_mass_bound,
        effective_number,
        loss_change_bound,
    )

_HOME = {
    "effective_mask": "effective",
    "effective_number": "effective",
    "effective_mass": "effective",
    "effective_mass_bound": "effective",
    "loss_change_bound": "effective",
    "shift": "criteria",
    "exponential": "criteria",
}

__all__ = [
    "effective_mask",
    "effective_mass",
    "effective_mass_bound",
    "effective_number",
    "exponential",
    "loss_change_bound",
    "shift",
]

try:
    __version__ = version("emp-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Import torch only when the mathematics is asked for: `--help` should not wait for it."""
    if name in _HOME:
        return getattr(import_module(f"emp_llm.selection.{_HOME[name]}"), name)
    raise AttributeError(f"module 'emp_llm' has no attribute {name!r}")
