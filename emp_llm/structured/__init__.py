"""Whole neurons and filters of any torch model: scored, selected by the rule of the weights, zeroed or removed.

It takes `nn.Linear` and convolutions. The mathematics is that of `selection`; the dependencies between layers come from
torch-pruning (the extra `structured`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emp_llm.structured.surgery import remove_units as remove_units
    from emp_llm.structured.surgery import zero_units as zero_units
    from emp_llm.structured.unit_pruning import prune_units as prune_units
    from emp_llm.structured.unit_report import UnitReport as UnitReport
    from emp_llm.structured.unit_scores import gradient_scores as gradient_scores
    from emp_llm.structured.unit_scores import magnitude_scores as magnitude_scores
    from emp_llm.structured.unit_scores import saliency_scores as saliency_scores
    from emp_llm.structured.unit_scores import taylor_scores as taylor_scores

_HOME = {
    "UnitReport": "unit_report",
    "gradient_scores": "unit_scores",
    "magnitude_scores": "unit_scores",
    "prune_units": "unit_pruning",
    "remove_units": "surgery",
    "saliency_scores": "unit_scores",
    "taylor_scores": "unit_scores",
    "zero_units": "surgery",
}
__all__ = [
    "UnitReport",
    "gradient_scores",
    "magnitude_scores",
    "prune_units",
    "remove_units",
    "saliency_scores",
    "taylor_scores",
    "zero_units",
]


def __getattr__(name: str) -> object:
    """Import torch only when it is needed."""
    if name in _HOME:
        return getattr(import_module(f"emp_llm.structured.{_HOME[name]}"), name)
    raise AttributeError(f"module 'emp_llm.structured' has no attribute {name!r}")
