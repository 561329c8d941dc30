"""Rows pruned: by the compiled kernel where there is one for them, else by the plain torch reference.

All give the same bits: the same counts, masks and sums. The kernels take bfloat16, float16 and float32 weights on the CPU, by
numba, and on NVIDIA GPUs, by Triton; the criteria magnitude and wanda; and budgets that want order 2. Everything else, and a
machine without numba or Triton, is the reference's.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from emp_llm.selection.budgets import Budget, EffectiveBudget, PartsBudget, PatternBudget, RatioBudget, TotalBudget
from emp_llm.selection.criteria import CRITERIA, check_norms
from emp_llm.selection.hill import Moments, NonFiniteError
from emp_llm.selection.rows import Selection, select_rows

logger = logging.getLogger(__name__)
_COMPILED = ("magnitude", "wanda")
# As of `scores.value16`: by how much the bits of a weight are shifted to be those of a float32, and the factor left over.
_SHIFTS = {torch.bfloat16: (16, 1.0), torch.float16: (13, 2.0**112), torch.float32: (0, 1.0)}
_ON_GPUS = (EffectiveBudget, RatioBudget, TotalBudget, PartsBudget, PatternBudget)  # the budgets that the Triton kernel knows
_BITS = {2: torch.uint16, 4: torch.uint32}
_PIECE = 1 << 18  # weights that a thread takes at a time


@dataclass(frozen=True)
class Pruned:
    """What became of a block of rows.

    Attributes:
        kept, zeros: int64, shape (rows,): how many scores were kept, and how many weights are zero now.
        kept_mass, mass: float64, shape (rows,): sum |s| over the kept, and over all.
        n_eff, s_eff: float64, shape (rows,): effective number, and the share of the floor(N_eff) largest; None where a group is
            larger than a row.
    """

    kept: Tensor
    zeros: Tensor
    kept_mass: Tensor
    mass: Tensor
    n_eff: Tensor | None
    s_eff: Tensor | None


def prune_rows(
    weight: Tensor, criterion: str, norms: Tensor | None, budget: Budget, offset: int = 0, out: Tensor | None = None
) -> Pruned:
    """Set to zero what a budget does not keep of each row.

    Args:
        weight: shape (rows, columns), contiguous, floating; pruned in place, unless there is an `out`.
        criterion: its name.
        norms: float32, shape (columns,), for criteria that need them.
        budget: how many to keep of each row (of every M columns, for an N:M pattern).
        offset: how many target weights come before this block.
        out: where the result goes, as `weight` and not overlapping it; on a GPU this saves a pass over memory.

    Raises:
        NonFiniteError: scores hold NaN or infinity; nothing is pruned then (but an `out` may be half written).
        ValueError: an N:M pattern whose M does not divide the columns; norms missing, or of another shape, or an `out`.
    """
    if out is not None and (out.shape != weight.shape or out.dtype != weight.dtype or out.device != weight.device):
        raise ValueError(f"out must be as the weights: {tuple(weight.shape)}, {weight.dtype}, {weight.device}")
    kernel = has_kernel(weight, criterion, budget) and (out is None or out.is_contiguous())
    if kernel:
        # Looked at here: a kernel does not look where it reads.
        norms = check_norms(norms, weight.shape[1]) if CRITERIA[criterion].needs_norms else None
        if weight.device.type == "cuda":
            return _on_gpu(weight, norms, budget, offset, out)
    if out is not None:
        weight = out.copy_(weight)
    if kernel:
        return _compiled(weight, norms, budget, offset)
    return prune_rows_plainly(weight, criterion, norms, budget, offset)


def prune_rows_plainly(weight: Tensor, criterion: str, norms: Tensor | None, budget: Budget, offset: int = 0) -> Pruned:
    """The reference: as `prune_rows`, by torch alone, on any device and in any dtype."""
    return apply(weight, select_rows(CRITERIA[criterion].score(weight, norms).contiguous(), budget, offset))


def apply(weight: Tensor, part: Selection) -> Pruned:
    """Set to zero what a decision does not keep, in place."""
    weight.masked_fill_(~part.mask, 0)
    zeros = weight.shape[1] - torch.count_nonzero(weight, 1)
    return Pruned(part.kept, zeros, part.kept_mass, part.mass, part.n_eff, part.s_eff)


def has_kernel(weight: Tensor, criterion: str, budget: Budget) -> bool:
    """Whether a compiled kernel takes these."""
    return (
        weight.dtype in _SHIFTS
        and weight.is_contiguous()
        and weight.numel() > 0
        and criterion in _COMPILED
        and budget.order == 2.0
        and getattr(budget, "dtype", "float64") == "float64"
        and (has_numba() if weight.device.type == "cpu" else isinstance(budget, _ON_GPUS) and _takes(weight.device))
    )


@cache
def has_numba() -> bool:
    """Whether the kernel can be used here: numba may be missing, of another numpy, or without a place for its cache."""
    return _loads("cut", "numba", "pruning")


@cache
def _has_triton() -> bool:
    """Whether Triton is here; torch brings it along where it is for CUDA."""
    return _loads("cuda", "Triton", "pruning on GPUs")


def _loads(kernel: str, compiler: str, work: str) -> bool:
    try:
        import_module(f"emp_llm.selection.kernels.{kernel}")
    except (ImportError, RuntimeError, OSError) as error:
        if not isinstance(error, ModuleNotFoundError):
            logger.warning("warning: %s cannot be used (%s); %s goes on without it, more slowly.", compiler, error, work)
        return False
    return True


@cache
def _takes(device: torch.device) -> bool:
    """Whether the Triton kernel is for this device: an NVIDIA GPU that Triton compiles for."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return _has_triton()


