"""Weights, norms and counts for the tests of the kernels."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from emp_llm.selection import rows
from emp_llm.selection.criteria import InputStatistics, magnitude, wanda
from emp_llm.selection.reference import apply_selection, select_rows
from emp_llm.selection.rule import KeepRule, RowFigures, spread_counts, uniform_counts

Budget = Callable[[tuple[int, int]], KeepRule]  # from the shape of the rows


def effective(beta: float = 1.0) -> Budget:
    return lambda shape: KeepRule(beta=beta)


def ratio(sparsity: float) -> Budget:
    return lambda shape: KeepRule(counts=uniform_counts(np.full(shape[0], shape[1]), sparsity))


def total(removed: int, of: int, offset: int = 17) -> Budget:
    return lambda shape: KeepRule(
        counts=spread_counts(np.full(shape[0], shape[1]), removed, of, offset)
    )


def pattern(n: int, m: int) -> Budget:
    return lambda shape: KeepRule(pattern=(n, m))


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BUDGETS: list[Budget] = [
    effective(),
    effective(0.3),
    effective(1.7),
    ratio(0.5),
    ratio(0.0),
    total(1000, 4000),
    total(1000, 4000, 0),
    pattern(2, 4),
    pattern(1, 2),
    pattern(4, 8),
    pattern(3, 5),
]
KINDS = (
    "normal",
    "ties",
    "uniform",
    "zeros",
    "negative zeros",
    "subnormal",
    "huge",
    "heavy",
    "neighbours",
)
# (kind, shape, budget): one column, none kept, all kept, rows of zeros, less than one kept; and
# numbers that rounding takes below an integer: 0.7 * 90, and N_eff of 121 equal float32 numbers.
EDGES: list[tuple[str, tuple[int, int], Budget]] = [
    *(
        ("normal", (3, 1), budget)
        for budget in (effective(), ratio(0.5), total(2, 4), total(3999, 4000))
    ),
    *((kind, (2, 64), total(3999, 4000)) for kind in ("ties", "zeros")),
    ("ties", (1, 64), ratio(0.0)),
    ("zeros", (2, 70), effective(0.3)),
    ("heavy", (1, 64), effective(0.05)),
    ("uniform", (1, 90), effective(0.7)),
    ("uniform", (1, 121), effective()),
]
FIELDS = ("kept", "zeros", "kept_mass", "mass", "n_eff", "s_eff")


def weights(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if kind == "ties":
        values = values.sign() * torch.randint(0, 3, shape, generator=generator)
    elif kind == "uniform":
        values = torch.full(shape, 0.3)
    elif kind == "zeros":
        values = (
            values
            * (torch.rand(shape, generator=generator) < 0.2)
            * (torch.arange(shape[0])[:, None] % 2)
        )
    elif kind == "negative zeros":
        values = torch.where(torch.rand(shape, generator=generator) < 0.5, -0.0, values)
    elif kind == "subnormal":
        values = values * (1e-39 if dtype != torch.float16 else 1e-7)
    elif kind == "huge":
        values = values.clamp(-3, 3) * (1e38 if dtype != torch.float16 else 2e4)
    elif kind == "heavy":
        values = values.clamp(-4.8, 4.8) ** 7  # within float16
    # float32 numbers with equal upper halves, and the smallest and largest lower halves.
    elif kind == "neighbours":
        lower = torch.tensor([0, 1, 0xFFFE, 0xFFFF])[
            torch.randint(0, 4, shape, generator=generator)
        ]
        values = (
            (lower + (torch.randint(0x3F80, 0x3F82, shape, generator=generator) << 16))
            .int()
            .view(torch.float32)
        )
    return values.to(dtype)


def norms_of(kind: str, columns: int) -> Tensor:
    """Norms for weights of a kind; some are zero."""
    norms = torch.rand(columns, generator=torch.Generator().manual_seed(1))
    norms[5:8] = 0
    norms[8:9] = -0.0
    return norms if kind == "huge" else norms * 100


def bits(weight: Tensor) -> Tensor:
    return weight.cpu().view(torch.int32 if weight.dtype == torch.float32 else torch.int16)


def prune_plainly(weight: Tensor, norms: Tensor | None, rule: KeepRule) -> RowFigures:
    """By the reference, in place."""
    scores = magnitude(weight) if norms is None else wanda(weight, InputStatistics(norms))
    return apply_selection(weight, select_rows(scores, rule))


def prune_rows(weight: Tensor, norms: Tensor | None, rule: KeepRule) -> RowFigures:
    """By the compiled kernel where it takes the dtype and the rule, else by the reference; in
    place.
    """
    name = rows._name(weight)
    if not rows.words_supported(name, rule):
        return prune_plainly(weight, norms, rule)
    factors = None if norms is None else norms.numpy()
    return RowFigures(
        *map(torch.from_numpy, rows.prune_words(rows.words_of(weight), name, factors, rule))
    )
