"""Models of transformers whose pruned linear layers are `SparseLinear`: they compute from packed
rows.

The weights come from a packed folder or an ordinary checkpoint. Only commands import this room.
"""

from emp_llm.runtime.loader import SparseLinear, load

__all__ = ["SparseLinear", "load"]
