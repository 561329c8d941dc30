"""ADMM on bare tensors, against an implementation in float64, row by row, by plain solves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_solvers import KINDS, inputs_of, layer, moments
from torch import Tensor

from emp_llm.common import machine
from emp_llm.selection.rule import NonFiniteError
from emp_llm.update.least_squares import output_error, refit_rows
from emp_llm.update.update import admm, sparsegpt


def largest(values: list[float], count: int) -> list[bool]:
    """The mask of the largest; among equals the first."""
    order = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))
    return [place in order[:count] for place in range(len(values))]


def slow_admm(
    weight: Tensor, x: Tensor, y: Tensor, counts: list[int], damping: float
) -> tuple[Tensor, Tensor]:
    """ADMM from its definition. Each row: the outputs y[:, r] from the inputs x, with counts[r]
    weights.

    The augmented Lagrangian |x w - y|^2 + shift |w - dense|^2 + sum_j rho_j (w - z + u)_j^2 with
    rho_j relative to the second moment of input j. It is minimised over w, and over z with few
    weights, in turn.
    """
    gram = x.T @ x
    shift = damping * gram.diagonal().mean()
    own = gram.diagonal() + shift
    fitted = torch.zeros_like(weight, dtype=torch.float64)
    masks = torch.zeros_like(weight, dtype=torch.bool)
    for row, dense in enumerate(weight.double()):
        right = x.T @ y[:, row] + shift * dense
        point = dense
        dual = torch.zeros_like(dense)
        before = 0.15
        penalties = torch.logspace(math.log10(0.15), 0, 6, dtype=torch.float64).tolist()
        for penalty, steps in zip(penalties, (4, 5, 6, 7, 8, 5), strict=True):
            dual = dual * (before / penalty)
            before = penalty
            for _ in range(steps):
                moved = point + dual
                mask = torch.tensor(largest((moved * own.sqrt()).tolist(), counts[row]))
                split = moved * mask
                dual = moved - split
                matrix = gram + torch.diag(shift + penalty * own)
                point = torch.linalg.solve(matrix, right + penalty * own * (split - dual))
        fitted[row], masks[row] = split, mask
    return fitted, masks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("two_streams", [False, True])
def test_agrees_with_a_slow_one(
    kind: str, two_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice can differ where two weights matter equally, up to rounding; so the error
    decides. Stages that are searched in bfloat16 differ in more choices, and not in the error.
    """
    x = inputs_of(kind, 48)
    weight = layer(12, 48)[0]
    y = x @ weight.double().T
    xhat = (
        x + 0.1 * x.std(0) * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        if two_streams
        else x
    )
    counts = [4 * row for row in range(12)]
    right = moments(y, xhat) if two_streams else None
    coarse = admm(weight, moments(xhat), counts=torch.tensor(counts), right=right)
    monkeypatch.setattr(machine, "cpu_fields", dict)
    solution = admm(weight, moments(xhat), counts=torch.tensor(counts), right=right)
    expected, mask = slow_admm(weight, xhat, y, counts, 0.01)
    assert solution.mask.sum(1).tolist() == counts
    assert float((solution.mask != mask).double().mean()) < 0.02
    same = (solution.mask == mask).all(1)
    assert int(same.sum()) >= 8
    torch.testing.assert_close(solution.weight.double()[same], expected[same], rtol=1e-2, atol=1e-2)
    errors = [
        float((xhat @ each.double().T - y).square().sum())
        for each in (solution.weight, expected, coarse.weight)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.03)
    assert errors[2] == pytest.approx(errors[1], rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 9),
    groups=st.integers(1, 10),
    tokens=st.integers(1, 60),
    kind=st.sampled_from(["rows", "matrix", "pattern"]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 10**6),
)
def test_keeps_the_exact_number(
    outputs: int, groups: int, tokens: int, kind: str, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = 4 * groups
    x = scale * torch.randn(tokens, inputs, generator=generator)
    # Sometimes an input that is always zero.
    x[:, :1] *= torch.randint(0, 2, (1,), generator=generator)
    counts = torch.randint(0, inputs + 1, (outputs,), generator=generator)
    total = counts.sum(0, keepdim=True)
    four = seed % 3 + 1
    options = {
        "rows": {"counts": counts},
        "matrix": {"counts": total},
        "pattern": {"pattern": (four, 4)},
    }[kind]
    solution = admm(layer(outputs, inputs, seed=seed)[0], x.T @ x, **options)
    assert bool(solution.weight.isfinite().all())
    assert not bool(solution.weight[~solution.mask].any())
    kept = {
        "rows": solution.mask.sum(1),
        "matrix": solution.mask.sum()[None],
        "pattern": solution.mask.reshape(-1, 4).sum(1),
    }[kind]
    assert bool(
        (kept == {"rows": counts, "matrix": total, "pattern": torch.tensor(four)}[kind]).all()
    )


@pytest.mark.parametrize(
    "scales", [torch.linspace(1, 2, 24), torch.zeros(24)], ids=["inputs", "no inputs"]
)
def test_without_correlations_the_largest_stay(scales: Tensor) -> None:
    """Then the largest |w_ij| ||x_j|| are the best. The search may take one of two that matter
    about equally.
    """
    weight = layer(6, 24)[0]
    matter = weight * scales if bool(scales.any()) else weight
    solution = admm(weight, torch.diag(scales.square()), counts=torch.full((6,), 10), damping=0.01)
    best = torch.tensor([largest(row, 10) for row in matter.tolist()])
    lost, least = ((matter * ~mask).square().sum() for mask in (solution.mask, best))
    assert float(lost) < 1.005 * float(least)
    assert int((solution.mask != best).sum()) <= 4


def test_its_masks_are_better() -> None:
    """After a refit, they lose less than those of SparseGPT and than the largest |w| ||x||."""
    x = inputs_of("plain")
    weight = layer(40, 96)[0]
    gram = moments(x)
    wanda = torch.tensor(
        [largest(row, 48) for row in (weight * x.square().sum(0).sqrt().float()).tolist()]
    )
    mine = admm(weight, gram, counts=torch.full((40,), 48))
    masks = [wanda, sparsegpt(weight, gram, count=40 * 48).mask, mine.mask]
    fitted = [refit_rows(weight, mask, gram).weight for mask in masks]
    first, second, third = (float(output_error(each, weight, gram).sum()) for each in fitted)
    assert third < 0.9 * min(first, second)
    # Its own weights are nearly the best.
    assert third <= float(output_error(mine.weight, weight, gram).sum()) < 1.05 * third


def test_no_matrix_of_moments() -> None:
    with pytest.raises(NonFiniteError, match="no matrix of second moments"):
        admm(torch.ones(2, 24), torch.full((24, 24), -9.0).fill_diagonal_(1.0), pattern=(2, 4))
