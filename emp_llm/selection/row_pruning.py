"""Pruning of rows: by a compiled kernel if one supports them, else by the reference in plain torch.

Both give the same bits: the same counts, masks and sums. The kernels support bfloat16, float16 and float32 weights, the
criteria magnitude and wanda, and budgets of order 2. numba compiles them for CPUs, Triton for NVIDIA GPUs. The reference
supports everything, and needs neither numba nor Triton.
"""

import torch
from torch import Tensor

from emp_llm.selection.arithmetic.masks import largest_mask, order_keys
from emp_llm.selection.available_kernels import has_numba, has_triton, kernels_support, triton_compiles_for
from emp_llm.selection.budgets import Budget
from emp_llm.selection.criteria import CRITERIA, InputStatistics, check_norms
from emp_llm.selection.kernels.interface import RowFigures
from emp_llm.selection.row_selection import Selection, select_rows

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {2: torch.uint16, 4: torch.uint32}


def prune_rows(
    weight: Tensor, criterion: str, norms: Tensor | None, budget: Budget, offset: int = 0, out: Tensor | None = None
) -> RowFigures:
    """Set to zero the weights of each row that a budget does not keep.

    Args:
        weight: shape (rows, columns), contiguous, floating. It is pruned in place unless `out` is given.
        criterion: its name, a key of CRITERIA.
        norms: float32, shape (columns,), for a criterion that needs them.
        budget: how many weights of each row to keep (of every M columns, for an N:M pattern).
        offset: number of target weights before this block.
        out: receives the result; shape, dtype and device of `weight`, without overlap. On a GPU it saves a pass over memory.

    Returns:
        Figures of the rows, as tensors on the device of the weights.

    Raises:
        NonFiniteError: scores hold NaN or infinity. Then `weight` is unchanged, but `out` may be partly written.
        ValueError: M of an N:M pattern does not divide the columns; norms are missing or of another shape; or `out` does not
            match the weights.
    """
    if out is not None and (out.shape != weight.shape or out.dtype != weight.dtype or out.device != weight.device):
        raise ValueError(f"out must match the weights: {tuple(weight.shape)}, {weight.dtype}, {weight.device}")
    kernel = has_kernel(weight, criterion, budget) and (out is None or out.is_contiguous())
    if kernel:
        # A kernel reads without checking bounds, so the shape of the norms is checked here.
        norms = check_norms(norms, weight.shape[1]) if CRITERIA[criterion].needs_norms else None
        if weight.device.type == "cuda":
            from emp_llm.selection.kernels import cuda

            return cuda.prune_rows_on_gpu(weight, norms, budget.keep_rule(weight.shape, offset), out)
    if out is not None:
        weight = out.copy_(weight)
    if kernel:
        return _prune_by_numba(weight, norms, budget, offset)
    return prune_rows_plainly(weight, criterion, norms, budget, offset)


def prune_rows_plainly(weight: Tensor, criterion: str, norms: Tensor | None, budget: Budget, offset: int = 0) -> RowFigures:
    """The reference: `prune_rows` in plain torch, in place, on any device and for floating dtypes of 16, 32 or 64 bits."""
    rule = CRITERIA[criterion]
    inputs = None if norms is None else InputStatistics(norms)
    scores = rule.score(weight, inputs) if rule.needs_norms else rule.score(weight)
    return apply_selection(weight, select_rows(scores.contiguous(), budget, offset))


def mask_by_kernel(scores: Tensor, budget: Budget) -> Tensor:
    """The mask of the largest |scores| of each row, by a compiled kernel.

    Args:
        scores: shape (rows, columns); `has_kernel` is true for them with the budget and the criterion magnitude.
        budget: how many scores of each row to keep.

    Returns:
        bool, shape (rows, columns), true where kept.

    Raises:
        NonFiniteError: scores hold NaN or infinity.
    """
    pruned = torch.empty_like(scores)
    figures = prune_rows(scores, "magnitude", None, budget, out=pruned)
    mask = order_keys(pruned).bool()
    zeros_kept = (figures.kept > scores.shape[1] - figures.zeros).nonzero()[:, 0]  # rows whose mask is not the non-zero scores
    if len(zeros_kept):
        mask[zeros_kept] = largest_mask(scores[zeros_kept], figures.kept[zeros_kept])
    return mask


def apply_selection(weight: Tensor, selection: Selection) -> RowFigures:
    """Set to zero, in place, the weights that a selection does not keep."""
    weight.view(_SIGNED[weight.element_size()]).mul_(selection.mask)  # as integers: fast, and never -0.0
    zeros = weight.shape[1] - (weight != 0).sum(1, dtype=torch.int32).long()
    return RowFigures(selection.kept, zeros, selection.kept_mass, selection.mass, selection.n_eff, selection.s_eff)


def has_kernel(weight: Tensor, criterion: str, budget: Budget) -> bool:
    """Whether a compiled kernel on this machine supports these weights, criterion and budget."""
    if weight.dtype not in _NAMES or not weight.is_contiguous() or weight.numel() == 0:
        return False
    if not kernels_support(_NAMES[weight.dtype], criterion, budget):
        return False
    return has_numba() if weight.device.type == "cpu" else triton_compiles_for(weight.device) and has_triton()


def _prune_by_numba(weight: Tensor, norms: Tensor | None, budget: Budget, offset: int) -> RowFigures:
    from emp_llm.selection.kernels.cpu import prune_words

    factors = None if norms is None else norms.detach().float().contiguous().cpu().numpy()
    rule = budget.keep_rule(weight.shape, offset)
    words = weight.detach().view(_UNSIGNED[weight.element_size()]).numpy()
    return RowFigures(*map(torch.from_numpy, prune_words(words, _NAMES[weight.dtype], factors, rule)))
