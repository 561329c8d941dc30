"""Models of transformers whose pruned linear layers are `SparseLinear`: they compute from packed rows.

The weights come from a packed folder or an ordinary checkpoint. Only commands import this room.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emp_llm.runtime.loader import load as load
    from emp_llm.runtime.sparse_linear import SparseLinear as SparseLinear

_HOME = {"load": "loader", "SparseLinear": "sparse_linear"}
__all__ = ["SparseLinear", "load"]


def __getattr__(name: str) -> object:
    """Import torch and transformers only when they are needed."""
    if name in _HOME:
        return getattr(import_module(f"emp_llm.runtime.{_HOME[name]}"), name)
    raise AttributeError(f"module 'emp_llm.runtime' has no attribute {name!r}")
