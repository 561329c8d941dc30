"""Criteria of one's own for `--criterion docs/own_criteria.py:NAME`."""

from torch import Tensor

from emp_llm import InputStatistics


def column_share(weight: Tensor, inputs: InputStatistics) -> Tensor:
    """|W_ij| / sum_i |W_ij| * ||X_j||_2: the weight's share of its column, times the norm of its
    input.
    """
    size = weight.float().abs()
    return size / size.sum(0) * inputs.norms


def fluctuation(weight: Tensor, *, variance: Tensor) -> Tensor:
    """W_ij^2 * Var(X_j): what is lost without the weight, if a bias makes up for the mean (An et
    al., "Fluctuation-based Adaptive Structured Pruning for Large Language Models", 2024).
    """
    return weight.float().square() * variance
