"""The row kernel for CPUs, compiled by numba: it prunes rows with the same bits as the reference, and needs no torch.

Threads share the rows in two rounds: `cpu_scores` sums the scores, then `cpu_cut` prunes.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from emp_llm.selection.arithmetic.definitions import NonFiniteError
from emp_llm.selection.kernels.cpu_cut import cut16, cut32
from emp_llm.selection.kernels.cpu_scores import Array, sums
from emp_llm.selection.kernels.interface import KeepRule, RowFigures

# A shift and a factor for each dtype. The bits of |w|, shifted left, are the bits of a float32; this number times the factor is
# |w| (see `value16`).
_SHIFTS = {"BF16": (16, 1.0), "F16": (13, 2.0**112), "F32": (0, 1.0)}
_PIECE = 1 << 18  # weights in each piece of work


def prune_words(words: Array, dtype: str, norms: Array | None, rule: KeepRule) -> RowFigures:
    """Set to zero, in place, the weights of each row that a rule does not keep.

    Args:
        words: the bits of the weights, uint16 or uint32, shape (rows, columns), contiguous, not empty.
        dtype: of the weights: "BF16", "F16" or "F32".
        norms: float32, shape (columns,), for the criterion wanda; None: magnitude.
        rule: how many weights of each row to keep.

    Returns:
        Figures of the rows, as arrays.

    Raises:
        NonFiniteError: scores hold NaN or infinity; nothing is pruned.
    """
    rows, columns = words.shape
    # abs: the sign of a norm of -0.0 would become the highest bit of a key.
    factors = np.empty(0, np.float32) if norms is None else np.abs(norms)
    shift, scale = np.uint32(_SHIFTS[dtype][0]), np.float32(_SHIFTS[dtype][1])
    total, power, kept_mass, n_eff, s_eff = np.empty((5, rows))
    counts, zeros = np.empty((2, rows), np.int64)

    _in_parallel(rows, columns, lambda part: sums(words[part], factors, shift, scale, total[part], power[part]))
    if not np.isfinite(total).all():
        raise NonFiniteError("scores hold NaN or infinity")
    if rule.counts is not None:
        counts[:] = rule.counts
    outputs = (total, power, counts, zeros, kept_mass, n_eff, s_eff)
    beta, (n, m) = rule.beta or 0.0, rule.pattern or (0, 0)
    if rule.pattern is not None:
        counts[:] = columns // m * n

    def cut(part: slice) -> None:
        own = [output[part] for output in outputs]
        if norms is None and words.itemsize == 2:
            cut16(words[part], shift, scale, beta, n, m, *own)
        else:
            cut32(words[part], factors, shift, scale, beta, n, m, *own)

    _in_parallel(rows, columns, cut)
    return RowFigures(counts, zeros, kept_mass, total, n_eff, s_eff)


def _in_parallel(rows: int, columns: int, work: Callable[[slice], Any]) -> None:
    """Share rows among threads. A free thread takes the next piece; this thread starts without waiting for the others."""
    step = max(1, _PIECE // columns)
    parts = iter([slice(first, min(first + step, rows)) for first in range(0, rows, step)])

    def work_on_parts() -> None:
        for part in parts:
            work(part)

    helpers = min(_threads(), -(-rows // step)) - 1
    others = [_pool(helpers).submit(work_on_parts) for _ in range(helpers)]
    work_on_parts()
    for other in others:
        if not other.cancel():
            other.result()


def _threads() -> int:
    """The number of threads that torch uses, or would use if it were loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    requested = os.environ.get("OMP_NUM_THREADS", "")
    return int(requested) if requested.isdigit() and int(requested) else len(os.sched_getaffinity(0))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-rows")
