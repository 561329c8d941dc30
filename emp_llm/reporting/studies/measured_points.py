"""Pruned models with their measurements, as typed values: a matrix, the result of a suite, and a point."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from emp_llm.evaluation.values import Value
from emp_llm.options.recipe import MatchBy
from emp_llm.records.run_report import FitRecord, Quartiles, StructureRecord

_GRID = np.linspace(0, 1, 201)
_QUARTERS = np.array([0, 0.25, 0.5, 0.75, 1])


@dataclass(frozen=True)
class MatrixStats:
    """A matrix, or all experts' matrices of one role in one block.

    Attributes:
        role, block: of the layer; block None outside of the blocks.
        weights, rows: their numbers.
        kept: number of weights kept.
        kept_fraction: spread over the rows.
        effective_share: mean of N_eff / N over the groups; None for methods without an effective number.
        group_size: N, the number of weights in a group.
        s_eff: spread over the groups; s_eff_mean: its mean.
        bound: mean over the groups of the lower bound on s_eff (theorem 4.2); None for orders other than 2.
        margin: smallest s_eff - bound of a group.
    """

    role: str
    block: int | None
    weights: int
    rows: int
    kept: int
    kept_fraction: Quartiles
    effective_share: float | None = None
    group_size: int | None = None
    s_eff: Quartiles | None = None
    s_eff_mean: float | None = None
    bound: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class WholeGroup:
    """The effective number of all targets as one group (--group all).

    Attributes:
        weights: N, the number of weights of the targets.
        n_eff, s_eff: effective number and effective mass.
        bound: the lower bound on s_eff; None for orders other than 2.
    """

    weights: int
    n_eff: float
    s_eff: float | None
    bound: float | None


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite on one model.

    Attributes:
        suite: its name.
        key: text, tasks, limit, dtype and quantisation as JSON; results with equal keys are comparable.
        values: measure -> value, from `measured_values.values_of`.
    """

    suite: str
    key: str
    values: dict[str, Value]


@dataclass(frozen=True)
class LayerFit:
    """The fit of a layer to the calibration text; `role` as in `MatrixStats`."""

    name: str
    role: str
    fit: FitRecord


@dataclass(frozen=True)
class MeasuredPoint:
    """A pruned model, or a model that was only measured or evaluated.

    Attributes:
        id: the path that it was read from; unique.
        name: of its folder or file, for display.
        model: the dense model's name as the user gave it; identity: of its weights, or the name if that is unknown.
        method: of the recipe; None for the dense model itself.
        beta, order: of the effective number; None for uniform methods.
        group: the set of weights that compete; scope: the targets ("mlp", "mlp without lm_head").
        relative: whether the norms are those relative to the outputs.
        variant: other differences from points of the same method, in words; usually empty.
        match, baseline_of: for a uniform baseline, the total or the matrices that it matches, and the id of the EMP point.
        sparsity, sparsity_of_all: of the targets, and of all parameters; None if unknown.
        pruned: whether it is a pruned model; the point of a measure is not, and has matrices too.
        matrices: of the targets, each expert alone; whole: the effective number of all targets as one group.
        fits: of the layers, by a refit, SparseGPT or ADMM.
        structure: the removed heads and neurons; None if weights were pruned.
        results: one for each suite; dense: those of the dense model in the same run.
        signature: recipe and sparsity as JSON; equal in a run's report and in results of its checkpoint.
        masks: a hash of the masks, in sweeps; else empty.
        matches: the run that a uniform baseline matches (--match), as in its recipe.
        facts: name -> text for the head of the report.
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
    relative: bool = False
    variant: str = ""
    match: MatchBy | None = None
    baseline_of: str | None = None
    sparsity: float | None = None
    sparsity_of_all: float | None = None
    pruned: bool = True
    matrices: tuple[MatrixStats, ...] = ()
    whole: WholeGroup | None = None
    fits: tuple[LayerFit, ...] = ()
    structure: StructureRecord | None = None
    results: tuple[SuiteResult, ...] = ()
    dense: tuple[SuiteResult, ...] = ()
    signature: str = ""
    masks: str = ""
    matches: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def adaptive(self) -> bool:
        return self.method is not None and self.method.startswith("emp-")

    @property
    def criterion(self) -> str:
        return (self.method or "").removeprefix("emp-")

    def result_of(self, key: str) -> SuiteResult | None:
        """The result of the suite with this key; None if it was not measured."""
        return next((result for result in self.results if result.key == key), None)


def pooled(spreads: Sequence[Quartiles], weights: Sequence[float]) -> Quartiles:
    """The spread of several populations together, from the spread of each.

    min and max are exact. Quartiles are those of the mixture if each population is uniform between its own quartiles.

    Args:
        spreads: of the populations, one or more.
        weights: sizes of the populations.
    """
    if len(spreads) == 1:
        return spreads[0]
    values = np.concatenate([np.interp(_GRID, _QUARTERS, spread.values) for spread in spreads])
    share = np.repeat(np.asarray(weights, dtype=float), len(_GRID))
    order = np.argsort(values, kind="stable")
    values, share = values[order], share[order]
    position = (np.cumsum(share) - share / 2) / share.sum()
    q1, median, q3 = (float(value) for value in np.interp([0.25, 0.5, 0.75], position, values))
    return Quartiles(min=float(values[0]), q1=q1, median=median, q3=q3, max=float(values[-1]))


def by_role_and_block(matrices: Sequence[MatrixStats]) -> dict[tuple[str, int | None], MatrixStats]:
    """(role, block) -> matrix. The matrices of a mixture's experts, which share both, are pooled."""
    groups: dict[tuple[str, int | None], list[MatrixStats]] = {}
    for matrix in matrices:
        groups.setdefault((matrix.role, matrix.block), []).append(matrix)
    return {key: members[0] if len(members) == 1 else _pooled_matrices(members) for key, members in groups.items()}


def _pooled_matrices(members: list[MatrixStats]) -> MatrixStats:
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
