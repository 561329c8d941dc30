"""emp-llm: Effective Model Pruning for Hugging Face causal language models.

The mathematics is importable from here (`from emp_llm import effective_mask`), and what keeps a pruned model sparse while it is
trained (`reapply_mask`, `SparsityCallback`); the commands are modules
(`python -m emp_llm.prune`), each with one typed function of the same name.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emp_llm.models.reapply import SparsityCallback, reapply_mask
    from emp_llm.selection.criteria import exponential, shift
    from emp_llm.selection.effective import (
        effective_mask,
        effective_mass,
        effective_mass_bound,
        effective_number,
        loss_change_bound,
    )

_HOME = {
    "effective_mask": "selection.effective",
    "effective_number": "selection.effective",
    "effective_mass": "selection.effective",
    "effective_mass_bound": "selection.effective",
    "loss_change_bound": "selection.effective",
    "shift": "selection.criteria",
    "exponential": "selection.criteria",
    "reapply_mask": "models.reapply",
    "SparsityCallback": "models.reapply",
}

__all__ = [
    "SparsityCallback",
    "effective_mask",
    "effective_mass",
    "effective_mass_bound",
    "effective_number",
    "exponential",
    "loss_change_bound",
    "reapply_mask",
    "shift",
]

try:
    __version__ = version("emp-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Import torch, and transformers, only when what needs them is asked for: `--help` should not wait for it."""
    if name in _HOME:
        return getattr(import_module(f"emp_llm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'emp_llm' has no attribute {name!r}")
