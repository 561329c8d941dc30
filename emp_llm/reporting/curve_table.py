"""The table of the sparsity against beta, for `measure` and for a dry run."""

from emp_llm.common.tables import Rows, percent_cell, table
from emp_llm.records.measure import CurvePoint


def curve_table(title: str, curve: list[CurvePoint]) -> str:
    """A column for each beta: the percentage that EMP removes, of the targets and of all parameters."""
    rows: Rows = [
        [f"{title}: removed % at beta", *(f"{point.beta:g}" for point in curve)],
        ["of the targets", *(percent_cell(point.sparsity_of_targets) for point in curve)],
        ["of all parameters", *(percent_cell(point.sparsity_of_all_parameters) for point in curve)],
    ]
    return table(rows)
