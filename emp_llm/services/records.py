"""What was measured of pruned models, as typed values: one matrix, one run, and what it was judged by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from emp_llm.services.comparison import Value

Match = Literal["total", "matrix"]
_GRID = np.linspace(0, 1, 201)
_QUARTERS = np.array([0, 0.25, 0.5, 0.75, 1])


@dataclass(frozen=True)
class Spread:
    """min, quartiles and max of a quantity over the rows of a matrix, or of several."""

    min: float
    q1: float
    median: float
    q3: float
    max: float

    @property
    def values(self) -> tuple[float, float, float, float, float]:
        return self.min, self.q1, self.median, self.q3, self.max


@dataclass(frozen=True)
class MatrixStats:
    """A matrix, or all experts' matrices of one role in one block.

    Attributes:
        role, block: of the layer; block None outside of the blocks.
        weights, rows: how many.
        kept: how many weights stay.
        kept_fraction: over the rows.
        effective_share: N_eff / N, the mean over the groups; None where the effective number did not decide.
        group_size: N, of one group.
        s_eff: over the groups; `s_eff_mean` its mean.
        bound: the lower bound on s_eff that theorem 4.2 gives, in the mean over the groups; None for orders other than 2.
        margin: the least s_eff - bound of any group.
    """

    role: str
    block: int | None
    weights: int
    rows: int
    kept: int
    kept_fraction: Spread
    effective_share: float | None = None
    group_size: int | None = None
    s_eff: Spread | None = None
    s_eff_mean: float | None = None
    bound: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Judgement:
    """What a suite measured.

    Attributes:
        suite: its name.
        key: all that makes two of them comparable: text, tasks, limit, dtype and quantisation, as JSON.
        values: by the name of the measure, as of `comparison.values_of`.
        block_losses: of the perplexity's text, the mean loss of each block and its number of tokens, where the record has them.
    """

    suite: str
    key: str
    values: dict[str, Value]
    block_losses: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Point:
    """One pruned model, or one that was only measured or judged.

    Attributes:
        id: tells points apart: the path it was read from.
        name: of its folder or file, as it is shown.
        model: the dense model's name as the user gave it; `identity`: its fingerprint, or the name where none is known.
        method: as of a recipe; None for the dense model itself.
        beta, order: of the effective number; None for uniform methods.
        group, scope: what competed, and which layers ("mlp", "mlp without lm_head").
        variant: what else sets it apart from others of its method, in words; usually empty.
        match, baseline_of: for a uniform baseline, what it has in common with which point (its id).
        sparsity, sparsity_of_all: of the targets, and of all parameters; None where the file does not tell.
        pruned: whether it is a pruned model; a measure has matrices as if it were.
        matrices: what became of each, experts one by one.
        judgements: by suite; `dense`: of the dense model in the same run.
        signature: recipe and outcome as JSON, the same in a run's report and in the results of evaluating it.
        matches: the run whose total a uniform baseline was told to match, as its recipe names it.
        facts: what else the report shows of it, by name.
    """

    id: str
    name: str
    model: str
    identity: str
    method: str | None
    beta: float | None = None
    order: float | None = None
    group: str = "row"
    scope: str = "mlp"
    variant: str = ""
    match: Match | None = None
    baseline_of: str | None = None
    sparsity: float | None = None
    sparsity_of_all: float | None = None
    pruned: bool = True
    matrices: tuple[MatrixStats, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    dense: tuple[Judgement, ...] = ()
    signature: str = ""
    matches: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def adaptive(self) -> bool:
        return self.method is not None and self.method.startswith("emp-")

    @property
    def criterion(self) -> str:
        return (self.method or "").removeprefix("emp-")

    def judged(self, key: str) -> Judgement | None:
        """What the suite of this key measured of it."""
        return next((judgement for judgement in self.judgements if judgement.key == key), None)


def printable(text: str, limit: int = 200) -> str:
    """Text of others as it may stand in a figure or page: without control characters, and of a length that fits one."""
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def pooled(spreads: Sequence[Spread], weights: Sequence[float]) -> Spread:
    """The spread of several populations together, from their own spreads.

    min and max are exact; quartiles are those of the mixture when each population is spread evenly between its own.

    Args:
        spreads: one or more.
        weights: how large each population is.
    """
    if len(spreads) == 1:
        return spreads[0]
    values = np.concatenate([np.interp(_GRID, _QUARTERS, spread.values) for spread in spreads])
    share = np.repeat(np.asarray(weights, dtype=float), len(_GRID))
    order = np.argsort(values, kind="stable")
    values, share = values[order], share[order]
    position = (np.cumsum(share) - share / 2) / share.sum()
    q1, median, q3 = (float(value) for value in np.interp([0.25, 0.5, 0.75], position, values))
    return Spread(float(values[0]), q1, median, q3, float(values[-1]))


def by_role_and_block(matrices: Sequence[MatrixStats]) -> dict[tuple[str, int | None], MatrixStats]:
    """Matrices by role and block; those of a mixture's experts, which share both, as one."""
    groups: dict[tuple[str, int | None], list[MatrixStats]] = {}
    for matrix in matrices:
        groups.setdefault((matrix.role, matrix.block), []).append(matrix)
    return {key: members[0] if len(members) == 1 else _together(members) for key, members in groups.items()}


def _together(members: list[MatrixStats]) -> MatrixStats:
    rows = [float(member.rows) for member in members]

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(v * r for v, r in zip(known, rows, strict=True)) / sum(rows) if len(known) == len(values) else None

    spreads = [member.s_eff for member in members if member.s_eff is not None]
    margins = [member.margin for member in members if member.margin is not None]
    return MatrixStats(
        role=members[0].role,
        block=members[0].block,
        weights=sum(member.weights for member in members),
        rows=sum(member.rows for member in members),
        kept=sum(member.kept for member in members),
        kept_fraction=pooled([member.kept_fraction for member in members], rows),
        effective_share=mean([member.effective_share for member in members]),
        group_size=members[0].group_size,
        s_eff=pooled(spreads, rows) if len(spreads) == len(members) else None,
        s_eff_mean=mean([member.s_eff_mean for member in members]),
        bound=mean([member.bound for member in members]),
        margin=min(margins) if len(margins) == len(members) else None,
    )
