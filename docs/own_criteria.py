"""Criteria of one's own for `--criterion docs/own_criteria.py:NAME`."""

from torch import Tensor

from emp_llm import InputStatistics


def ria(weight: Tensor, inputs: InputStatistics) -> Tensor:
    """RIA (Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models", 2024).

    (|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) * ||X_j||_2^0.5
    """
    size = weight.float().abs()
    relative = size / size.sum(0) + size / size.sum(1, keepdim=True)
    return relative * inputs.norms.sqrt()
