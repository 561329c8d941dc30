"""Rows pruned in place by the compiled kernel, which gives the bits of the reference."""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from emp_llm.selection.rule import KeepRule, RowFigures

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
_DTYPES = ("BF16", "F16", "F32")


def words_supported(dtype: str, rule: KeepRule) -> bool:
    """Whether `prune_words` loads, and implements a rule, N_eff being of order 2 in float64, for a
    dtype of safetensors ("BF16").
    """
    implemented = dtype in _DTYPES and rule.order == 2.0 and rule.dtype == "float64"
    return implemented and has_numba()


def prune_words(words: Any, dtype: str, norms: Any, rule: KeepRule) -> RowFigures:
    """Set to zero, in place, the weights of each row that a rule does not keep. torch is not
    needed.

    Args:
        words: the bits of the weights, uint16 or uint32, shape (rows, columns), contiguous, not
            empty.
        dtype: of the weights: "BF16", "F16" or "F32".
        norms: float32, shape (columns,), for scores |W| * norms; None: scores |W|.
        rule: how many weights of each row to keep; `words_supported` for the dtype.

    Returns:
        Figures of the rows, as arrays.

    Raises:
        NonFiniteError: scores hold NaN or infinity; nothing is pruned.
    """
    from emp_llm.selection import cpu_kernel

    return cpu_kernel.prune_words(words, dtype, norms, rule)


def mask_by_kernel(scores: "Tensor", rule: KeepRule) -> "Tensor":
    """The mask of the largest |scores| of each row, by the compiled kernel.

    Args:
        scores: shape (rows, columns); `has_kernel` is true for them.
        rule: how many scores of each row to keep.

    Returns:
        bool, shape (rows, columns), true where kept.

    Raises:
        NonFiniteError: scores hold NaN or infinity.
    """
    import torch

    from emp_llm.selection.reference import largest_mask, order_keys

    pruned = scores.clone()
    figures = prune_words(words_of(pruned), _name(scores), None, rule)
    mask = order_keys(pruned).bool()
    # Rows whose mask is not the non-zero scores.
    zeros_kept = (figures.kept > scores.shape[1] - figures.zeros).nonzero()[0]
    if len(zeros_kept):
        mask[zeros_kept] = largest_mask(
            scores[zeros_kept], torch.from_numpy(figures.kept[zeros_kept])
        )
    return mask


def words_of(weight: "Tensor") -> Any:
    """The bits of a tensor on the CPU, of 16, 32 or 64 bits, as an array of unsigned integers in
    the same memory.
    """
    import torch

    return (
        weight.detach()
        .view({2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[weight.element_size()])
        .numpy()
    )


def has_kernel(weight: "Tensor", rule: KeepRule) -> bool:
    """Whether the compiled kernel supports these weights and this rule."""
    fitting = weight.device.type == "cpu" and weight.is_contiguous() and weight.numel() > 0
    return fitting and words_supported(_name(weight), rule)


@cache
def has_numba() -> bool:
    """Whether the compiled kernel loads. numba may be missing, built for another numpy, or
    without a folder for its cache.
    """
    try:
        from emp_llm.selection import cpu_kernel  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        if not isinstance(error, ModuleNotFoundError):
            logger.warning(
                "warning: numba cannot be loaded (%s); pruning continues without it, more slowly.",
                error,
            )
        return False
    return True


def _name(weight: "Tensor") -> str:
    return {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}.get(
        str(weight.dtype), ""
    )