def _on_gpu(weight: Tensor, norms: Tensor | None, budget: Budget, offset: int, out: Tensor | None) -> Pruned:
    from emp_llm.selection.kernels import cuda

    return Pruned(*cuda.prune_rows(weight, norms, budget, offset, out))


def _compiled(weight: Tensor, norms: Tensor | None, budget: Budget, offset: int) -> Pruned:
    import numpy as np

    from emp_llm.selection.kernels.cut import cut16, cut32
    from emp_llm.selection.kernels.scores import sums

    rows, columns = weight.shape
    pattern = budget if isinstance(budget, PatternBudget) else None
    bits = weight.view(_BITS[weight.element_size()]).numpy()
    # Without the sign of -0.0, which would be the highest bit of a key.
    factors = np.empty(0, np.float32) if norms is None else norms.detach().float().abs().contiguous().cpu().numpy()
    shift, scale = np.uint32(_SHIFTS[weight.dtype][0]), np.float32(_SHIFTS[weight.dtype][1])
    total, power, kept_mass, n_eff, s_eff = np.empty((5, rows))
    counts, zeros = np.empty((2, rows), np.int64)

    _in_parallel(rows, columns, lambda part: sums(bits[part], factors, shift, scale, total[part], power[part]))
    if not np.isfinite(total).all():
        raise NonFiniteError("scores hold NaN or infinity")
    beta = budget.beta if isinstance(budget, EffectiveBudget) else 0.0
    if pattern is not None:
        counts[:] = pattern.kept_of(columns)
    elif not beta:
        size, ones = torch.full((rows,), columns, dtype=torch.int64), torch.ones(rows, dtype=torch.float64)
        counts[:] = budget.counts(Moments(2.0, size, ones, torch.from_numpy(total), torch.from_numpy(power)), offset).numpy()
    outputs = (total, power, counts, zeros, kept_mass, n_eff, s_eff)
    n, m = (pattern.n, pattern.m) if pattern is not None else (0, 0)

    def cut(part: slice) -> None:
        own = [output[part] for output in outputs]
        if norms is None and weight.element_size() == 2:
            cut16(bits[part], shift, scale, beta, n, m, *own)
        else:
            cut32(bits[part], factors, shift, scale, beta, n, m, *own)

    _in_parallel(rows, columns, cut)
    return Pruned(*(torch.from_numpy(found) for found in (counts, zeros, kept_mass, total, n_eff, s_eff)))


def _in_parallel(rows: int, columns: int, work: Callable[[slice], Any]) -> None:
    """Share rows among as many threads as torch uses; each takes the next few when it is free, this one at once."""
    few = max(1, _PIECE // columns)
    parts = iter([slice(first, min(first + few, rows)) for first in range(0, rows, few)])

    def take() -> None:
        for part in parts:
            work(part)

    helpers = min(torch.get_num_threads(), -(-rows // few)) - 1
    others = [_pool(helpers).submit(take) for _ in range(helpers)]
    take()
    for other in others:
        if not other.cancel():
            other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-rows")
