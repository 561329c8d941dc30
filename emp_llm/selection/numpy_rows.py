"""Rows pruned on the CPU by numpy alone: for small models, and for machines without numba.

Nothing is compiled and torch is not imported, so a small model is pruned in the time that the
compiled kernels take to load. The bits are those of the torch reference and of the kernels: sums in
64 lanes, scores as integer keys, and the cut from sorted keys.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emp_llm.selection.rule import LANES, KeepRule, RowFigures, mass_share, row_counts

_Array = NDArray[Any]


def prune_words(words: _Array, dtype: str, norms: _Array | None, rule: KeepRule) -> RowFigures:
    """`cpu_kernel.prune_words` by numpy, with the same arguments, result and errors."""
    columns = words.shape[1]
    scores = _scores(words, dtype, norms)
    keys = scores.view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        total, power = _sum_rows(scores, lambda s: s, lambda s: s * s)
    n_eff, nu, counts = row_counts(total, power, columns, rule)
    ordered = np.sort(keys, axis=1)
    if rule.pattern is not None:
        n, m = rule.pattern
        groups = keys.reshape(-1, m)
        mask = _keep(groups, np.sort(groups, axis=1), np.full(len(groups), n)).reshape(keys.shape)
    else:
        mask = _keep(keys, ordered, counts)
    key, ties = _cut(keys, ordered, nu)
    (above,) = _sum_rows(scores * (keys > key), lambda s: s)
    nu_mass = above + ties[:, 0] * key.view(np.float32)[:, 0].astype(np.float64)
    (kept_mass,) = _sum_rows(scores * mask, lambda s: s)
    words[~mask] = 0
    zeros = columns - np.count_nonzero(words & _magnitude_bits(words), axis=1)
    return RowFigures(
        counts, zeros.astype(np.int64), kept_mass, total, n_eff, mass_share(nu_mass, total)
    )


def _scores(words: _Array, dtype: str, norms: _Array | None) -> _Array:
    """Scores in float32. Their bits are integers in the same order."""
    magnitudes = words & _magnitude_bits(words)
    if dtype == "BF16":
        values: _Array = (magnitudes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = magnitudes.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values if norms is None else values * np.abs(norms)


def _magnitude_bits(words: _Array) -> Any:
    """All bits but the sign."""
    return words.dtype.type(0x7FFF if words.itemsize == 2 else 0x7FFFFFFF)


def _sum_rows(scores: _Array, *terms: Callable[[_Array], _Array]) -> list[_Array]:
    """`reference.sum_rows` for arrays."""
    rows, columns = scores.shape
    lanes = [np.zeros((rows, LANES)) for _ in terms]
    for start in range(0, columns, LANES):
        piece = scores[:, start : start + LANES].astype(np.float64)
        for lane, term in zip(lanes, terms, strict=True):
            lane[:, : piece.shape[1]] += term(piece)
    return [_fold(lane) for lane in lanes]


def _fold(lanes: _Array) -> _Array:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _cut(keys: _Array, ordered: _Array, counts: _Array) -> tuple[_Array, _Array]:
    """The key at which each row is cut, and how many of the keys equal to it are kept; shape
    (rows, 1).
    """
    columns = keys.shape[1]
    # If none is kept, the cut is the largest key.
    places = np.minimum(columns - counts, columns - 1)[:, None]
    key = np.take_along_axis(ordered, places, axis=1)
    return key, counts[:, None] - (keys > key).sum(1, keepdims=True)


def _keep(keys: _Array, ordered: _Array, counts: _Array) -> _Array:
    """The mask of the `counts` largest keys of each row; among equal keys the lowest index is
    kept.
    """
    key, ties = _cut(keys, ordered, counts)
    tied = keys == key
    if (tied.sum(1, keepdims=True) > ties).any():
        tied &= tied.cumsum(1, dtype=np.int32) <= ties
    mask: _Array = (keys > key) | tied
    return mask
