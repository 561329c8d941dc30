"""Effective masks, numbers and bounds against rational arithmetic, textbook formulas and
properties of any scores.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emp_llm import (
    effective_mask,
    effective_mass,
    effective_mass_bound,
    effective_number,
    exponential,
    loss_change_bound,
    shift,
)
from emp_llm.selection.reference import PowerSumsOfGroup

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@st.composite
def score_rows(draw: st.DrawFn) -> Tensor:
    """A row of scores of any dtype: ties, zeros, signs, and scales from subnormal to huge."""
    dtype = draw(st.sampled_from(DTYPES))
    raw = draw(st.binary(min_size=2, max_size=300))  # drawn much faster than a list of floats
    values = np.frombuffer(raw[: len(raw) // 2 * 2], dtype=np.float16).astype(np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=4.0, neginf=-4.0).clip(-4, 4)
    if draw(st.booleans()):
        values = values.round()  # few distinct values
    limit = {torch.bfloat16: 120, torch.float16: 12, torch.float32: 120, torch.float64: 1000}[dtype]
    scale = draw(st.sampled_from([0, 1, -limit, limit]))
    return torch.from_numpy(values).ldexp(torch.tensor(scale)).to(dtype)


def exact_count(scores: Tensor, beta: Fraction = Fraction(1)) -> int:
    """clip(floor(beta * (sum s)^2 / sum s^2), 1, N) in rational arithmetic."""
    values = [abs(Fraction(value)) for value in scores.double().tolist()]
    squares = sum(value * value for value in values)
    if squares == 0:
        return len(values)
    return min(max(math.floor(beta * sum(values) ** 2 / squares), 1), len(values))


def exact_mask(scores: Tensor, count: int) -> list[bool]:
    """The `count` largest |scores|; a stable sort keeps equal ones in the order of their index."""
    values = scores.double().abs().tolist()
    kept = set(sorted(range(len(values)), key=lambda i: -values[i])[:count])
    return [i in kept for i in range(len(values))]


@given(score_rows(), st.sampled_from([1.0, 0.5, 0.75, 2.0]) | st.floats(0.1, 4.0))
@settings(max_examples=300, deadline=None)
def test_mask_is_algorithm_1_in_rational_arithmetic(scores: Tensor, beta: float) -> None:
    mask = effective_mask(scores, beta=beta)
    count = exact_count(scores, Fraction(beta))
    if beta not in (1.0, 0.5, 0.75, 2.0):
        # Where beta * N_eff is within rounding error of an integer, rationals and float64 may
        # differ by one.
        assert abs(int(mask.sum()) - count) <= 1
        count = int(mask.sum())
    assert mask.tolist() == exact_mask(scores, count)


@given(score_rows())
@settings(max_examples=120, deadline=None)
def test_numbers_decrease_with_the_order_and_stay_between_one_and_n(scores: Tensor) -> None:
    numbers = [
        float(effective_number(scores, order=q)) for q in (0, 0.5, 1, 1.5, 2, 3, 8, math.inf)
    ]
    assert all(1 <= number <= scores.numel() for number in numbers)
    assert all(high >= low * (1 - 1e-9) for high, low in pairwise(numbers))
    if bool(scores.any()):
        assert numbers[0] == int(torch.count_nonzero(scores))


@given(score_rows(), st.sampled_from([0.5, 1.0, 2.0, 3.0]))
@settings(max_examples=120, deadline=None)
def test_number_of_any_order_is_the_textbook_formula(scores: Tensor, order: float) -> None:
    if not bool(scores.any()):
        return
    omega = scores.double().abs() / scores.double().abs().max()
    omega = omega[omega > 0] / omega.sum()
    expected = (
        torch.exp(-(omega * omega.log()).sum())
        if order == 1
        else (omega**order).sum() ** (1 / (1 - order))
    )
    assert float(effective_number(scores, order=order)) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("order", [0, 0.5, 1, 1 + 1e-9, 1.5, 2, 3, 64, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_scores_give_exactly_n(order: float, dtype: torch.dtype) -> None:
    for size, value in product((1, 2, 3, 63, 64, 65, 11008), (0.1, 1 / 3, 7.0, 6e-5)):
        scores = torch.full((2, size), value, dtype=dtype)
        assert effective_number(scores, order=order).tolist() == [size, size]
        assert bool(effective_mask(scores, order=order).all())


def test_order_near_one_does_not_cancel() -> None:
    scores = torch.rand(1, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at_one = float(effective_number(scores, order=1))
    assert float(effective_number(scores, order=1 + 1e-12)) == pytest.approx(at_one, rel=1e-11)


def test_rows_of_zeros_are_kept_whole_and_rows_are_independent() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert effective_mask(scores, beta=0.5).tolist() == [
        [True] * 3,
        [True, False, False],
        [True, False, False],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_and_huge_scores_do_not_underflow_or_overflow(dtype: torch.dtype) -> None:
    counts = torch.tensor([1.0, 2.0, 4.0, 3.0, 2.0], dtype=torch.float64)
    for scale in (5e-324, 1e-310, 1e-160, 1e160, 1e300):
        assert float(effective_number(counts * scale)) == pytest.approx(
            float(effective_number(counts)), rel=1e-12
        )
    info = torch.finfo(dtype)
    scores = torch.tensor(
        [info.smallest_normal, info.smallest_normal / 2, info.max, info.max, 0.0], dtype=dtype
    )
    assert float(effective_number(scores)) == pytest.approx(2.0, rel=1e-8)
    assert effective_mask(scores).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, (0, 2), (1, 2), None])
def test_any_dimension_gives_the_mask_of_rows_of_a_transposed_copy(
    dim: int | tuple[int, ...] | None,
) -> None:
    scores = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1)).mul(3).round()
    dims = (0, 1, 2) if dim is None else (dim % 3,) if isinstance(dim, int) else dim
    others = [d for d in range(3) if d not in dims]
    rows = scores.permute(*others, *dims).reshape(-1, math.prod(scores.shape[d] for d in dims))
    mask = effective_mask(scores, dim)
    as_rows = mask.permute(*others, *dims).reshape(rows.shape)
    assert as_rows.tolist() == [exact_mask(row, exact_count(row)) for row in rows]
    shape = [scores.shape[d] for d in others]
    assert (
        list(effective_number(scores, dim).shape)
        == list(effective_mass(scores, dim).shape)
        == shape
    )


def test_integer_scores_and_scalars() -> None:
    assert effective_mask(torch.tensor([3, 3, 0, -3])).tolist() == [True, True, False, True]
    assert effective_mask(torch.tensor([True, False, True])).tolist() == [True, False, True]
    assert effective_mask(torch.tensor([2.0, -2.0, 0.0]).to(torch.float8_e4m3fn)).tolist() == [
        True,
        True,
        False,
    ]
    for dim in (None, -1, 0):
        assert bool(effective_mask(torch.tensor(2.0), dim=dim))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        *(
            (lambda dim=dim: effective_mask(torch.ones(3, 3), dim), "the scores have 2 dimensions")
            for dim in (2, -3, (0, 2))
        ),
        (lambda: effective_number(torch.ones(3, 3), (0, -2)), "names a dimension twice"),
        (lambda: effective_mask(torch.tensor([1.0, math.nan])), "NaN or infinity"),
        (lambda: effective_number(torch.tensor([1.0, math.inf]), order=0.5), "NaN or infinity"),
        (lambda: effective_mask(torch.ones(3), beta=0), "beta must be a number above 0"),
        (lambda: effective_number(torch.ones(3), order=-1), "order must be a number >= 0"),
        (lambda: effective_mask(torch.ones(0)), "empty"),
        (lambda: effective_number([1, 2, 3]), r"scores must be a tensor.*list.*as_tensor"),  # type: ignore[arg-type]
        (lambda: effective_mask(np.ones(3)), "got a value of type ndarray"),  # type: ignore[arg-type]
        (lambda: loss_change_bound([1.0], 1.0), "weights must be a tensor"),  # type: ignore[arg-type]
    ],
)
def test_wrong_input_is_named(call: Callable[[], Tensor], says: str) -> None:
    with pytest.raises((IndexError, ValueError), match=says):
        call()


@given(st.integers(2, 60), st.data())
@settings(max_examples=100, deadline=None)
def test_effective_mass_is_not_below_its_bound(size: int, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=2 * size, max_size=2 * size).filter(any))
    scores = torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.float64))
    mass = effective_mass(scores)
    number = effective_number(scores)
    assert float(mass) >= float(effective_mass_bound(number, size)) - 1e-12


@pytest.mark.parametrize("size", [3, 10, 101])
def test_bound_is_attained_at_p_nu(size: int) -> None:
    """At p_nu = center + r_(nu+1) / r_1 (vertex - center), N_eff is nu + 1; the bound is for nu,
    just below it.
    """
    for nu in range(2, size - 1):
        radius = math.sqrt((1 / (nu + 1) - 1 / size) / (1 - 1 / size))
        point = torch.full((size,), (1 - radius) / size, dtype=torch.float64)
        point[0] += radius
        mass = float(point.sort(descending=True).values[:nu].sum())
        assert mass == pytest.approx(float(effective_mass_bound(nu, size)), abs=1e-12)
    assert float(effective_mass_bound(1, size)) == 0.5
    assert float(effective_mass_bound(size, size)) == 1.0


def test_effective_mass_is_the_share_of_the_kept() -> None:
    scores = torch.tensor([[4.0, 3.0, -2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]])
    # First row: N_eff = 100 / 30, so three scores are kept, with 9 of 10. Second row: the three
    # kept hold everything.
    assert effective_mass(scores).tolist() == [0.9, 1.0]


def test_loss_change_bound_is_the_formula() -> None:
    theta = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    n = 4
    rho = 2 / 4
    expected = 6.5**2 * 7 * (1 - rho) ** 4 / (2 * rho) * (1 - math.sqrt((1 - rho) / (n * rho))) ** 2
    # floor(42.25 / 14.25) = 2.
    assert loss_change_bound(theta, hessian_trace=7) == pytest.approx(expected, rel=1e-12)
    assert loss_change_bound(theta, hessian_trace=7, n_eff=4) == 0.0


def test_maps_of_signed_scores() -> None:
    scores = torch.tensor([[-5.0, 1.0, 2.0, 2.0]])
    assert shift(scores).tolist() == [[0.0, 6.0, 7.0, 7.0]]
    # 400 / 134 = 2.99.
    assert effective_mask(shift(scores)).tolist() == [[False, False, True, True]]
    mapped = exponential(scores + 1000)
    assert mapped.argsort().tolist() == scores.argsort().tolist()
    assert bool(torch.isfinite(mapped).all())
    assert float(effective_number(mapped)) == pytest.approx(
        float(effective_number(exponential(scores))), rel=1e-5
    )


def test_gaussian_rows_lose_36_34_percent() -> None:
    weights = torch.randn(90, 11008, generator=torch.Generator().manual_seed(0))
    assert 1 - float(effective_mask(weights).double().mean()) == pytest.approx(
        1 - 2 / math.pi, abs=0.0005
    )


@pytest.mark.parametrize("order", [0, 0.5, 1, 1.7, 2, 5, math.inf])
def test_merged_moments_are_those_of_the_whole(order: float) -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(7, 300, dtype=torch.float64, generator=generator)
    scores *= 10.0 ** torch.arange(-6, 8, 2, dtype=torch.float64)[:, None]
    scores[3] = 0
    parts = PowerSumsOfGroup(order)
    for block in scores.split(2):
        parts.add(block)
    merged = float(parts.merged().number())
    assert merged == pytest.approx(
        float(effective_number(scores, dim=None, order=order)), rel=1e-12
    )
